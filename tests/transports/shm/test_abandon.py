"""What of a round that is abandoned is still in use, by this rank's ring and by its peers."""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta

import pytest
import torch

from fastcomm import AbandonedError, MismatchError, PeerLostError
from tests.support.bodies import communicator, leave, left, note, raised, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks

NUMEL = 20_000  # read where autograd has put it, and never copied
M_PERTURB = -6  # of glibc's mallopt: memory is overwritten when it is freed


class _Buckets:
    """Three, of one parameter each."""

    def __init__(self, comm):
        self.parameters = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(3)]
        self.flats = [comm.empty(NUMEL + 1, dtype=torch.float32).zero_() for _ in range(3)]
        self._bound = [
            comm.bind_bucket(flat, [flat[:NUMEL]], [0], wire_dtype=None, label=label)
            for label, flat in enumerate(self.flats)
        ]

    def launch(self, value):
        """Nobody but the buckets holds the gradients."""
        works = []
        for parameter, bound in zip(self.parameters, self._bound, strict=True):
            parameter.grad = torch.full((NUMEL,), value)
            bound.gather([parameter])
            works.append(bound.launch("sum", []))
        return works


def _abandon_with_gradients_under_way(place):
    ctypes.CDLL(None).mallopt(M_PERTURB, 0xFF)
    comm = communicator(place, timeout=timedelta(seconds=5))
    buckets = _Buckets(comm)
    comm.barrier()
    if place.rank == 1:
        buckets.launch(2.0)
        comm.abandon()  # while the peer has yet to come to the first of them
        return None
    time.sleep(0.3)
    works = buckets.launch(1.0)
    with pytest.raises(AbandonedError):
        for work in works:
            work.wait()
        comm.barrier()
    return [flat[:NUMEL].unique().tolist() for flat in buckets.flats]


def test_gradients_that_peers_still_reduce_live_until_the_ranks_have_met():
    assert values_of(fresh_ranks(2, _abandon_with_gradients_under_way))[0] == [[3.0]] * 3


def _abandon_with_one_who_is_lost(place):
    comm = communicator(place, timeout=timedelta(seconds=5))
    comm.barrier()
    if place.rank == 1:
        threading.Timer(0.2, leave, (place, comm, "killed")).start()
        comm.abandon()
    time.sleep(0.5)
    message, _ = raised(PeerLostError, comm.abandon)
    return message, *left(place)


def test_a_rank_that_abandons_hears_of_a_peer_that_has_abandoned_and_died():
    message, pid, seconds = values_of(fresh_ranks(2, _abandon_with_one_who_is_lost)[:1])[0]
    assert f"rank 1 (pid {pid}) died" in message
    assert seconds < 3


def _abandon_after_a_mismatch(place):
    comm = communicator(place, timeout=timedelta(seconds=5))
    first = comm.all_reduce(torch.ones(4), ("sum", "max")[place.rank], async_op=True)
    if place.rank == 1:
        with pytest.raises(MismatchError):
            first.wait()
        comm.abandon()
        return
    second = comm.all_reduce(torch.ones(4), async_op=True)
    with pytest.raises(MismatchError, match="op sum.*op max"):
        second.wait()


def test_a_rank_hears_of_the_mismatch_for_which_another_has_abandoned():
    values_of(fresh_ranks(2, _abandon_after_a_mismatch))


def _hear_of_it_with_two_works_behind(place):
    comm = communicator(place)
    buckets = _Buckets(comm)
    if place.rank == 1:
        wait_for_note(place, "posted")
        comm.abandon()
        return None
    first, *_ = buckets.launch(1.0)
    note(place, posted=True)
    raised(AbandonedError, first.wait)
    # of the rest, what the other rank reduces was copied at once
    return [bool(flat[: NUMEL // 2].any()) for flat in buckets.flats]


def test_what_was_posted_behind_an_abandoned_collective_is_not_gathered_any_more():
    """Its gradients are gone by then."""
    outcomes = fresh_ranks(2, _hear_of_it_with_two_works_behind, transport="shm")
    assert values_of(outcomes)[0] == [False] * 3
