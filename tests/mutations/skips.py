"""Steps that all ranks drop together, from a vote or a NaN to the optimizer."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SKIPPING = "fastcomm/reducer/skipping.py"
ENDING = "fastcomm/reducer/ending.py"
STEPS = "fastcomm/reducer/optimizer_steps.py"
REDUCED = "fastcomm/reducer/reduced.py"
HELPERS = "fastcomm/reducer/torch_helpers.py"
SAMPLE = "fastcomm/reducer/sample.py"
TESTS = "tests/reducer/test_skips.py"
COUNT_TESTS = "tests/reducer/test_counts.py"
OPTIMIZER_TESTS = "tests/reducer/test_skipped_optimizers.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


def _of_optimizers(name: str) -> tuple[str, ...]:
    return (f"{OPTIMIZER_TESTS}::{name}",)


def _counted(name: str) -> tuple[str, ...]:
    return (f"{COUNT_TESTS}::{name}",)


_NORM = _counted("test_a_norm_needs_no_second_look")
_FOUND = _counted("test_what_is_not_finite_is_counted_and_found_on_its_rank")
_WRITTEN = _counted("test_what_is_written_since_is_in_the_norm")
_VOTE = _test("test_a_vote_of_one_rank_makes_all_ranks_skip")
_EXCEPTION = _test("test_an_exception_of_one_rank_makes_all_ranks_skip")
_NONFINITE = _test("test_a_nonfinite_gradient_of_one_rank_makes_all_ranks_skip")
_SCALER = _of_optimizers("test_a_grad_scaler_goes_on_working")

MUTATIONS = (
    Mutation(
        name="skips: an optimizer of two models steps with neither until both are reduced",
        file=STEPS,
        old="    return [one for one in found if steps.left_out.get(one) != one.n_skipped]\n",
        new="    return found\n",
        tests=_of_optimizers(
            "test_a_model_of_two_goes_on_though_the_other_one_has_dropped_its_last_round"
        ),
    ),
    Mutation(
        name="skips: gradients that no optimizer has make a vote late",
        file=REDUCED,
        old="bucket.has_unstepped(not self._n_steps)",
        new="bucket.has_unstepped(True)",
        tests=_test("test_gradients_that_no_optimizer_has_make_no_vote_late"),
    ),
    Mutation(
        name="skips: gradients before the first step make no vote late",
        file=REDUCED,
        old="bucket.has_unstepped(not self._n_steps)",
        new="bucket.has_unstepped(False)",
        tests=_test("test_gradients_that_no_optimizer_has_make_no_vote_late"),
    ),
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
        old="self.found_nonfinite = all(cause.vote is None for cause in causes.values())",
        new="self.found_nonfinite = True",
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
        old="        if _in_shares(buckets) is not None:\n            comm.all_reduce(here)\n",
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
    Mutation(
        name="skips: ranks talk in a join(), where one may have no data",
        file=SKIPPING,
        old="        if is_joining(self._comm):",
        new="        if False:",
        tests=_test("test_ranks_without_data_follow_those_that_skip"),
    ),
    Mutation(
        name="skips: over shm a vote finds no ranks without data",
        file="kernels/shm/protocol.c",
        old=" || d->op == SHM_SKIP) &&",
        new=") &&",
        tests=_test("test_ranks_without_data_follow_those_that_skip"),
    ),
    Mutation(
        name="skips: in a group a vote finds no ranks without data",
        file="fastcomm/group/call.py",
        old='("mean", SKIP, *WEIGHTED_OPS.values())',
        new='("mean", *WEIGHTED_OPS.values())',
        tests=_test("test_ranks_without_data_follow_those_that_skip"),
    ),
    Mutation(
        name="counts: gradients that lie in the buffer are looked at after the reduction",
        file=SKIPPING,
        old="            if i not in at_home:\n",
        new="            if True:\n",
        tests=_counted("test_gradients_that_are_at_home_are_looked_at_before"),
    ),
    Mutation(
        name="counts: a rank knows its own part alone",
        file="kernels/shm/protocol.c",
        old="        tally->square_sum += theirs->tally.square_sum;\n",
        new="        tally->square_sum += r == comm->rank ? theirs->tally.square_sum : 0;\n",
        tests=_NORM,
    ),
    Mutation(
        name="counts: a rank takes what another has counted in an earlier collective",
        file="kernels/shm/protocol.c",
        old="if (c->path != DIRECT || theirs->seq != seq) {",
        new="if (c->path != DIRECT) {",
        tests=_counted("test_one_rank_may_ask_for_the_norm"),
    ),
    Mutation(
        name="counts: presence counts as a gradient",
        file="fastcomm/shm/bucket.pyx",
        old="                self.flat.numel() - len(self.views), self.adds_squares\n",
        new="                self.flat.numel(), self.adds_squares\n",
        tests=_NORM,
    ),
    Mutation(
        name="counts: only the first block is counted",
        file="kernels/shm/paths.c",
        old="        begin += length;\n        numel -= length;\n",
        new="        begin = end;\n        numel -= length;\n",
        tests=_NORM,
    ),
    Mutation(
        name="counts: the last elements of a block are left out",
        file="kernels/shm/tally.c",
        old="            lanes[i % LANES] += WIDEN(a[i]) * WIDEN(a[i]);",
        new="            (void)lanes[i % LANES];",
        tests=_NORM,
    ),
    Mutation(
        name="counts: infinities of float16 are numbers",
        file="kernels/shm/tally.c",
        old="dtype != SHM_FLOAT16 && isfinite(sum)",
        new="isfinite(sum)",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: NaNs are counted, infinities are not",
        file="kernels/shm/tally.c",
        old="n += NAME##_magnitude(array, i) >= (INFINITY_BITS);",
        new="n += NAME##_magnitude(array, i) > (INFINITY_BITS);",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: an array whose largest element is an infinity counts as finite",
        file="kernels/shm/tally.c",
        old="if (largest < (INFINITY_BITS))",
        new="if (largest <= (INFINITY_BITS))",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: the sign bit is taken for a large exponent",
        file="kernels/shm/tally.c",
        old="(BITS)((BITS) ~(BITS)0 >> 1)",
        new="(BITS)~(BITS)0",
        tests=_FOUND,
    ),
    Mutation(
        name="counts: squares that nobody counted are a sum of squares",
        file="kernels/shm/protocol.c",
        old="c->tally.square_sum = (double)NAN;",
        new="",
        tests=_counted("test_a_norm_that_one_rank_asks_for_changes_no_other"),
    ),
    Mutation(
        name="counts: writes that torch counts are not seen",
        file=SAMPLE,
        old=" or self._flat._version != self._version:",
        new=":",
        tests=_WRITTEN,
    ),
    Mutation(
        name="counts: writes past torch are not seen",
        file=SAMPLE,
        old="        return torch.equal(self._flat[self._places], self._values)\n",
        new="        return True\n",
        tests=_WRITTEN,
    ),
    Mutation(
        name="counts: a gradient of the user's own is taken for the reduced one",
        file="fastcomm/reducer/bucket.py",
        old="        if not self._holds_all():\n            return False\n",
        new="",
        tests=_WRITTEN,
    ),
)
