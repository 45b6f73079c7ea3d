"""The compiled parts of the reducer and its recorder: who owns a gradient, when a step began."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

GRADIENTS = "fastcomm/reducer/gradients.pyx"

MUTATIONS = (
    Mutation(
        name="reducer: a spent gradient may be written to",
        file=GRADIENTS,
        within="Gradients._state",
        old="if noted == SPENT and",
        new="if noted == REDUCED and",
        tests=("tests/reducer/test_unreduced.py",),
    ),
    Mutation(
        name="weights: zeros count as gradients of an earlier reduction",
        file=GRADIENTS,
        within="Gradients.first_earlier",
        old="not is_zero(self._gradient(i))",
        new="True",
        tests=(
            "tests/reducer/features/test_weights.py::"
            "test_zeros_that_zero_grad_has_left_are_no_earlier_gradients",
        ),
    ),
    Mutation(
        name="timeline: a step begins with a forward that has raised",
        file="fastcomm/insight/recorder.pyx",
        within="Recorder.begin_forward",
        old="if not self.forward_ns:",
        new="if not self.forward_began_first:",
        tests=("tests/insight/test_timeline.py::test_a_forward_that_raises_belongs_to_no_step",),
    ),
)
