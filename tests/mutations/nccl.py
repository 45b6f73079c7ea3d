"""transports/nccl and transports/cuda: epochs, and registered memory; ordering.py has the
streams.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COMMUNICATOR = "fastcomm/transports/nccl/communicator.pyx"
BUCKET = "fastcomm/transports/nccl/bucket.pyx"
SLOT = "fastcomm/comm/gradient_slot.pyx"
LINK = "fastcomm/transports/nccl/link.pyx"
LANE = "fastcomm/transports/nccl/lane.pyx"
MEMORY = "fastcomm/transports/nccl/memory.pyx"

LAUNCH_TESTS = "tests/transports/nccl/test_launches.py"
BLOCK_WIRE_TESTS = "tests/transports/nccl/test_block_wire.py"
ABANDON_TESTS = "tests/transports/nccl/test_abandon.py"

A_PEER_DIES_BEHIND_A_FULL_QUEUE = (
    "tests/transports/nccl/test_full_queue.py::"
    "test_a_peer_that_dies_while_a_launch_waits_for_room_is_named"
)
JOIN_TESTS = ("tests/reducer/features/test_join.py::test_random_plans",)

MUTATIONS = (
    Mutation(
        name="nccl: of tensors that are reduced as one, the last is left out",
        file=COMMUNICATOR,
        within="NcclCommunicator._run_together",
        old="self._launch(work, op, calls, n, (*outs",
        new="self._launch(work, op, calls, n - 1, (*outs",
        tests=(LAUNCH_TESTS, "tests/contract/test_results.py"),
    ),
    Mutation(
        name="nccl: a mean is scaled twice where the wire has another dtype",
        file=BUCKET,
        within="NcclBucket._launch_on",
        old="self.scattering.unflatten_on(stream, wire, 1, True)",
        new="self.scattering.unflatten_on(stream, wire, scale, True)",
        tests=("tests/reducer/test_by_hand.py::test_reduce_passes_through_the_wire_dtype",),
    ),
    Mutation(
        name="a gradient without memory is read at its address",
        file=SLOT,
        within="GradientSlot.fits",
        old=" and not is_without_memory(gradient, address[0])",
        new="",
        tests=("tests/reducer/test_gradients.py",),
    ),
    Mutation(
        name="nccl: the watchdog asks the driver itself",
        file=LINK,
        within="Link._oldest_unfinished",
        old="self.launches.ask()",
        new="self.launches.ask_driver()",
        tests=(A_PEER_DIES_BEHIND_A_FULL_QUEUE,),
    ),
    Mutation(
        name="nccl: a close that fails leaves the communicator of NCCL's",
        file=LANE,
        within="Lane.close",
        old="self.is_given_up = True",
        new="self.is_given_up, self.comm = True, NULL",
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="nccl: a close destroys what another rank has aborted",
        file="fastcomm/comm/watchdog.py",
        within="Watchdog.misses_a_rank",
        old="return has_failed or not set(self._dead()) <= set(self.closed(comm))",
        new="return False",
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="nccl: memory of an aborted communicator stays registered",
        file=MEMORY,
        within="Pool.forget",
        old="if allocation.comm == comm:",
        new="if comm == NULL and allocation.comm == comm:",
        tests=("tests/transports/nccl/test_memory.py", ABANDON_TESTS),
    ),
    Mutation(
        name="nccl: windows come back in whatever order the buckets are in",
        file=LINK,
        within="Link._register_again",
        old="key=lambda bucket: bucket.label",
        new="key=lambda bucket: bucket.label, reverse=self.rank == 1",
        tests=("tests/transports/nccl/test_memory.py",),
    ),
    Mutation(
        name="nccl: memory that is given no window is registered again and again",
        file=MEMORY,
        within="Pool.unregistered",
        old="allocation.comm == NULL",
        new="allocation.window == NULL",
        tests=("tests/transports/nccl/test_shards.py",),
    ),
    Mutation(
        name="nccl: in 8 bits a rank sends its own part in place of the sum",
        file=BUCKET,
        within="BlockWire.reduce_on",
        old="self.kernels.encode_on(stream, own, self.coded + self.rank * n,",
        new="self.kernels.encode_on(stream, own, self.received + self.rank * n,",
        tests=(BLOCK_WIRE_TESTS,),
    ),
    Mutation(
        name="nccl: in 8 bits the used mask is not reduced",
        file=BUCKET,
        within="BlockWire.reduce_on",
        old="code = call_all(gathering, 2, comm, stream, failed)",
        new="code = call_all(gathering, 1, comm, stream, failed)",
        tests=(BLOCK_WIRE_TESTS,),
    ),
    Mutation(
        name="join: over NCCL ranks without data count as such with data",
        file="fastcomm/transports/nccl/rounds.py",
        within="follow",
        old="_part_of_totals(comm, 0.0, 0, 0)",
        new="_part_of_totals(comm, 1.0, 0, 0)",
        tests=JOIN_TESTS,
    ),
    Mutation(
        name="join: over NCCL ranks without data take part for the first reducer alone",
        file="fastcomm/transports/nccl/rounds.py",
        within="follow",
        old="round(sum_of_numbers / n_ranks)",
        new="min(one.label // BUCKETS_PER_REDUCER for one in comm.buckets)",
        tests=JOIN_TESTS,
    ),
)
