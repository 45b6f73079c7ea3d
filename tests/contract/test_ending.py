"""How communicators end: closed, aborted, or left by an exception."""

from __future__ import annotations

import re
import sys
import threading
import time

import pytest
import torch

from fastcomm import FastcommError, PeerLostError
from tests.contract import assert_ended, new_ranks
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


def _launch_a_bucket(comm):
    flat = torch.zeros(4)
    comm.bind_bucket(flat, [flat[:3]], [0], wire_dtype=None, label=1).launch("sum", [])


def _use_after_end(place, end):
    comm = communicator(place)
    getattr(comm, end)()
    getattr(comm, end)()
    comm.close()
    four = torch.zeros(4)
    calls = (
        lambda: comm.all_reduce(four),
        lambda: comm.all_reduce(four, async_op=True),
        lambda: comm.all_reduce_coalesced([four]),
        lambda: comm.broadcast(four),
        lambda: comm.all_gather_single(torch.zeros(8), four),
        lambda: comm.reduce_scatter_single(torch.zeros(2), four),
        comm.barrier,
        comm.abandon,
        lambda: comm.empty(4, dtype=torch.float32),
        lambda: _launch_a_bucket(comm),
    )
    for call in calls:
        with pytest.raises(FastcommError, match=end):
            call()
    assert_ended(comm)


@pytest.mark.parametrize("end", ["close", "abort"])
@over(2)
def test_a_communicator_says_that_it_has_ended(transport, world_size, end):
    values_of(new_ranks(transport, world_size, _use_after_end, end))


def _end_before_the_others_come(place, end):
    comm = communicator(place)
    if place.rank == 0:
        works = [
            comm.all_reduce(torch.zeros(5000), async_op=True),
            comm.all_reduce_coalesced([torch.zeros(5), torch.zeros(5000)], async_op=True),
        ]
        getattr(comm, end)()
        for work in works:
            with pytest.raises(FastcommError, match=end):
                work.wait()
    else:
        time.sleep(1)


# NCCL's stand-in carries a collective out in the call: there is no work that is under way.
@pytest.mark.parametrize("end", ["close", "abort"])
@over(2, nccl=())
def test_a_work_says_that_its_communicator_has_ended(transport, world_size, end):
    values_of(new_ranks(transport, world_size, _end_before_the_others_come, end))


def _finish_before_the_end(place):
    with communicator(place) as comm:
        work = comm.all_reduce(torch.zeros(5000), async_op=True)
        work.wait()
    work.wait()
    assert work.is_completed()


@over(2, shm=(1, 2))
def test_a_finished_work_remains_so_after_the_end(transport, world_size):
    values_of(new_ranks(transport, world_size, _finish_before_the_end))


def _fail_inside_context_manager(place):
    with communicator(place) as comm:
        if place.rank == 0:
            raise KeyError("of the user's own making")
        comm.barrier()


@over(2)
def test_a_context_manager_left_by_an_exception_lets_nobody_wait(transport, world_size):
    first, second = new_ranks(transport, world_size, _fail_inside_context_manager, timeout=20)
    assert first.is_a(KeyError), first
    assert second.is_a(PeerLostError), second


def _exit_inside_context_manager(place):
    if place.rank == 1:
        with communicator(place):
            sys.exit()
    comm = communicator(place)
    with pytest.raises(PeerLostError, match=r"rank 1 .*closed .*data ended earlier"):
        comm.barrier()


@over(2)
def test_a_rank_that_exits_in_good_order_inside_a_context_manager_has_closed(transport, world_size):
    values_of(new_ranks(transport, world_size, _exit_inside_context_manager)[:1])


def _follow(comm, errors):
    """What a thread that draws from a join() does once its rank has no data any more."""
    try:
        while not comm.follow():
            pass
        comm.barrier()
    except FastcommError as error:
        errors.append(str(error))


def _is_waited_in(comm):
    try:
        comm.check()
    except FastcommError as error:
        return "another thread" in str(error)
    return False


def _close_beside_a_thread_that_follows(place, closed):
    comm, errors = communicator(place), []
    thread = threading.Thread(target=_follow, args=(comm, errors))
    if place.rank == 0:
        while not closed.exists():  # then this rank comes, and ends what the other waits for
            time.sleep(0.01)
        thread.start()
    else:
        thread.start()
        while comm.backend == "shm" and not _is_waited_in(comm):
            pass
        comm.close()
        closed.touch()
    thread.join()
    return errors


@over(2, nccl=())
def test_a_communicator_may_be_closed_while_a_thread_follows_the_others(
    transport, world_size, tmp_path
):
    lost, closed = values_of(
        new_ranks(transport, world_size, _close_beside_a_thread_that_follows, tmp_path / "closed")
    )
    assert "rank 1 has closed this communicator" in closed[0]
    assert re.search(r"rank 1 .*closed its communicator", lost[0])


def _abort_from_another_thread(place):
    comm = communicator(place)
    if place.rank == 1:
        time.sleep(2)
        return None
    threading.Timer(0.3, comm.abort).start()
    before = time.monotonic()
    with pytest.raises(FastcommError, match="aborted"):
        comm.all_reduce(torch.ones(100_000))
    assert time.monotonic() - before < 2.5
    assert_ended(comm)
    return "aborted"


@over(2)
def test_another_thread_may_abort_a_collective_that_waits(transport, world_size):
    outcomes = values_of(new_ranks(transport, world_size, _abort_from_another_thread))
    assert outcomes == ["aborted", None]
