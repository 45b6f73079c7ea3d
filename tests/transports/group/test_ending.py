"""How communicators over a torch.distributed group end with collectives unfinished."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import threading
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch

from fastcomm import FastcommError, PeerLostError, TimeoutError
from fastcomm.comm import watchdog
from fastcomm.comm.watchdog import leave_note
from fastcomm.transports.group import exchange, work_queue
from tests.contract import new_ranks
from tests.support.bodies import communicator, note, noted, raised, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.transports import environment_of, over


def _close_with_works_unfinished(place):
    """Of three all-reductions that are fused, behind another one."""
    comm = communicator(place)
    comm.barrier()
    before = comm.number
    if place.rank == 1:
        first = comm.all_reduce(torch.ones(5000), "max", async_op=True)
        works = [comm.all_reduce(torch.ones(5000), async_op=True) for _ in range(3)]
        note(place, posted=True)
        first.wait()
        while comm.number < before + 2:  # announced, but rank 0 has not come
            time.sleep(0.001)
        comm.close()
        note(place, closed_at=time.monotonic())
        for work in works:
            with pytest.raises(FastcommError, match="closed"):
                work.wait()
        return None
    wait_for_note(place, "posted")
    comm.all_reduce(torch.ones(5000), "max")
    time.sleep(0.3)
    works = [comm.all_reduce(torch.ones(5000), async_op=True) for _ in range(3)]
    messages = {raised(PeerLostError, work.wait)[0] for work in works}
    return messages, time.monotonic() - float(noted(place, "closed_at"))


@pytest.mark.usefixtures("transport")
@over(2, shm=(), nccl=())
def test_a_peer_that_closes_with_works_unfinished_is_named_soon(transport, world_size):
    outcomes = new_ranks(transport, world_size, _close_with_works_unfinished)
    messages, seconds = values_of(outcomes)[0]
    (message,) = messages
    assert "rank 1" in message and "closed its communicator" in message
    assert seconds < 2


def _kill_in_the_midst_of_a_message(place):
    with mock.patch.object(socket, "gethostname", return_value=f"node{place.rank}"):
        comm = communicator(place, timeout=timedelta(seconds=30))
    tensor = torch.full((128 * 2**20,), float(place.rank), dtype=torch.bfloat16)
    if place.rank == 1:
        note(place, pid=os.getpid())
    comm.barrier()
    with mock.patch.object(exchange, "CHUNK_NBYTES", tensor.nbytes):  # one message
        while place.rank == 1:
            comm.broadcast(tensor, src=1)
        work = _stopped_broadcast(comm, tensor, int(noted(place, "pid")))
    os.kill(int(noted(place, "pid")), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"^rank 1 \(pid \d+, node1\) died or cannot be"):
        work.wait()


def _stopped_broadcast(comm, tensor, pid):
    """A broadcast of rank 1's ones, whose process stands still when less than half have come."""
    while True:
        work = comm.broadcast(tensor.zero_(), src=1, async_op=True)
        while not tensor[0]:
            time.sleep(0.0001)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)  # for what it had handed to the kernel
        if not tensor[tensor.numel() // 2]:
            return work
        os.kill(pid, signal.SIGCONT)
        work.wait()


def test_a_rank_that_dies_while_its_data_is_on_its_way_is_missed_soon():
    """Gloo does not tell who waits for a message that has begun to come."""
    env = [environment_of("hierarchical", rank) for rank in range(2)]
    outcomes = fresh_ranks(2, _kill_in_the_midst_of_a_message, transport="hierarchical", env=env)
    values_of(outcomes, 1)


@pytest.mark.usefixtures("transport")
@over(2, shm=(), nccl=(), hierarchical=())
def test_connections_do_not_outlive_the_communicator(transport, world_size):
    values_of(new_ranks(transport, world_size, _keep_a_bucket))


def _keep_a_bucket(place):
    comm = communicator(place)
    flat = torch.ones(5000)
    bucket = comm.bind_bucket(flat, [flat[:-1]], [0], wire_dtype=None, label=1)
    bucket.launch("sum", []).wait()
    groups = [weakref.ref(group) for group in comm._exchange._own_groups]
    comm.close()
    gc.collect()
    assert bucket.transfer is not None
    assert [group() for group in groups] == [None] * 3


def _break_a_connection_to_a_peer_that_answers(place):
    work_queue.EXPLAIN_S = 0.1
    comm = communicator(place)
    comm.barrier()
    if place.rank == 1:
        while comm.failure is None:
            time.sleep(0.01)
        return None

    def break_down(*_):
        leave_note(comm._queue._notes, "question", "where are you?")
        while comm._queue._notes.read("here/1") is None:
            time.sleep(0.01)
        raise RuntimeError("reset by peer")

    comm._exchange.announcer.announce = break_down
    with pytest.raises(PeerLostError) as lost:
        comm.barrier()
    return str(lost.value), lost.value.ranks


@pytest.mark.usefixtures("transport")
@over(2, shm=(), nccl=(), hierarchical=())
def test_a_peer_that_answers_is_not_lost(transport, world_size):
    outcomes = new_ranks(transport, world_size, _break_a_connection_to_a_peer_that_answers)
    (message, ranks), _ = values_of(outcomes)
    assert message.startswith("a connection between the ranks broke; rank 0 ")
    assert ranks == ()


def _threads_of_queues():
    return [thread for thread in threading.enumerate() if thread.name == "fastcomm group"]


def _wait_for_one_who_stays_away_from_shared_memory(place):
    watchdog.ANSWER_S = 0.2
    comm = communicator(place, timeout=timedelta(seconds=1))
    comm.barrier()
    if place.rank == 1:
        is_over = threading.Event()
        comm._exchange.in_host = lambda *arguments: is_over.wait()
        comm.all_reduce(torch.ones(5000), async_op=True)
        wait_for_note(place, "rank 0 is through")
        is_over.set()
        return None
    raised(TimeoutError, functools.partial(comm.all_reduce, torch.ones(5000)))
    del comm
    gc.collect()
    for thread in _threads_of_queues():
        thread.join(3)
    note(place, **{"rank 0 is through": True})
    return len(_threads_of_queues())


def test_after_a_failure_no_thread_stays_in_the_shared_memory_of_its_host():
    outcomes = fresh_ranks(
        2,
        _wait_for_one_who_stays_away_from_shared_memory,
        env={"FASTCOMM_HOST_ID": "one"},
        transport="hierarchical",
    )
    assert outcomes[0].value == 0, outcomes[0]


def _abort_while_an_announcement_goes_on(place):
    comm = communicator(place, timeout=timedelta(seconds=20))
    comm.barrier()
    if place.rank == 1:
        wait_for_note(place, "aborted")
        return None
    comm.barrier(async_op=True)
    with mock.patch.object(comm._exchange, "interrupt"):  # as if it came too early
        before = time.monotonic()
        comm.abort()
        seconds = time.monotonic() - before
    note(place, aborted=True)
    return seconds


@pytest.mark.usefixtures("transport")
@over(2, shm=(), nccl=())
def test_an_abort_waits_for_no_announcement_that_gloo_goes_on_with(transport, world_size):
    seconds, _ = values_of(new_ranks(transport, world_size, _abort_while_an_announcement_goes_on))
    assert seconds < 5


def _wait_without_a_watchdog(place):
    work_queue.NAMED_S = 0.1
    comm = communicator(place)
    comm.barrier()
    comm._queue._timeout_s = 1
    if place.rank == 1:
        wait_for_note(place, "timed_out")
        return None
    comm._queue.watchdog.stop()  # as if it waited for a store that is out of reach
    message, *_ = raised(TimeoutError, comm.barrier)
    note(place, timed_out=True)
    return message


@pytest.mark.usefixtures("transport")
@over(2, shm=(), nccl=())
def test_a_rank_that_the_store_does_not_answer_says_which_host_to_look_at(transport, world_size):
    message, _ = values_of(new_ranks(transport, world_size, _wait_without_a_watchdog))
    assert "rank 0 waits for collective number" in message
    assert "can this host reach rank 0's?" in message
