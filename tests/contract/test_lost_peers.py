"""Peers that go away. The last rank does; every other one is told which, and why, and soon."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

from fastcomm import PeerLostError
from tests.contract import assert_ended, new_ranks
from tests.support.bodies import communicator, leave, left
from tests.support.outcomes import values_of
from tests.support.ranks import torchrun_env
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")

# How many seconds after the loss the others hear of it, at most: through a process's descriptor,
# through notes in a store, and through those once Gloo's connections have broken.
SOON_S = {"shm": 1, "nccl": 2, "group": 3, "hierarchical": 6}


def _lose_a_peer(place, how):
    """What the others get in a collective: the message, and how many seconds after the peer
    left.
    """
    comm = communicator(place)
    check_all_reduce(comm)
    if place.rank == place.world_size - 1:
        time.sleep(0.2)
        leave(place, comm, how)
        time.sleep(2 if place.transport != "shm" else 1)
        return None
    with pytest.raises(PeerLostError) as lost:
        comm.all_reduce(torch.ones(1_000_000))
    pid, seconds = left(place)
    with pytest.raises(PeerLostError):
        comm.barrier()
    has_ended = re.search(r"\) (died|ended)", str(lost.value))
    dead = (place.world_size - 1,) if has_ended else ()
    assert lost.value.ranks == comm.failure.ranks == dead
    assert comm.close() is None
    assert_ended(comm)
    return str(lost.value), pid, seconds


WORDS = {
    "killed": "died",
    "exits": "ended without close() (has its data ended earlier?",
    "exits by an exception": "ended by an exception, which it has printed",
    "exits at once": "died",
    "closes": "closed",
    "aborts": "aborted",
    "raises": "dropped its communicator",
}


def cases():
    """Over shared memory a peer is watched by every wait, elsewhere by a thread."""
    for how in WORDS:
        yield "shm", how
    for how in ("killed", "closes", "aborts", "exits", "exits by an exception"):
        for transport in ("nccl", "group", "hierarchical"):
            yield transport, how
    yield "nccl", "exits at once"


@pytest.mark.parametrize("transport, how", list(cases()), indirect=["transport"])
def test_a_peer_that_leaves_is_named_soon(transport, how):
    outcomes = new_ranks(transport, 3, _lose_a_peer, how)
    *others, last = outcomes
    for message, pid, seconds in values_of(others):
        assert f"rank {last.rank} (pid {pid})" in message
        # Over shared memory, a rank that hears of it from another says so.
        others_words = ("died", "gave up on") if transport == "shm" else ()
        assert any(word in message for word in (WORDS[how], *others_words)), message
        assert seconds < SOON_S[transport]
    if how == "killed":
        assert last.exitcode == -signal.SIGKILL


def _lose_a_peer_with_works_under_way(place):
    comm = communicator(place)
    if place.rank == 1:
        leave(place, comm, "killed")
    works = [comm.all_reduce(torch.ones(5000), async_op=True) for _ in range(5)]
    for work in works:
        with pytest.raises(PeerLostError):
            work.wait()


@over(2, nccl=())  # whose stand-in carries a collective out in the call, which raises then
def test_every_work_under_way_hears_of_a_lost_peer(transport, world_size):
    values_of(new_ranks(transport, world_size, _lose_a_peer_with_works_under_way)[:1])


def _lose_rank_0(place):
    comm = communicator(place, init_method=os.environ["MEETING_POINT"])
    comm.barrier()
    if place.rank == 0:
        leave(place, comm, "killed")
    with pytest.raises(PeerLostError) as lost:
        comm.all_reduce(torch.ones(10))
    pid, seconds = left(place)
    assert seconds < SOON_S[place.transport]
    assert_ended(comm)
    return str(lost.value), pid


@over(3)
def test_the_rank_that_keeps_the_store_may_be_the_one_that_dies(transport, world_size):
    meeting_point = {"MEETING_POINT": f"tcp://127.0.0.1:{torchrun_env(3)[0]['MASTER_PORT']}"}
    outcomes = new_ranks(transport, world_size, _lose_rank_0, env=meeting_point)
    for rank, (message, pid) in enumerate(values_of(outcomes[1:]), 1):
        # Whoever misses the store first knows no pid.
        assert f"rank 0 (pid {pid})" in message or "did rank 0's process end?" in message
        if transport == "nccl":
            what = "all_reduce of 10 float32 elements, op sum"
            assert message == f"rank 0 (pid {pid}) died; rank {rank} waits for {what}"
