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


_EXCEPTION = _test("test_an_exception_of_one_rank_makes_all_ranks_skip")

MUTATIONS = (
    Mutation(
        name="skips: a dropped step counts as one",
        file="fastcomm/reducer/core.py",
        within="Core.after_step",
        old=("if stepped is None or self.skipped:\n    return"),
        new="if stepped is None or self.skipped:\n    self.steps.n += 1\n    return",
        tests=_test("test_a_rank_may_leave_the_iteration_once_it_has_taken_its_part"),
    ),
    Mutation(
        name="skips: an exception in the reduction abandons the round, in a block, too",
        file="fastcomm/reducer/round.py",
        within="Round._finish",
        old="self.backward_failed(error)",
        new="self.abort(error)",
        tests=_EXCEPTION,
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
        name="skips: a vote outlives its model",
        file=SKIPPING,
        within="Skipping.forget",
        old="self.vote: str | None = None",
        new='self.vote: str | None = getattr(self, "vote", None)',
        tests=_test("test_all_ranks_may_vote_and_a_second_call_is_harmless"),
    ),
)
