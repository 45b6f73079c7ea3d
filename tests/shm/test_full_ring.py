"""The ring is full: a rank that posts one collective more waits for its peers, and hears of those
that are lost or late.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from fastcomm import PeerLostError, TimeoutError
from tests.support.bodies import communicator, leave, noted, raised
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
    return message, int(noted(place, "pid")), time.monotonic() - float(noted(place, "left_at"))


def test_a_rank_that_waits_for_a_free_slot_hears_of_a_killed_peer():
    message, pid, seconds = values_of(fresh_ranks(2, _lose_a_peer)[:1])[0]
    assert f"rank 1 (pid {pid}) died" in message
    assert seconds < 1


def _wait_for_a_late_peer(place):
    comm = communicator(place, timeout=timedelta(seconds=0.5))
    comm.barrier()
    works = _fill(comm)
    if place.rank == 1:
        time.sleep(2)
        return None
    message, seconds = raised(TimeoutError, lambda: comm.all_reduce(torch.ones(4), async_op=True))
    assert len(works) == RING
    return message, seconds


def test_a_rank_that_waits_for_a_free_slot_keeps_to_the_deadline():
    message, seconds = values_of(fresh_ranks(2, _wait_for_a_late_peer))[0]
    assert "waited 0.5 s" in message
    assert "missing: rank 1" in message
    assert seconds < 1.5
