"""fastcomm/transports/shm: the ring, the buckets, and the memory they share."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RING = "fastcomm/transports/shm/ring.pyx"
BUCKET = "fastcomm/transports/shm/bucket.pyx"
MEMORY = "fastcomm/transports/shm/memory.pyx"
COMMUNICATOR = "fastcomm/transports/shm/communicator.pyx"

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
        within="Ring.check",
        old="not IS_NEG(tensor) and not is_without_memory(tensor, data):",
        new="not IS_NEG(tensor):",
        tests=("tests/contract/test_arguments.py",),
    ),
    Mutation(
        name="shm: the ranks do not compare the sizes of tensors that are reduced as one",
        file=COMMUNICATOR,
        within="ShmCommunicator.all_reduce_coalesced",
        old="d.numel, d.where, d.step = numel, SHM_PRIVATE, sizes(numels)",
        new="d.numel, d.where = numel, SHM_PRIVATE",
        tests=("tests/contract/test_mismatches.py",),
    ),
    Mutation(
        name="shm: of tensors that are reduced as one, all results come into the first",
        file=COMMUNICATOR,
        within="ShmCommunicator.all_reduce_coalesced",
        old="shm_piece(<void *>begin, numel, d.numel)",
        new="shm_piece(<void *><size_t>tensors[0].data_ptr(), numel, d.numel)",
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
        name="shm: what was posted before an abandoned collective ends with its error",
        file=RING,
        within="Ring._resolve_behind",
        old="if <int32_t>(work.seq - ended.seq) > 0:",
        new="if True:",
        tests=("tests/contract/test_abandon.py",),
    ),
    Mutation(
        name="shm: what others had abandoned, too, is told after the ranks have met",
        file=RING,
        within="Ring._realign",
        old=(
            "for work in [work for work in self.works if work is not None]:\n    self.finish(work)"
        ),
        new="",
        tests=("tests/contract/test_abandon.py",),
    ),
    Mutation(
        name="shm: no deadline while the ring is full",
        file=RING,
        within="Ring.post",
        old=("else:\n    self._between_slices(&patience)"),
        new="",
        tests=("tests/transports/shm/test_full_ring.py",),
    ),
    Mutation(
        name="deadlines: time in which the process is stopped counts",
        file="fastcomm/comm/deadline.py",
        within="running_s",
        old="uncounted += max(0.0, now - before - COUNTED_S)",
        new="",
        tests=("tests/contract/test_suspension.py::test_a_suspended_job_goes_on",),
    ),
    Mutation(
        name="shm: a deadline runs on while collectives move",
        file=RING,
        within="Ring._between_slices",
        old="if patience.deadline == 0 or progress != patience.progress:",
        new="if patience.deadline == 0:",
        tests=("tests/transports/shm/test_deadlines.py",),
    ),
    Mutation(
        name="shm: a second Ctrl-C waits, too",
        file=RING,
        within="Ring._defer",
        old="if self.deferred is not None:",
        new="if False:",
        tests=("tests/transports/shm/test_interrupts.py",),
    ),
    Mutation(
        name="shm: what a signal handler raised is raised again by the next call",
        file=RING,
        within="Ring._raise_deferred",
        old="error, self.deferred = self.deferred, None",
        new="error = self.deferred",
        tests=("tests/transports/shm/test_interrupts.py",),
    ),
    Mutation(
        name="shm: an abandonment is told twice",
        file=RING,
        within="Ring.hear",
        old="error, self.interruption = self.interruption, None",
        new="error = self.interruption",
        tests=(
            "tests/contract/test_abandon.py::"
            "test_abandon_ends_the_round_on_all_ranks_and_the_next_one_is_as_good_as_new[shm-3]",
            "tests/reducer/test_defects.py::"
            "test_a_rank_that_abandons_what_it_has_seen_abandoned_joins_the_others",
        ),
    ),
    Mutation(
        name="shm: a mismatch is told as an abandonment of the rank that found it",
        file=RING,
        within="Ring._first_failure",
        old="if shm_wait(self.handle, work.seq, 0) == SHM_MISMATCH:",
        new="if shm_wait(self.handle, work.seq, 0) == SHM_PEER_LOST:",
        tests=("tests/transports/shm/test_abandon.py",),
    ),
    Mutation(
        name="shm: a tensor of another communicator's arena is one of this",
        file=RING,
        within="Ring._place",
        old="d.where = offset if offset < self.arena.nbytes else SHM_PRIVATE",
        new="d.where = offset if data > self.arena.base else SHM_PRIVATE",
        tests=("tests/transports/shm/test_communicator.py", "tests/contract/test_async.py"),
    ),
    Mutation(
        name="shm: a cast gradient does not come back from the wire",
        file=RING,
        within="ShmWork.resolve",
        old="if error is None and self.wide is not None:",
        new="if error is not None and self.wide is not None:",
        tests=("tests/reducer/test_by_hand.py::test_reduce_passes_through_the_wire_dtype",),
    ),
    Mutation(
        name="shm: pieces of a bucket that is cast are read past the cast",
        file=BUCKET,
        within="ShmBucket.move",
        old="if self.wire is not self.flat or nbytes < SMALL_GRADIENT:",
        new="if nbytes < SMALL_GRADIENT:",
        tests=("tests/reducer/test_wires.py",),
    ),
    Mutation(
        name="shm: large gradients are not held until they are reduced",
        file=BUCKET,
        within="ShmBucket.move",
        old="work.tensors.append(gradient)",
        new="",
        tests=("tests/transports/shm/test_abandon.py",),
    ),
    Mutation(
        name="shm: a hole is not merged with the one before it",
        file=MEMORY,
        within="Segment.release",
        old="if merged and merged[-1][0] + merged[-1][1] == begin:",
        new="if False and merged[-1][0] + merged[-1][1] == begin:",
        tests=("tests/transports/shm/test_memory.py",),
    ),
    Mutation(
        name="shm: a forked child writes into its parent's memory",
        file=MEMORY,
        within="_after_fork_in_child",
        old="(<Segment>segment).make_private()",
        new="pass",
        tests=("tests/reducer/test_defects.py::test_what_a_forked_child_writes_stays_with_it",),
    ),
    Mutation(
        name="shm: descriptors of peers' processes stay open",
        file=MEMORY,
        within="Segments.__dealloc__",
        old=("if self.pidfds[r] >= 0:\n    close_fd(self.pidfds[r])"),
        new="pass",
        tests=(
            "tests/transports/shm/test_memory.py::"
            "test_a_closed_communicator_keeps_no_mapping_and_no"
            "_descriptor",
        ),
    ),
)
