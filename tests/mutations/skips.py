"""Steps that all ranks drop together, from a vote or a NaN to the optimizer."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SKIPPING = "fastcomm/reducer/skipping.py"
ENDING = "fastcomm/reducer/ending.py"
STEPS = "fastcomm/reducer/optimizer_steps.py"
REDUCED = "fastcomm/reducer/reduced.py"
HELPERS = "fastcomm/reducer/torch_helpers.py"
TESTS = "tests/reducer/test_skips.py"
OPTIMIZER_TESTS = "tests/reducer/test_skipped_optimizers.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


def _of_optimizers(name: str) -> tuple[str, ...]:
    return (f"{OPTIMIZER_TESTS}::{name}",)


_VOTE = _test("test_a_vote_of_one_rank_makes_all_ranks_skip")
_EXCEPTION = _test("test_an_exception_of_one_rank_makes_all_ranks_skip")
_NONFINITE = _test("test_a_nonfinite_gradient_of_one_rank_makes_all_ranks_skip")
_SCALER = _of_optimizers("test_a_grad_scaler_goes_on_working")

MUTATIONS = (
    Mutation(
        name="skips: an optimizer of two models steps with neither until both are reduced",
        file=STEPS,
        within="_skipping",
        old="[one for one in found if steps.left_out.get(one) != one.n_skipped]",
        new="found",
        tests=_of_optimizers(
            "test_a_model_of_two_goes_on_though_the_other_one_has_dropped_its_last_round"
        ),
    ),
    Mutation(
        name="skips: gradients that no optimizer has make a vote late",
        file=REDUCED,
        within="ReducedGradients._refuse_late_vote",
        old="not self._n_steps",
        new="True",
        tests=_test("test_gradients_that_no_optimizer_has_make_no_vote_late"),
    ),
    Mutation(
        name="skips: gradients before the first step make no vote late",
        file=REDUCED,
        within="ReducedGradients._refuse_late_vote",
        old="not self._n_steps",
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
        name="skips: a vote does not reach ranks with hooks",
        file="fastcomm/reducer/hooked_bucket.py",
        within="HookedBucket.launch",
        old="presence[-1] = op == SKIP",
        new="presence[-1] = 0",
        tests=_test("test_hooks_reduce_what_is_skipped"),
    ),
    Mutation(
        name="skips: a vote counts for all rounds to come",
        file=ENDING,
        within="_close",
        old="reducer._skipping.vote = None",
        new="",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a vote may come after the reduction",
        file=REDUCED,
        within="ReducedGradients._refuse_late_vote",
        old="is_late",
        new="False",
        tests=_test("test_a_vote_comes_too_late_once_gradients_are_reduced"),
    ),
    Mutation(
        name="skips: gradients of a step that was made count as reduced and not stepped",
        file="fastcomm/reducer/provenance.pyx",
        within="Provenance.has_unstepped",
        old="if gradient is not None and self._is_fresh(i, None) and self._is_known(i, gradient):",
        new="if gradient is not None and self._is_known(i, gradient):",
        tests=_test("test_a_vote_comes_too_late_once_gradients_are_reduced"),
    ),
    Mutation(
        name="skips: a dropped step counts as one",
        file=REDUCED,
        within="ReducedGradients.after_step",
        old=("if shares is None or self.skipped:\n    return"),
        new=("if shares is None or self.skipped:\n    self._n_steps += 1\n    return"),
        tests=_test("test_a_rank_may_leave_the_iteration_once_it_has_taken_its_part"),
    ),
    Mutation(
        name="skips: gradients stay where they are not finite",
        file="fastcomm/reducer/round.py",
        within="Round.finish",
        old="is_skipped",
        new="False",
        tests=_test("test_a_nan_in_an_early_micro_batch_drops_the_whole_step"),
    ),
    Mutation(
        name="skips: an exception in a block abandons the round",
        file="fastcomm/reducer/reducer.py",
        within="Reducer._backward_was_dropped",
        old="self._skipping.n_blocks",
        new="False",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: an exception in the reduction abandons the round, in a block, too",
        file=ENDING,
        within="end",
        old="reducer._skipping.n_blocks",
        new="False",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: a round stays open after another exception in a block",
        file=ENDING,
        within="_leave_dropped",
        old="ending is not None and ending.was_dropped and not reducer._skipping.n_blocks",
        new="ending is not None and False",
        tests=_test("test_other_exceptions_abandon_the_round_as_always"),
    ),
    Mutation(
        name="skips: a block takes errors of fastcomm for exceptions of this rank",
        file=ENDING,
        within="skip_on",
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
        name="skips: after a closure parameters of no reducer are stepped",
        file=STEPS,
        within="_drop_where_skipped",
        old="parameter.grad = None",
        new="pass",
        tests=_of_optimizers("test_what_a_closure_finds_is_skipped"),
    ),
    Mutation(
        name="skips: GradScaler keeps its scale",
        file=HELPERS,
        within="_noticing.noticing",
        old="float(is_nonfinite)",
        new="0.0",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: GradScaler looks at shares that are dropped",
        file=HELPERS,
        within="_agreeing.agreed",
        old="held is None or skipped_nonfinite(optimizer) is not None",
        new="held is None",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: GradScaler lowers its scale for a vote",
        file=SKIPPING,
        within="Skipping._conclude",
        old="all(cause.vote is None for cause in causes.values())",
        new="True",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: a ShardedOptimizer steps what is dropped",
        file="fastcomm/reducer/sharded.py",
        within="ShardedOptimizer.step",
        old="self.reducer.skipped",
        new="False",
        tests=_of_optimizers("test_an_optimizer_that_decays_without_gradients_does_not"),
    ),
    Mutation(
        name="skips: each rank looks at its own share of the result",
        file="fastcomm/reducer/norms.py",
        within="n_left_nonfinite",
        old=("if _in_shares(buckets) is not None:\n    comm.all_reduce(here)"),
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
        file=SKIPPING,
        within="Skipping.judge",
        old="any(bucket.is_skipped() for bucket in buckets)",
        new="buckets[0].is_skipped()",
        tests=_test("test_a_vote_inside_a_backward_counts"),
    ),
    Mutation(
        name="skips: behind hooks a vote is cast though nobody hears it",
        file=SKIPPING,
        within="Skipping.__init__",
        old="has_hooks and self._on_nonfinite",
        new="has_hooks",
        tests=_test("test_over_nccl_a_vote_needs_somebody_who_looks"),
    ),
    Mutation(
        name="skips: a vote outlives its model",
        file=SKIPPING,
        within="Skipping.forget",
        old="self.vote: str | None = None",
        new='self.vote: str | None = getattr(self, "vote", None)',
        tests=_test("test_all_ranks_may_vote_and_a_second_call_is_harmless"),
    ),
    Mutation(
        name="skips: GradScaler is not told on a rank that has not voted",
        file=SKIPPING,
        within="Skipping._conclude",
        old="watch_scalers()",
        new="",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: ranks that step alone skip what all had dropped before",
        file=REDUCED,
        within="ReducedGradients.skipped",
        old="is_dropped and self.local_steps.meetings is None",
        new="is_dropped",
        tests=("tests/reducer/test_meetings.py::test_steps_of_several_optimizers_count_as_one",),
    ),
    Mutation(
        name="skips: a vote may come after the reduction of shares",
        file="fastcomm/reducer/bucket.py",
        within="Bucket.has_unstepped",
        old="is_pending or self.provenance.has_unstepped(counts_unclaimed)",
        new="self.provenance.has_unstepped(counts_unclaimed)",
        tests=_of_optimizers("test_a_sharded_optimizer_skips"),
    ),
    Mutation(
        name="skips: hooks reduce what is left of an earlier round",
        file="fastcomm/reducer/hooked_bucket.py",
        within="HookedBucket.launch",
        old="buffer.zero_()",
        new="pass",
        tests=_test("test_hooks_reduce_what_is_skipped"),
    ),
    Mutation(
        name="skips: a bucket with hooks keeps its model alive",
        file="fastcomm/reducer/hooked_bucket.py",
        within="HookedBucket.gather",
        old="weakref.ref(one)",
        new="lambda one=one: one",
        tests=("tests/reducer/test_lifetimes.py::test_a_reducer_goes_with_its_model",),
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
        file=ENDING,
        within="_vote",
        old=("if ending is not None and ending.was_dropped:\n    reducer.synchronize()"),
        new="",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: an optimizer of two models skips if both do",
        file=STEPS,
        within="_skipping",
        old="[one for one in found if steps.left_out.get(one) != one.n_skipped]",
        new="[]",
        tests=_of_optimizers("test_an_optimizer_of_two_models_skips_for_either"),
    ),
    Mutation(
        name="skips: over NCCL a graph captures what waits for the device",
        file=SKIPPING,
        within="Skipping.begin_round",
        old="self._on_nonfinite and self._comm.has_streams",
        new="False",
        tests=("tests/nccl/test_launches.py::test_weights_and_skips_are_not_captured",),
    ),
    Mutation(
        name="skips: a rank whose talk was interrupted talks once more",
        file=SKIPPING,
        within="Skipping.judge",
        old="self._is_asking",
        new="False",
        tests=_test("test_ranks_do_not_talk_twice_about_a_round"),
    ),
)
