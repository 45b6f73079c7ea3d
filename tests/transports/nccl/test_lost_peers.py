"""Peers that go away, or never come, while a rank attaches, waits or trains."""

from __future__ import annotations

import os
import select
import time
from datetime import timedelta

import pytest
import torch

import fastcomm
from fastcomm import PeerLostError, TimeoutError
from fastcomm.comm import watchdog
from tests.fakes.stand_ins import assert_all_ended, failing, loaded
from tests.support.bodies import leave, left, note, raised, wait_for_note
from tests.support.models import mlp
from tests.support.outcomes import values_of
from tests.transports.nccl import communicator, outcomes_of

WAITS = {
    "attach": lambda comm: fastcomm.Reducer(comm).attach(mlp()),
    "a bucket": lambda comm: _bind(comm, lane=0),
    "a bucket of a second lane": lambda comm: _bind(comm, lane=1),
}


def _bind(comm, lane):
    flat = comm.empty(101, dtype=torch.float32).zero_()
    comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=None, label=1, lane=lane)


def _lose_a_peer(place, wait, how):
    comm = communicator(place)
    comm.barrier()
    if place.rank == place.world_size - 1:
        time.sleep(0.3)
        leave(place, comm, how)
        return None
    message, _ = raised(PeerLostError, lambda: WAITS[wait](comm))
    pid, seconds = left(place)
    with pytest.raises(PeerLostError):
        comm.barrier()
    assert_all_ended()
    return message, pid, seconds


def assert_told_of_the_loss(outcomes, words):
    *others, last = outcomes
    for message, pid, seconds in values_of(others):
        assert f"rank {last.rank} (pid {pid})" in message
        assert words in message
        assert seconds < 2


def _hear_of_the_loss_from_nccl(place):
    """Whose launch fails before the watchdog has looked."""
    comm = communicator(place)
    comm.barrier()
    if place.rank == 1:
        wait_for_note(place, "is_watched")
        leave(place, comm, "killed")
    pid = comm.processes[1].pid
    lifeline = os.pidfd_open(pid)
    note(place, is_watched=True)
    select.select([lifeline], [], [])  # until it has ended
    os.close(lifeline)
    with failing("ncclAllReduce", 6), pytest.raises(PeerLostError) as caught:
        comm.all_reduce(torch.ones(10))
    return pid, str(caught.value), caught.value.ranks


def test_a_peer_that_nccl_has_lost_is_named():
    ((pid, message, ranks),) = values_of(outcomes_of(2, _hear_of_the_loss_from_nccl)[:1])
    assert ranks == (1,)
    assert message.startswith(f"rank 1 (pid {pid}) died; rank 0: ncclAllReduce failed with code 6")


@pytest.mark.parametrize("wait", WAITS)
def test_a_peer_that_is_killed_before_a_bucket_is_bound_is_named_within_two_seconds(wait):
    assert_told_of_the_loss(outcomes_of(3, _lose_a_peer, wait, "killed"), "died")


def _hold_several_launches(place):
    watchdog.ANSWER_S = 0.1
    comm = communicator(place, timeout=timedelta(seconds=0.4))
    time.sleep(0.3)  # the watchdog has seen the ranks' meeting end
    loaded("cuda").stand_in_hold_events(1)
    works = [comm.all_reduce(torch.ones(numel), async_op=True) for numel in (10, 20, 30)]
    deadline = time.monotonic() + 60
    with pytest.raises(TimeoutError, match="rank 0 waits for .*all_reduce of 10 float32"):
        while time.monotonic() < deadline:
            comm.check()
            time.sleep(0.01)
    del works


def test_the_oldest_launch_is_the_one_that_is_waited_for():
    values_of(outcomes_of(1, _hold_several_launches))


def _finish_before_a_peer_dies(place):
    comm = communicator(place)
    loaded("cuda").stand_in_slow_queries(300_000)
    comm.all_reduce(torch.ones(10))
    if place.rank == 1:
        leave(place, comm, "killed")
    time.sleep(1)  # the watchdog looks several times
    comm.check()
    loaded("cuda").stand_in_slow_queries(0)


def test_what_is_over_needs_no_peer():
    """Also where the driver takes its time to say that it is."""
    values_of(outcomes_of(2, _finish_before_a_peer_dies)[:1])
