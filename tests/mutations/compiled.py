"""Compiled models: where their graphs are cut, and when they are compiled anew."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SPLIT = "fastcomm/reducer/features/graph_split.py"
COMPILED = "fastcomm/reducer/features/compiled.py"
TESTS = "tests/reducer/features/test_compiled.py"
SHOWING = "tests/insight/test_showing.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


_ENDS = _test("test_buckets_end_where_their_parameters_are_first_used_and_in_order")

MUTATIONS = (
    Mutation(
        name="compiled: a gradient is complete at its parameter's last use",
        file=SPLIT,
        within="PlannedSplit.compile_fn",
        old="min(self._positions[user] for user in node.users)",
        new="max(self._positions[user] for user in node.users)",
        tests=_test("test_models_of_all_kinds_are_cut"),
    ),
    Mutation(
        name="compiled: a bucket is full at its first gradient",
        file=SPLIT,
        within="full_at",
        old="min(position, complete.get(number, position))",
        new="max(position, complete.get(number, position))",
        tests=_ENDS,
    ),
    Mutation(
        name="compiled: graphs are cut for a bucket that waits for another",
        file=SPLIT,
        within="full_at",
        old="not found or complete[number] < found[-1]",
        new="complete[number] not in found",
        tests=_ENDS,
    ),
    Mutation(
        name="compiled: graphs are cut for sparse gradients",
        file=COMPILED,
        within="Backend.__call__",
        old="[bucket for bucket in buckets if not bucket.waits_in_launch]",
        new="list(buckets)",
        tests=_test("test_a_sparse_embedding_is_compiled_and_no_graph_is_cut_for_it"),
    ),
    Mutation(
        name="compiled: graphs are cut for the last bucket",
        file=SPLIT,
        within="full_at",
        old="sorted(complete)[:-1]",
        new="sorted(complete)",
        tests=_ENDS,
    ),
    Mutation(
        name="compiled: named arguments and lists are not seen",
        file=SPLIT,
        within="PlannedSplit.add_param_args",
        old="node.all_input_nodes",
        new="node.args",
        tests=_test("test_parameters_are_seen_in_whatever_way_they_are_used"),
    ),
    Mutation(
        name="compiled: an operation that torch passes over ends no piece",
        file=SPLIT,
        within="PlannedSplit.add_param_args",
        old="self._positions[node] <= self._ends[0]",
        new="self._positions[node] == self._ends[0]",
        tests=_test("test_parameters_are_seen_in_whatever_way_they_are_used"),
    ),
    Mutation(
        name="compiled: graphs without gradients are cut",
        file=COMPILED,
        within="Backend.__call__",
        old="len(buckets) < 2 or not torch.is_grad_enabled()",
        new="len(buckets) < 2",
        tests=_test("test_what_runs_without_gradients_is_not_cut"),
    ),
    Mutation(
        name="compiled: graphs are cut without overlap",
        file=COMPILED,
        within="Backend.__call__",
        old="reducer is None or not reducer.overlap",
        new="reducer is None",
        tests=_test("test_a_graph_is_not_cut_for_one_bucket_or_without_overlap"),
    ),
    Mutation(
        name="compiled: graphs do not follow other buckets",
        file=COMPILED,
        within="Compiled._prepare",
        old="self._forward_as_planned = self._compile().forward",
        new="",
        tests=_test("test_a_model_compiled_and_run_before_attach_is_cut_afterwards"),
    ),
    Mutation(
        name="compiled: the same buckets have graphs compiled anew",
        file=COMPILED,
        within="Compiled._prepare",
        old="plan != self._plan",
        new="True",
        tests=_test("test_graphs_follow_a_refresh_and_are_compiled_anew_only_for_other_buckets"),
    ),
    Mutation(
        name="compiled: torch keeps the model by its backend",
        file=COMPILED,
        within="Compiled._compile",
        old="self._reducer",
        new="lambda: self._reducer()",
        tests=_test("test_a_compiled_model_is_not_kept_alive"),
    ),
    Mutation(
        name="compiled: guard_filter_fn goes to the backend",
        file=COMPILED,
        within="_own_options",
        old='options.pop("guard_filter_fn")',
        new='options["guard_filter_fn"]',
        tests=_test("test_modes_and_options_go_to_the_backend_of_each_piece"),
    ),
    Mutation(
        name="compiled: a graph that stays whole is not told",
        file=SPLIT,
        within="PlannedSplit.compile_fn",
        old="self.whole_for = parameters[first]",
        new="pass",
        tests=_test("test_a_graph_that_cannot_be_cut_is_warned_of"),
    ),
    Mutation(
        name="compiled: launching is taken for a part of the backward",
        file="fastcomm/insight/steps.py",
        within="share_of_gradients.computing",
        old="end - begin - length(launching)",
        new="end - begin",
        tests=(f"{SHOWING}::test_launching_is_not_taken_for_a_backward",),
    ),
    Mutation(
        name="timeline: gradients come at once where launching takes most of the backward",
        file="fastcomm/insight/steps.py",
        within="share_of_gradients",
        old="computing(begin, step.backward_end)",
        new="step.backward_end - begin",
        tests=(f"{SHOWING}::test_gradients_between_long_launches_do_not_come_at_once",),
    ),
    Mutation(
        name="compiled: a step without a forward has no backward to compare with",
        file="fastcomm/insight/steps.py",
        within="share_of_gradients",
        old="step.backward_begin if step.forward_ns else before.finished",
        new="step.backward_begin",
        tests=(f"{SHOWING}::test_gradients_that_come_at_once_are_told_with_advice",),
    ),
    Mutation(
        name="compiled: a graph with the parameters of one bucket is told to be whole",
        file=SPLIT,
        within="PlannedSplit.compile_fn",
        old="len(self.buckets) == 1 and len({number for number, _ in used}) > 1",
        new="len(self.buckets) == 1",
        tests=_test("test_models_of_all_kinds_are_cut"),
    ),
)
