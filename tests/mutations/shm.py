"""fastcomm/shm: the ring, the buckets, and the memory they share."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RING = "fastcomm/shm/ring.pyx"

MUTATIONS = (
    Mutation(
        name="shm: gradients of an abandoned round are freed at once",
        file=RING,
        old="self.leaving += self._settle_all(error)  # their",
        new="for work in self._settle_all(error): work.release()  # their",
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
)
