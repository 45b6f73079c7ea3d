"""Compiled models: where their graphs are cut, and when they are compiled anew."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SPLIT = "fastcomm/reducer/features/graph_split.py"
COMPILED = "fastcomm/reducer/features/compiled.py"
TESTS = "tests/reducer/features/test_compiled.py"


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
        name="compiled: an operation that torch passes over ends no piece",
        file=SPLIT,
        within="PlannedSplit.add_param_args",
        old="self._positions[node] <= self._ends[0]",
        new="self._positions[node] == self._ends[0]",
        tests=_test("test_parameters_are_seen_in_whatever_way_they_are_used"),
    ),
    Mutation(
        name="compiled: torch keeps the model by its backend",
        file=COMPILED,
        within="Compiled._compile",
        old="self._core",
        new="lambda: self._core()",
        tests=_test("test_a_compiled_model_is_not_kept_alive"),
    ),
)
