"""What a rank's gradients count: weights, from set_weight() to the kernels that add."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

WEIGHTS = "fastcomm/reducer/features/weights.py"
TESTS = "tests/reducer/features/test_weights.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


MUTATIONS = (
    Mutation(
        name="weights: the unit may change in the middle of a reduction",
        file="fastcomm/reducer/features/weights.py",
        within="Weighting.set",
        old="self._now is not None and of != self._of",
        new="n_unsynced != self._n_unsynced and of != self._of",
        tests=_test("test_batches_that_cannot_be_weighted"),
    ),
    Mutation(
        name="weights: hooks change what torch.autograd.grad returns",
        file=WEIGHTS,
        within="Weighting._scale_what_comes",
        old="node.register_prehook(Untraced(scaled))",
        new="parameter.register_hook(lambda g: scaled((g,))[0])",
        tests=_test("test_gradients_of_torch_autograd_grad_are_not_weighted"),
    ),
    Mutation(
        name="weights: zeros count as gradients of an earlier reduction",
        file="fastcomm/reducer/gradients.pyx",
        within="Gradients.first_earlier",
        old="not is_zero(self._gradient(i))",
        new="True",
        tests=_test("test_zeros_that_zero_grad_has_left_are_no_earlier_gradients"),
    ),
)
