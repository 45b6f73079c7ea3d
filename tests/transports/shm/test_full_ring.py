"""The ring is full: a rank that posts one collective more waits for its peers, and hears of those
that are lost or late.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from fastcomm import MismatchError, PeerLostError, TimeoutError
from tests.support.bodies import communicator, leave, left, note, raised, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks

RING = 16  # SHM_RING of kernels/shm/core.h


def _fill(comm):
    """Every rank's mailbox is filled, but no rank has read any."""
    return [comm.all_reduce(torch.ones(4), async_op=True) for _ in range(RING)]


def _lose_a_peer(place):
    comm = communicator(place, timeout=timedelta(seconds=5))
    comm.barrier()
    works = _fill(comm)
    if place.rank == 1:
        leave(place, comm, "killed")
    time.sleep(0.3)
    message, _ = raised(PeerLostError, lambda: comm.all_reduce(torch.ones(4), async_op=True))
    assert len(works) == RING
    return message, *left(place)


def test_a_rank_that_waits_for_a_free_slot_hears_of_a_killed_peer():
    message, pid, seconds = values_of(fresh_ranks(2, _lose_a_peer)[:1])[0]
    assert f"rank 1 (pid {pid}) died" in message
    assert seconds < 3


def _wait_for_a_late_peer(place):
    comm = communicator(place, timeout=timedelta(seconds=1))
    comm.barrier()
    works = _fill(comm)
    if place.rank == 1:
        wait_for_note(place, "rank 0 has heard")
        return None
    message, seconds = raised(TimeoutError, lambda: comm.all_reduce(torch.ones(4), async_op=True))
    note(place, **{"rank 0 has heard": True})
    assert len(works) == RING
    return message, seconds


def test_a_rank_that_waits_for_a_free_slot_keeps_to_the_deadline():
    message, seconds = values_of(fresh_ranks(2, _wait_for_a_late_peer))[0]
    assert "waited 1 s" in message
    assert "missing: rank 1" in message
    assert seconds < 3


def _post(comm, numel, n):
    return [comm.all_reduce(torch.ones(numel), async_op=True) for _ in range(n)]


def _ask_late(place):
    comm = communicator(place, timeout=timedelta(seconds=5))
    first = comm.all_reduce(torch.ones(4), ("sum", "max")[place.rank], async_op=True)
    for work in _post(comm, 5, RING - 1):
        work.wait()
    if place.rank == 0:
        wait_for_note(place, "posted")
    else:
        later = _post(comm, 6, RING - 1)
        note(place, posted=True)  # in all slots but one
    message, _ = raised(MismatchError, first.wait)
    if place.rank == 0:
        later = _post(comm, 6, RING - 1)
    for work in later:
        work.wait()
    return message


def test_a_mismatch_names_what_was_called_though_the_slots_are_in_use_again():
    for message in values_of(fresh_ranks(2, _ask_late)):
        assert "rank 0: all_reduce of 4 float32 elements, op sum" in message
        assert "rank 1: all_reduce of 4 float32 elements, op max" in message
