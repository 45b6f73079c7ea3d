"""transports/nccl and transports/cuda: epochs, and registered memory; ordering.py has the
streams.
"""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COMMUNICATOR = "fastcomm/transports/nccl/communicator.pyx"
BUCKET = "fastcomm/transports/nccl/bucket.pyx"
SLOT = "fastcomm/comm/gradient_slot.pyx"
LINK = "fastcomm/transports/nccl/link.pyx"
LAUNCHES = "fastcomm/transports/nccl/launches.pyx"
LANE = "fastcomm/transports/nccl/lane.pyx"
MEMORY = "fastcomm/transports/nccl/memory.pyx"
MULTI_TENSOR = "fastcomm/transports/cuda/multi_tensor.pyx"
GRAPHS = "fastcomm/transports/cuda/graphs.pyx"

BLOCK_WIRE = "fastcomm/transports/nccl/block_wire.pyx"

LAUNCH_TESTS = "tests/transports/nccl/test_launches.py"
BLOCK_WIRE_TESTS = "tests/transports/nccl/test_block_wire.py"
ABANDON_TESTS = "tests/transports/nccl/test_abandon.py"
ENDING_TESTS = "tests/transports/nccl/test_ending.py"
KEPT = (
    "tests/contract/test_abandon.py::"
    "test_an_abandonment_does_not_keep_what_the_frames_held_that_asked_for_it"
)

_LATE = (
    "tests/reducer/test_failed_steps.py::"
    "test_a_rank_that_is_late_misses_no_step_before_the_one_that_was_abandoned",
)
A_PEER_DIES_BEHIND_A_FULL_QUEUE = (
    "tests/transports/nccl/test_full_queue.py::"
    "test_a_peer_that_dies_while_a_launch_waits_for_room_is_named"
)

