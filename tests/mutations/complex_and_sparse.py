"""Gradients that are not tensors of real numbers: complex ones, and sparse ones."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COLLECTIVE = "fastcomm/collective.py"
COMPLEX = "tests/reducer/test_complex.py"
CONTRACT = "tests/contract"


def _complex(name: str) -> tuple[str, ...]:
    return (f"{COMPLEX}::{name}",)


_ONE_PROCESS = "test_gradients_are_those_of_one_process"
_RESOLVED = "test_conjugated_and_transposed_gradients_are_resolved"

MUTATIONS = (
    Mutation(
        name="complex: a view begins at an offset counted in real numbers",
        file="fastcomm/reducer/geometry.py",
        old="        offset //= 2\n",
        new="        pass\n",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: a slot is as long as the elements, not as the pairs",
        file="fastcomm/reducer/geometry.py",
        old="        return 2 * parameter.numel(), dtype.to_real()",
        new="        return parameter.numel(), dtype.to_real()",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: shared memory reads half of a large gradient",
        file="fastcomm/shm/bucket.pyx",
        old="                offsets[i], real_numel(view),",
        new="                offsets[i], view.numel(),",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: shared memory reads a conjugated gradient as it lies",
        file="fastcomm/shm/bucket.pyx",
        old="(slot.is_complex and gradient.is_conj())",
        new="False",
        tests=_complex(_RESOLVED),
    ),
    Mutation(
        name="complex: a kernel of the GPU gathers half of each gradient",
        file="fastcomm/nccl/bucket.pyx",
        old="numels = [real_numel(view) for",
        new="numels = [view.numel() for",
        tests=_complex(_ONE_PROCESS),
    ),
    Mutation(
        name="complex: a kernel of the GPU gathers a conjugated gradient as it lies",
        file="fastcomm/nccl/gradient_slot.pyx",
        old=" or (self.is_complex and gradient.is_conj())",
        new="",
        tests=_complex(_RESOLVED),
    ),
    Mutation(
        name="complex: between hosts the gaps of a bucket are looked for in complex elements",
        file="fastcomm/group/exchange.py",
        old="zip(map(as_pairs, views), offsets, strict=True)",
        new="zip(views, offsets, strict=True)",
        tests=_complex("test_narrow_wires_carry_both_parts"),
    ),
    Mutation(
        name="complex: nonfinite_count counts elements, over some transports",
        file="fastcomm/reducer/norms.py",
        old="as_pairs(gradient.resolve_conj()) for",
        new="gradient.resolve_conj() for",
        tests=_complex("test_nonfinite_parts_that_come_from_a_round_are_counted"),
    ),
    Mutation(
        name="complex: a reducer takes the greatest of real and imaginary parts",
        file="fastcomm/reducer/options.py",
        old='        if self.op in ("sum", "mean") or self.hooks:\n',
        new="        if True:\n",
        tests=_complex("test_what_complex_numbers_do_not_have_is_refused_by_name"),
    ),
    Mutation(
        name="complex: DDP's hook takes the greatest of real and imaginary parts",
        file="fastcomm/torch_backend/ddp_hook.py",
        old="any(p.is_complex() for p in bucket.parameters())",
        new="False",
        tests=_complex("test_ddps_hook_refuses_the_greatest_of_pairs"),
    ),
    Mutation(
        name="complex: a collective takes the greatest of real and imaginary parts",
        file=COLLECTIVE,
        old='    if op not in ("sum", "mean"):\n        raise TypeError(complex',
        new="    if False:\n        raise TypeError(complex",
        tests=(f"{CONTRACT}/test_arguments.py::test_what_pairs_cannot_stand_for_is_refused",),
    ),
    Mutation(
        name="complex: a collective takes a conjugated view as it lies",
        file=COLLECTIVE,
        old="    if tensor.is_conj():\n",
        new="    if False:\n",
        tests=(f"{CONTRACT}/test_arguments.py::test_what_pairs_cannot_stand_for_is_refused",),
    ),
    Mutation(
        name="complex: over shared memory the op of a result is left to chance",
        file="fastcomm/shm/communicator.pyx",
        old="        d.op = SHM_SUM\n",
        new="        d.op = 99\n",
        tests=(f"{CONTRACT}/test_results.py::test_complex_tensors_travel_as_pairs",),
    ),
)
