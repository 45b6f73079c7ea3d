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
        name="skips: over shm a vote goes with no other op",
        file="kernels/shm/protocol.c",
        old=" || a->op == SHM_SKIP || b->op == SHM_SKIP;",
        new=";",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: over shm only the rank that votes hears of it",
        file="kernels/shm/protocol.c",
        old="c->is_skipped = c->is_skipped || theirs->op == SHM_SKIP;",
        new="c->is_skipped = c->descriptor.op == SHM_SKIP;",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a group compares the ops of ranks that vote",
        file="fastcomm/group/call.py",
        old="    return [replace(call, op=SKIP) for call in calls] if is_skipped else calls\n",
        new="    return calls\n",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: over NCCL a vote is nothing but zeros",
        file="fastcomm/reducer/bucket.py",
        old='            self.flat[0] = float("nan")\n',
        new="            self.flat[0] = 0\n",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a vote does not reach ranks with hooks",
        file="fastcomm/reducer/hooked_bucket.py",
        old="        presence[-1] = op == SKIP\n",
        new="        presence[-1] = 0\n",
        tests=_test("test_hooks_reduce_what_is_skipped"),
    ),
    Mutation(
        name="skips: a vote counts for all rounds to come",
        file=ENDING,
        old="    reducer._skipping.vote = None\n",
        new="",
        tests=_VOTE,
    ),
    Mutation(
        name="skips: a vote may come after the reduction",
        file=REDUCED,
        old="        if is_late:\n",
        new="        if False:\n",
        tests=_test("test_a_vote_comes_too_late_once_gradients_are_reduced"),
    ),
    Mutation(
        name="skips: gradients of a step that was made count as reduced and not stepped",
        file="fastcomm/reducer/provenance.pyx",
        old="if gradient is not None and self._is_fresh(i, None) and self._is_known(i, gradient):",
        new="if gradient is not None and self._is_known(i, gradient):",
        tests=_test("test_a_vote_comes_too_late_once_gradients_are_reduced"),
    ),
    Mutation(
        name="skips: a dropped step counts as one",
        file=REDUCED,
        old="        if shares is None or self.skipped:\n            return",
        new="        if shares is None or self.skipped:\n"
        "            self._n_steps += 1\n            return",
        tests=_test("test_a_rank_may_leave_the_iteration_once_it_has_taken_its_part"),
    ),
    Mutation(
        name="skips: gradients stay where they are not finite",
        file="fastcomm/reducer/round.py",
        old="                if is_skipped:\n",
        new="                if False:\n",
        tests=_test("test_a_nan_in_an_early_micro_batch_drops_the_whole_step"),
    ),
    Mutation(
        name="skips: an exception in a block abandons the round",
        file="fastcomm/reducer/reducer.py",
        old="if self._skipping.n_blocks and self._round is not None:",
        new="if False and self._round is not None:",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: an exception in the reduction abandons the round, in a block, too",
        file=ENDING,
        old="        elif reducer._skipping.n_blocks:\n",
        new="        elif False:\n",
        tests=_EXCEPTION,
    ),
    Mutation(
        name="skips: a round stays open after another exception in a block",
        file=ENDING,
        old="ending.was_dropped and not reducer._skipping.n_blocks:",
        new="False:",
        tests=_test("test_other_exceptions_abandon_the_round_as_always"),
    ),
    Mutation(
        name="skips: a block takes errors of fastcomm for exceptions of this rank",
        file=ENDING,
        old="        if not isinstance(error, exceptions) or isinstance(error, FastcommError):\n",
        new="        if not isinstance(error, exceptions):\n",
        tests=_test("test_other_exceptions_abandon_the_round_as_always"),
    ),
    Mutation(
        name="skips: an optimizer steps its parameters without gradients",
        file=STEPS,
        old='[{**group, "params": []} for group in optimizer.param_groups]',
        new="[{**group} for group in optimizer.param_groups]",
        tests=_of_optimizers("test_an_optimizer_that_decays_without_gradients_does_not"),
    ),
    Mutation(
        name="skips: what an optimizer changes in its groups stays",
        file=STEPS,
        old='[{**group, "params": []} for group in optimizer.param_groups]',
        new='[group.__setitem__("params", []) or group for group in optimizer.param_groups]',
        tests=_of_optimizers("test_an_optimizer_that_decays_without_gradients_does_not"),
    ),
    Mutation(
        name="skips: after a closure parameters of no reducer are stepped",
        file=STEPS,
        old="                parameter.grad = None\n",
        new="                pass\n",
        tests=_of_optimizers("test_what_a_closure_finds_is_skipped"),
    ),
    Mutation(
        name="skips: GradScaler keeps its scale",
        file=HELPERS,
        old="torch.full_like(found_inf, float(is_nonfinite))",
        new="torch.full_like(found_inf, 0.0)",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: GradScaler looks at shares that are dropped",
        file=HELPERS,
        old="        if held is None or skipped_nonfinite(optimizer) is not None:\n",
        new="        if held is None:\n",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: GradScaler lowers its scale for a vote",
        file=SKIPPING,
        old="        self.found_nonfinite = not is_vote\n",
        new="        self.found_nonfinite = True\n",
        tests=_SCALER,
    ),
    Mutation(
        name="skips: a ShardedOptimizer steps what is dropped",
        file="fastcomm/reducer/sharded.py",
        old="        if self.reducer.skipped:\n",
        new="        if False:\n",
        tests=_of_optimizers("test_a_sharded_optimizer_skips"),
    ),
    Mutation(
        name="skips: each rank looks at its own share of the result",
        file="fastcomm/reducer/norms.py",
        old="    if _in_shares(buckets) is not None:\n        comm.all_reduce(count)\n",
        new="",
        tests=_of_optimizers("test_a_sharded_optimizer_skips"),
    ),
    Mutation(
        name="skips: every rank logs",
        file=SKIPPING,
        old="            if self._comm.rank != 0:\n",
        new="            if False:\n",
        tests=_NONFINITE,
    ),
)
