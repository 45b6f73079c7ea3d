"""kernels: the protocol and the arithmetic of shared memory, and the kernels for GPUs."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROTOCOL = "kernels/shm/protocol.c"
PATHS = "kernels/shm/paths.c"
REDUCE = "kernels/shm/reduce.c"

DRIVER = ("tests/shm/test_core.py::test_driver",)

MUTATIONS = (
    Mutation(
        name="kernels: a filled mailbox is all that a free slot needs",
        file=PROTOCOL,
        old=" && d->kind != SHM_ABANDON && is_done == is_complete;",
        new=" && d->kind != SHM_ABANDON;",
        tests=("tests/shm/test_full_ring.py",),
    ),
    Mutation(
        name="kernels: a filled mailbox is all that an abandonment needs",
        file=PROTOCOL,
        old=" && d->kind != SHM_ABANDON && is_done == is_complete;",
        new=" && is_done == is_complete;",
        tests=("tests/shm/test_abandon.py",),
    ),
    Mutation(
        name="kernels: a slot is reused one collective too early",
        file=PROTOCOL,
        old="if (!is_settled(comm, number - SHM_RING)) {",
        new="if (!is_settled(comm, number - SHM_RING - 1)) {",
        tests=DRIVER,
    ),
)