MUTATIONS = (
    Mutation(
        name="nccl: of tensors that are reduced as one, the last is left out",
        file=COMMUNICATOR,
        within="NcclCommunicator.all_reduce_coalesced",
        old="self._launch(work, op, calls, n)",
        new="self._launch(work, op, calls, n - 1)",
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
        name="nccl: last round's used mask stays in the wire whatever it was",
        file=BUCKET,
        within="NcclBucket.launch",
        old="or self.last is None or self.last.token is not work.token",
        new="or self.last is None",
        tests=("tests/reducer/test_buckets.py",),
    ),
    Mutation(
        name="a gradient whose sign torch has only noted is read as it lies",
        file=SLOT,
        within="GradientSlot.fits",
        old="is_changed = is_neg(gradient) or (",
        new="is_changed = (",
        tests=("tests/contract/test_gather.py",),
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
        name="nccl: numbers go on when the ranks meet anew",
        file=LAUNCHES,
        within="Launches.begin_epoch",
        old="self.number = 0",
        new="",
        tests=(f"{ABANDON_TESTS}::test_numbers_begin_anew_when_the_ranks_have_met",),
    ),
    Mutation(
        name="nccl: the watchdog asks the driver itself",
        file=LINK,
        within="Link._oldest_unfinished",
        old="self.launches.ask()",
        new="self.launches.settle()",
        tests=(A_PEER_DIES_BEHIND_A_FULL_QUEUE,),
    ),
    Mutation(
        name="nccl: the watchdog waits for the driver's answers without an end",
        file=LAUNCHES,
        within="Launches.ask",
        old="question.deadline.await_(question.over.wait)",
        new="question.over.wait(60)",
        tests=(A_PEER_DIES_BEHIND_A_FULL_QUEUE,),
    ),
    Mutation(
        name="nccl: the watchdog does not wait for the driver's answers",
        file=LAUNCHES,
        within="Launches.ask",
        old="question.deadline.await_(question.over.wait)",
        new="question.over.is_set()",
        tests=("tests/transports/nccl/test_lost_peers.py::test_what_is_over_needs_no_peer",),
    ),
    Mutation(
        name="nccl: the youngest launch is what the watchdog sees",
        file=LAUNCHES,
        within="Launches.oldest_unfinished",
        old="if oldest is None or in_flight.number < oldest.number:",
        new="if oldest is None or in_flight.number > oldest.number:",
        tests=(
            "tests/transports/nccl/test_lost_peers.py::"
            "test_the_oldest_launch_is_the_one_that_is_waited_for",
        ),
    ),
    Mutation(
        name="nccl: the ranks of a second abandonment meet in the epoch of the first",
        file=LINK,
        within="Link._abandon",
        old=("if self.is_split_up:\n    self.epoch += 1"),
        new="",
        tests=(
            "tests/contract/test_abandon.py::"
            "test_a_round_may_be_abandoned_twice_before_the_ranks_have_met_for_it[nccl-2]",
        ),
    ),
    Mutation(
        name="nccl: a work of an abandoned epoch says nothing",
        file=LINK,
        within="Link.check_work",
        old="if self.is_split_up or epoch != self.epoch:",
        new="if self.is_split_up and epoch != self.epoch:",
        tests=(f"{ABANDON_TESTS}::test_a_work_that_was_abandoned_says_so",),
    ),
    Mutation(
        name="nccl: an abandonment counts but once",
        file=LINK,
        within="Link._take_interruption",
        old="self.n_abandoned += 1",
        new="",
        tests=(ABANDON_TESTS,),
    ),
    Mutation(
        name="nccl: close() waits for graphs that are alive",
        file=LINK,
        within="Link.close",
        old="if self.graphs.count() > 0:",
        new="if self.graphs.count() > 99:",
        tests=(
            f"{LAUNCH_TESTS}::test_a_step_can_be_captured_and_the_communicator_outlives_its_graphs",
        ),
    ),
    Mutation(
        name="nccl: a close that fails leaves the communicator of NCCL's",
        file=LANE,
        within="Lane.close",
        old="call.is_given_up = True",
        new="call.is_given_up, self.comm = True, NULL",
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="nccl: a communicator is aborted beside its revocation",
        file=LANE,
        within="_Abort.make",
        old=("self._revoke()\nself._wait_for_graphs()\nself._abort()"),
        new=("self._abort()\nself._revoke()"),
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="nccl: a communicator is freed under a thread that is inside",
        file=LANE,
        within="_Abort._revoke",
        old="while self.is_revoked and self.lane.is_in_use():\n    time.sleep(0.005)",
        new="",
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="nccl: a communicator is freed under the graphs that have captured it",
        file=LANE,
        within="_Abort.make",
        old="self._wait_for_graphs()",
        new="",
        tests=(f"{LAUNCH_TESTS}::test_a_graph_may_outlive_an_aborted_communicator",),
    ),
    Mutation(
        name="nccl: abort() waits for graphs to go",
        file=LANE,
        within="_Abort._wait_for_graphs",
        old=("if is_alive:\n    self.over.set()"),
        new="",
        tests=(f"{LAUNCH_TESTS}::test_a_graph_may_outlive_an_aborted_communicator",),
    ),
    Mutation(
        name="nccl: a close that was given up finalizes what is gone",
        file=LANE,
        within="_Finalize.make",
        old="if not self.is_given_up:",
        new="if True:",
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
        name="nccl: windows are lost with an aborted communicator",
        file=MEMORY,
        within="Pool.forget",
        old="in windows if is_idle else ():",
        new="in ():",
        tests=("tests/transports/nccl/test_memory.py",),
    ),
    Mutation(
        name="nccl: windows come back in whatever order the buckets are in",
        file=LINK,
        within="Link._register_again",
        old="sorted(self.rejoining, key=_label)",
        new="sorted(self.rejoining, key=_label, reverse=self.rank == 1)",
        tests=("tests/transports/nccl/test_memory.py",),
    ),
    Mutation(
        name="nccl: parameters are gathered in memory that is no window",
        file="fastcomm/transports/nccl/communicator.pyx",
        within="NcclCommunicator.make_window",
        old="self.link.register(self.link.lanes[0], flat, label)",
        new="pass",
        tests=("tests/transports/nccl/test_shards.py",),
    ),
    Mutation(
        name="nccl: memory that is given no window is registered again and again",
        file=MEMORY,
        within="Pool.can_register",
        old="allocation.comm == NULL",
        new="allocation.window == NULL",
        tests=("tests/transports/nccl/test_shards.py",),
    ),
    Mutation(
        name="nccl: a close that hangs waits for a revocation that NCCL has refused",
        file=LANE,
        within="_Abort._revoke",
        old="while self.is_revoked and self.lane.is_in_use():",
        new="while self.lane.is_in_use():",
        tests=("tests/transports/nccl/test_ending.py",),
    ),
    Mutation(
        name="nccl: a bucket that not all ranks have left gets a window",
        file=LINK,
        within="Link._register_again",
        old="self.world_size > 1 and bucket.label in self.common_labels",
        new="self.world_size > 1",
        tests=("tests/transports/nccl/test_memory.py",),
    ),
    Mutation(
        name="cuda: the second part of many tensors reads the first part's addresses",
        file=MULTI_TENSOR,
        within="MultiTensor._launch",
        old="parameters[0] = &self.addresses[part.first]",
        new="parameters[0] = &self.addresses[0]",
        tests=("tests/transports/nccl/test_multi_tensor.py",),
    ),
    Mutation(
        name="cuda: statistics of the first part alone",
        file=MULTI_TENSOR,
        within="MultiTensor.square_sum",
        old="return self.stats[:, 0, 0].sum()",
        new="return self.stats[0, 0, 0]",
        tests=("tests/transports/nccl/test_multi_tensor.py",),
    ),
    Mutation(
        name="cuda: a tile begins where the one before it does",
        file=MULTI_TENSOR,
        within="tiles_of",
        old='tiles["offset"] = offsets[tensor] + done',
        new='tiles["offset"] = offsets[tensor]',
        tests=("tests/transports/nccl/test_multi_tensor.py",),
    ),
    Mutation(
        name="cuda: a graph that captures twice is counted twice",
        file=GRAPHS,
        within="CapturedGraphs.note_capture",
        old="self.newest = identifier",
        new="",
        tests=(
            f"{LAUNCH_TESTS}::test_a_step_can_be_captured_and_the_communicator_outlives_its_graphs",
        ),
    ),
    Mutation(
        name="nccl: the garbage collector clears a record that is used again",
        file=LANE,
        within="",
        old="@cython.no_gc_clear  # a work that is collected hands its record on",
        new="",
        tests=(
            "tests/transports/nccl/test_launches.py::"
            "test_a_work_that_the_garbage_collector_finds_leaves_a_good_ticket",
        ),
    ),
    Mutation(
        name="nccl: a close waits for what the other ranks have yet to leave",
        file=LINK,
        within="Link.close",
        old="min(timeout, FREE_S))",
        new="timeout)",
        tests=(
            f"{ENDING_TESTS}::test_a_close_leaves_what_nccl_frees_when_the_other_ranks_have_closed",
        ),
    ),
    Mutation(
        name="nccl: nobody hears that a communicator could not be freed",
        file=LANE,
        within="errors_of",
        old="return [call.error for call in over if call.error is not None]",
        new="return []",
        tests=(ENDING_TESTS,),
    ),
    Mutation(
        name="nccl: what has interrupted a round is raised itself",
        file=LINK,
        within="Link._take_interruption",
        old="return told(self.communicator, interruption)",
        new="return interruption",
        tests=(KEPT,),
    ),
    Mutation(
        name="nccl: a late rank drops a step that the others have made",
        file="fastcomm/transports/nccl/link.pyx",
        within="Link.check_work",
        old="number <= self.n_kept",
        new="False",
        tests=_LATE,
    ),
    Mutation(
        name="nccl: a late rank leaves out a step that the others have made",
        file="fastcomm/transports/nccl/link.pyx",
        within="Link._check_alive",
        old="self.launches.number > self.n_kept",
        new="True",
        tests=_LATE,
    ),
    Mutation(
        name="nccl: in 8 bits a rank sends its own part in place of the sum",
        file=BLOCK_WIRE,
        within="BlockWire.reduce_on",
        old="self.kernels.encode_on(stream, own, self.coded + self.rank * n,",
        new="self.kernels.encode_on(stream, own, self.received + self.rank * n,",
        tests=(BLOCK_WIRE_TESTS,),
    ),
    Mutation(
        name="nccl: in 8 bits the used mask is not reduced",
        file=BLOCK_WIRE,
        within="BlockWire.reduce_on",
        old="code = call_all(gathering, 2, comm, stream, failed)",
        new="code = call_all(gathering, 1, comm, stream, failed)",
        tests=(BLOCK_WIRE_TESTS,),
    ),
)
