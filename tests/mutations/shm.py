"""fastcomm/shm: the ring, the buckets, and the memory they share."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RING = "fastcomm/shm/ring.pyx"
BUCKET = "fastcomm/shm/bucket.pyx"
MEMORY = "fastcomm/shm/memory.pyx"
COMMUNICATOR = "fastcomm/shm/communicator.pyx"

MUTATIONS = (
    Mutation(
        name="shm: close() frees what a thread on its way out still reads",
        file=RING,
        old="        for work in [*self._resolve_all(self.life.failure), *self.leaving]:\n",
        new="""\
        shm_free_comm(self.handle)
        self.handle = NULL
        for work in [*self._resolve_all(self.life.failure), *self.leaving]:
""",
        tests=(
            "tests/contract/test_ending.py::"
            "test_a_communicator_may_be_closed_while_a_thread_follows_the_others",
        ),
    ),
    Mutation(
        name="shm: gradients of an abandoned round are freed at once",
        file=RING,
        old="self.leaving += self._resolve_all(error)",
        new="for work in self._resolve_all(error): work.release()",
        tests=("tests/shm/test_abandon.py",),
    ),
    Mutation(
        name="shm: no deadline while the ring is full",
        file=RING,
        old="""\
                self._give_up(self._lost())
            else:
                self._between_slices(&patience)
""",
        new="""\
                self._give_up(self._lost())
""",
        tests=("tests/shm/test_full_ring.py",),
    ),
    Mutation(
        name="shm: a deadline runs on while collectives move",
        file=RING,
        old="if patience.deadline == 0 or progress != patience.progress:",
        new="if patience.deadline == 0:",
        tests=("tests/shm/test_deadlines.py",),
    ),
    Mutation(
        name="shm: a second Ctrl-C waits, too",
        file=RING,
        old="            if self.deferred is not None:\n                self.deferred = None\n",
        new="            if False:\n                self.deferred = None\n",
        tests=("tests/shm/test_interrupts.py",),
    ),
    Mutation(
        name="shm: what a signal handler raised is raised again by the next call",
        file=RING,
        old="            error, self.deferred = self.deferred, None\n            raise error from",
        new="            error = self.deferred\n            raise error from",
        tests=("tests/shm/test_interrupts.py",),
    ),
    Mutation(
        name="shm: an abandonment is told twice",
        file=RING,
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
        old="if shm_wait(self.handle, work.seq, 0) == SHM_MISMATCH:",
        new="if shm_wait(self.handle, work.seq, 0) == SHM_PEER_LOST:",
        tests=("tests/shm/test_abandon.py",),
    ),
    Mutation(
        name="shm: a tensor of another communicator's arena is one of this",
        file=RING,
        old="d.where = offset if offset < self.arena.nbytes else SHM_PRIVATE",
        new="d.where = offset if data > self.arena.base else SHM_PRIVATE",
        tests=("tests/shm/test_communicator.py", "tests/contract/test_async.py"),
    ),
    Mutation(
        name="shm: a cast gradient does not come back from the wire",
        file=RING,
        old="if error is None and self.flat is not None:",
        new="if error is not None and self.flat is not None:",
        tests=("tests/reducer/test_by_hand.py::test_reduce_passes_through_the_wire_dtype",),
    ),
    Mutation(
        name="shm: pieces of a bucket that is cast are read past the cast",
        file=BUCKET,
        old="elif self.wire is not self.flat or nbytes < SMALL_GRADIENT:",
        new="elif nbytes < SMALL_GRADIENT:",
        tests=("tests/reducer/test_wires.py",),
    ),
    Mutation(
        name="shm: large gradients are not held until they are reduced",
        file=BUCKET,
        old="            work.tensors.append(gradient)\n",
        new="",
        tests=("tests/shm/test_abandon.py",),
    ),
    Mutation(
        name="shm: a hole is not merged with the one before it",
        file=MEMORY,
        old="if merged and merged[-1][0] + merged[-1][1] == begin:",
        new="if False and merged[-1][0] + merged[-1][1] == begin:",
        tests=("tests/shm/test_memory.py",),
    ),
    Mutation(
        name="shm: a forked child writes into its parent's memory",
        file=MEMORY,
        old="        (<Segment>segment).make_private()\n",
        new="        pass\n",
        tests=("tests/reducer/test_defects.py::test_what_a_forked_child_writes_stays_with_it",),
    ),
    Mutation(
        name="shm: descriptors of peers' processes stay open",
        file=MEMORY,
        old="            if self.pidfds[r] >= 0:\n                close_fd(self.pidfds[r])\n",
        new="            pass\n",
        tests=(
            "tests/shm/test_memory.py::test_a_closed_communicator_keeps_no_mapping_and_no"
            "_descriptor",
        ),
    ),
)
