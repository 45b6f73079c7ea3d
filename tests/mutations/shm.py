"""fastcomm/transports/shm: the ring, the buckets, and the memory they share."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RING = "fastcomm/transports/shm/ring.pyx"
COMMUNICATOR = "fastcomm/transports/shm/communicator.pyx"
JOIN_TESTS = ("tests/reducer/features/test_join.py::test_random_plans",)

MUTATIONS = (
    Mutation(
        name="shm: autograd does not know what a blocking collective writes to",
        file=RING,
        within="Ring.call",
        old="INCREMENT_VERSION(written)",
        new="pass",
        tests=("tests/contract/test_autograd.py",),
    ),
    Mutation(
        name="shm: a tensor without memory is taken",
        file=RING,
        within="Ring.take",
        old="not IS_NEG(tensor) and not is_without_memory(tensor, data):",
        new="not IS_NEG(tensor):",
        tests=("tests/contract/test_arguments.py",),
    ),
    Mutation(
        name="shm: of tensors that are reduced as one, all results come into the first",
        file="fastcomm/control/collectives.pyx",
        within="Collectives.all_reduce_coalesced",
        old="shm_piece(it.input, numel, it.d.numel)",
        new="shm_piece(<void *><size_t>found[0].data_ptr(), numel, it.d.numel)",
        tests=("tests/contract/test_results.py",),
    ),
    Mutation(
        name="shm: close() frees what a thread on its way out still reads",
        file=RING,
        within="Ring._bury",
        old="for work in unfinished:",
        new="shm_free_comm(self.handle)\nself.handle = NULL\nfor work in unfinished:",
        tests=(
            "tests/contract/test_ending.py::"
            "test_a_communicator_may_be_closed_while_a_thread_follows_the_others",
        ),
    ),
    Mutation(
        name="deadlines: time in which the process is stopped counts",
        file="fastcomm/comm/deadline.py",
        within="running_s",
        old="uncounted += max(0.0, now - before - COUNTED_S)",
        new="pass",
        tests=("tests/contract/test_suspension.py::test_a_suspended_job_goes_on",),
    ),
    Mutation(
        name="join: on shm the shard of a rank without data is left out",
        file="kernels/shm/protocol.c",
        within="conclude",
        old="c->announcement = *v.wanted;",
        new="c->announcement = *v.wanted, c->announcement.numel = 0;",
        tests=JOIN_TESTS,
    ),
)
