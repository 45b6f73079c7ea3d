"""Steps that all ranks drop together, from a vote or a NaN to the optimizer."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SKIPPING = "fastcomm/reducer/features/skip.py"
STEPS = "fastcomm/reducer/optimizer_hooks.py"
TESTS = "tests/reducer/features/test_skips.py"
OPTIMIZER_TESTS = "tests/reducer/features/test_skipped_optimizers.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


def _of_optimizers(name: str) -> tuple[str, ...]:
    return (f"{OPTIMIZER_TESTS}::{name}",)


_VOTE = _test("test_a_vote_of_one_rank_makes_all_ranks_skip")
_EXCEPTION = _test("test_an_exception_of_one_rank_makes_all_ranks_skip")
_NONFINITE = _test("test_a_nonfinite_gradient_of_one_rank_makes_all_ranks_skip")

MUTATIONS = (
    Mutation(
        name="skips: an optimizer of two models steps with neither until both are reduced",
        file=STEPS,
        within="_skipping",
        old="[one for one in found if known.left_out.get(one) != one.n_skipped]",
        new="found",
        tests=_of_optimizers(
            "test_a_model_of_two_goes_on_though_the_other_one_has_dropped_its_last_round"
        ),
    ),
    Mutation(
        name="skips: gradients that no optimizer has make a vote late",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._refuse_late_vote",
        old="not self.steps.n",
        new="True",
        tests=_test("test_gradients_that_no_optimizer_has_make_no_vote_late"),
    ),
    Mutation(
        name="skips: gradients before the first step make no vote late",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._refuse_late_vote",
        old="not self.steps.n",
        new="False",
        tests=_test("test_gradients_that_no_optimizer_has_make_no_vote_late"),
    ),
    Mutation(
        name="skips: over shm a vote goes with no other op",
        file="kernels/shm/protocol.c",
        within="same_collective",
        old="a->op == b->op || a->op == SHM_SKIP || b->op == SHM_SKIP",
        new="a->op == b->op",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: over shm only the rank that votes hears of it",
        file="kernels/shm/protocol.c",
        within="compare",
        old="c->is_skipped = c->is_skipped || theirs->op == SHM_SKIP;",
        new="c->is_skipped = c->descriptor.op == SHM_SKIP;",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a group compares the ops of ranks that vote",
        file="fastcomm/transports/group/call.py",
        within="with_votes",
        old="[replace(call, op=SKIP) for call in calls] if is_skipped else calls",
        new="calls",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: over NCCL a vote is nothing but zeros",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.launch_vote",
        old='float("nan")',
        new="0",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a vote counts for all rounds to come",
        file="fastcomm/reducer/features/skip.py",
        within="Skipping.after_round",
        old="self.vote = self._failed = None",
        new="self._failed = None",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a vote may come after the reduction",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._refuse_late_vote",
        old="is_late",
        new="False",
        tests=_test("test_a_vote_comes_too_late_once_gradients_are_reduced"),
    ),
    Mutation(
        name="skips: gradients of a step that was made count as reduced and not stepped",
        file="fastcomm/reducer/gradient_state.pyx",
        within="GradientState.has_unstepped",
        old="if gradient is not None and self._is_fresh(i, None) and self._is_known(i, gradient):",
        new="if gradient is not None and self._is_known(i, gradient):",
        tests=_test("test_a_vote_comes_too_late_once_gradients_are_reduced"),
    ),
    Mutation(
        name="skips: a dropped step counts as one",
        file="fastcomm/reducer/reducer.py",
        within="Reducer.after_step",
        old=("if stepped is None or self.skipped:\n    return"),
        new="if stepped is None or self.skipped:\n    self.steps.n += 1\n    return",
        tests=_test("test_a_rank_may_leave_the_iteration_once_it_has_taken_its_part"),
    ),
    Mutation(
        name="skips: gradients stay where they are not finite",
        file="fastcomm/reducer/round.py",
        within="Round._settle_or_drop",
        old="any(verdicts)",
        new="False",
        tests=_test("test_a_nan_in_an_early_micro_batch_drops_the_whole_step"),
    ),
    Mutation(
        name="skips: an exception in a block abandons the round",
        file="fastcomm/reducer/features/skip.py",
        within="Skipping.keeps_open",
        old="self._n_blocks > 0",
        new="False",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: an exception in the reduction abandons the round, in a block, too",
        file="fastcomm/reducer/round.py",
        within="Round.finish",
        old="self.fail(error)",
        new="self.abort(error)",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: a round stays open after another exception in a block",
        file="fastcomm/reducer/features/skip.py",
        within="Skipping._abort_failed",
        old="self._failed is not None and not self._n_blocks",
        new="False",
        tests=_test("test_other_exceptions_abandon_the_round_as_always"),
    ),
    Mutation(
        name="skips: a block takes errors of fastcomm for exceptions of this rank",
        file="fastcomm/reducer/features/skip.py",
        within="Skipping.skip_on",
        old="not isinstance(error, exceptions) or isinstance(error, FastcommError)",
        new="not isinstance(error, exceptions)",
        tests=_test("test_other_exceptions_abandon_the_round_as_always"),
    ),
    Mutation(
        name="skips: an optimizer steps its parameters without gradients",
        file=STEPS,
        within="_idle",
        old='{**group, "params": []}',
        new="{**group}",
        tests=_of_optimizers("test_an_optimizer_that_decays_without_gradients_does_not"),
    ),
    Mutation(
        name="skips: what an optimizer changes in its groups stays",
        file=STEPS,
        within="_idle",
        old='{**group, "params": []}',
        new='group.__setitem__("params", []) or group',
        tests=_of_optimizers("test_an_optimizer_that_decays_without_gradients_does_not"),
    ),
    Mutation(
        name="skips: after a closure the model whose round stands is stepped",
        file=STEPS,
        within="_drop_where_skipped",
        old="parameter.grad = None",
        new="pass",
        tests=_of_optimizers("test_an_optimizer_of_two_models_skips_for_either"),
    ),
    Mutation(
        name="skips: a ShardedOptimizer steps what is dropped",
        file="fastcomm/optim/sharded.py",
        within="ShardedOptimizer.step",
        old="self.reducer.skipped",
        new="False",
        tests=_of_optimizers("test_an_optimizer_that_decays_without_gradients_does_not"),
    ),
    Mutation(
        name="skips: each rank looks at its own shard of the result",
        file="fastcomm/reducer/statistics.py",
        within="n_nonfinite_in_result",
        old=("if _in_shards(buckets) is not None:\n    comm.all_reduce(here)"),
        new="",
        tests=_of_optimizers("test_a_sharded_optimizer_skips"),
    ),
    Mutation(
        name="skips: every rank logs",
        file=SKIPPING,
        within="Skipping._conclude",
        old="self._comm.rank != 0",
        new="False",
        tests=_NONFINITE,
    ),
    Mutation(
        name="skips: ranks talk in a join(), where one may have no data",
        file=SKIPPING,
        within="Skipping._conclude",
        old="is_joining(self._comm)",
        new="False",
        tests=_test("test_ranks_without_data_follow_those_that_skip"),
    ),
    Mutation(
        name="skips: over shm a vote finds no ranks without data",
        file="kernels/shm/protocol.c",
        within="admits_shadows",
        old="|| d->op == SHM_SKIP",
        new="",
        tests=_test("test_ranks_without_data_follow_those_that_skip"),
    ),
    Mutation(
        name="skips: in a group a vote finds no ranks without data",
        file="fastcomm/transports/group/call.py",
        within="Call.admits_shadows",
        old='("mean", SKIP, *WEIGHTED_OPS.values())',
        new='("mean", *WEIGHTED_OPS.values())',
        tests=_test("test_ranks_without_data_follow_those_that_skip"),
    ),
    Mutation(
        name="skips: only the first bucket carries a vote",
        file="fastcomm/reducer/round.py",
        within="Round._settle_or_drop",
        old="any(bucket.is_skipped() for bucket in self.buckets)",
        new="self.buckets[0].is_skipped()",
        tests=_test("test_a_vote_inside_a_backward_counts"),
    ),
    Mutation(
        name="skips: a vote outlives its model",
        file=SKIPPING,
        within="Skipping.dropped",
        old="self.vote: str | None = None",
        new='self.vote: str | None = getattr(self, "vote", None)',
        tests=_test("test_all_ranks_may_vote_and_a_second_call_is_harmless"),
    ),
    Mutation(
        name="skips: ranks that step alone skip what all had dropped before",
        file="fastcomm/reducer/reducer.py",
        within="Reducer.skipped",
        old="skipping is None or self.steps_alone",
        new="skipping is None",
        tests=("tests/optim/test_syncs.py::test_steps_of_several_optimizers_count_as_one",),
    ),
    Mutation(
        name="skips: a vote may come after the reduction of shards",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.has_unstepped",
        old="is_pending or self.gradient_state.has_unstepped(counts_unclaimed)",
        new="self.gradient_state.has_unstepped(counts_unclaimed)",
        tests=_of_optimizers("test_a_sharded_optimizer_skips"),
    ),
    Mutation(
        name="skips: gradients under way without this rank's are missed",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.launch_vote",
        old="self._is_vote = True",
        new="",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: after an exception this rank's part waits for the optimizer's step",
        file="fastcomm/reducer/features/skip.py",
        within="Skipping.skip_on",
        old="if self._failed is not None:\n    synchronize()",
        new="",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: an optimizer of two models skips if both do",
        file=STEPS,
        within="_skipping",
        old="[one for one in found if known.left_out.get(one) != one.n_skipped]",
        new="[]",
        tests=_of_optimizers("test_an_optimizer_of_two_models_skips_for_either"),
    ),
    Mutation(
        name="skips: over NCCL a graph captures what waits for the device",
        file=SKIPPING,
        within="Skipping.before_round",
        old="self._comm.has_streams",
        new="False",
        tests=("tests/transports/nccl/test_launches.py::test_weights_and_skips_are_not_captured",),
    ),
    Mutation(
        name="skips: a rank whose talk was interrupted talks once more",
        file=SKIPPING,
        within="Skipping._talking",
        old="self._is_talking",
        new="False",
        tests=_test("test_ranks_do_not_talk_twice_about_a_round"),
    ),
)
