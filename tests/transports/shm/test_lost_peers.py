"""Peers that are killed in any collective, on any path and at any moment."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from fastcomm import PeerLostError
from tests.support.bodies import communicator, leave, left, note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.reference import check_all_reduce
from tests.transports.shm import COLLECTIVES


def _lose_a_peer(place, collective, how):
    """What the others get in the collective: the message, and how many seconds after the
    peer left.
    """
    comm = communicator(place)
    check_all_reduce(comm)
    if place.rank == place.world_size - 1:
        time.sleep(0.2)
        leave(place, comm, how)
        time.sleep(1)
        return None
    with pytest.raises(PeerLostError) as lost:
        COLLECTIVES[collective](comm)
    pid, seconds = left(place)
    with pytest.raises(PeerLostError):
        comm.barrier()
    return str(lost.value), pid, seconds


def assert_told_of_the_loss(outcomes, *words):
    *others, last = outcomes
    values_of(others)
    for message, pid, seconds in (outcome.value for outcome in others):
        assert f"rank {last.rank} (pid {pid})" in message
        assert any(word in message for word in words), message
        assert seconds < 1


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_killed_peer_is_named_within_a_second(collective):
    outcomes = fresh_ranks(3, _lose_a_peer, collective, "killed")
    assert_told_of_the_loss(outcomes, "died", "gave up on")
    assert outcomes[-1].exitcode == -signal.SIGKILL


def _abort_after_the_result(place):
    comm = communicator(place)
    comm.barrier()
    tensor = torch.ones(10)
    if place.rank == 1:
        comm.all_reduce(tensor)
        comm.abort()
        note(place, aborted=True)
        return None
    work = comm.all_reduce(tensor, async_op=True)
    while not Path(place.directory, "aborted").exists():
        time.sleep(0.01)
    work.wait()
    with pytest.raises(PeerLostError, match="rank 1 .*aborted"):
        comm.all_reduce(tensor)
    return tensor.tolist()


def test_a_result_that_all_ranks_have_is_good_though_a_peer_has_aborted_since():
    assert values_of(fresh_ranks(2, _abort_after_the_result))[0] == [2.0] * 10
