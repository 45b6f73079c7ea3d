"""An announcement in shared memory of no collective: what the other ranks say of it. What the C
core makes of thousands is a scenario of its driver.
"""

from __future__ import annotations

import ctypes
import random
import struct
import time

import pytest
import torch

from fastcomm import MismatchError, PeerLostError
from tests.support.bodies import Place, communicator, note, wait_for_note
from tests.support.ranks import fresh_ranks

N_ANNOUNCEMENTS = 12  # fewer than the ring has slots: this rank reads none of its peer's
N_SLOTS, SLOT_NBYTES, FLAG_NBYTES = 16, 64, 8


def _post(segment: int, number: int, announcement: bytes) -> None:
    slot = segment + number % N_SLOTS * SLOT_NBYTES
    ctypes.memmove(slot + FLAG_NBYTES, announcement, len(announcement))
    ctypes.memmove(slot, struct.pack("I", number), 4)


def _newest(segment: int) -> int:
    """The number of the newest collective that was posted there."""
    slots = ctypes.string_at(segment, N_SLOTS * SLOT_NBYTES)
    return max(struct.unpack_from("I", slots, i * SLOT_NBYTES)[0] for i in range(N_SLOTS))


def _segment_of(address: int) -> int:
    """Where the mapping begins that the address lies in."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(one, 16) for one in line.split()[0].split("-"))
            if begin <= address < end:
                return begin
    raise AssertionError("no mapping")


def _announcements(seed: int) -> list[bytes]:
    """Of an all_reduce of 3 float32 elements, with one wrong field; see announcement.h."""
    fields = {"kind": 2, "op": 0, "dtype": 0, "wire": 0, "root": 0, "numel": 3}
    bits = {"root": 16, "numel": 64}
    chosen = random.Random(seed)
    found = []
    for i in range(N_ANNOUNCEMENTS):
        name = list(fields)[i % len(fields)]
        wrong = chosen.choice([2 ** bits.get(name, 8) - 1, 77])
        *small, numel = (fields | {name: wrong}).values()
        found.append(struct.pack("=BBBBHBBIxxxxQQQdd", *small, 0, 0, 0, numel, 0, 0, 0.0, 0.0))
    return found


def _meet_nonsense(place: Place, seed: int) -> list[str]:
    comm = communicator(place)
    comm.barrier()
    if place.rank == 1:
        segment = _segment_of(comm.empty(1, dtype=torch.float32).data_ptr())
        for number, announcement in enumerate(_announcements(seed), _newest(segment) + 1):
            _post(segment, number, announcement)
        note(place, posted="")
        wait_for_note(place, "read")
        return []
    wait_for_note(place, "posted")
    words = []
    for _ in range(N_ANNOUNCEMENTS):
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(torch.ones(3))
        words.append(str(caught.value))
    note(place, read="")
    deadline = time.monotonic() + 60
    with pytest.raises(PeerLostError) as lost:
        while time.monotonic() < deadline:
            comm.barrier()
    return [*words, str(lost.value)]


@pytest.mark.parametrize("seed", range(3))
def test_an_announcement_of_nothing_is_a_mismatch_that_names_its_rank(seed):
    first, _ = fresh_ranks(2, _meet_nonsense, seed)
    *words, lost = first.value
    assert len(words) == N_ANNOUNCEMENTS
    assert all("rank 0: all_reduce of 3 float32 elements, op sum; rank 1: " in one for one in words)
    assert sum("rank 1: what is no collective" in one for one in words) >= 6
    assert lost.startswith("rank 1 (pid ")
