"""How communicators over a torch.distributed group end with collectives under way."""

from __future__ import annotations

import functools
import gc
import threading
import time
from datetime import timedelta

import pytest
import torch

from fastcomm import FastcommError, TimeoutError, watchdog
from tests.contract import new_ranks
from tests.support.bodies import communicator, note, noted, raised, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.transports import over


def _close_with_a_work_under_way(place):
    comm = communicator(place)
    comm.barrier()
    if place.rank == 1:
        before = comm.number
        work = comm.all_reduce(torch.ones(5000), async_op=True)
        while comm.number == before:  # announced, but rank 0 has not come
            time.sleep(0.001)
        comm.close()
        note(place, closed_at=time.monotonic())
        with pytest.raises(FastcommError, match="closed"):
            work.wait()
        return None
    time.sleep(0.3)
    message, _ = raised(FastcommError, lambda: comm.all_reduce(torch.ones(5000)))
    return message, time.monotonic() - float(noted(place, "closed_at"))


@pytest.mark.usefixtures("transport")
@over(2, shm=(), nccl=())
def test_a_peer_that_closes_with_a_work_under_way_is_named_soon(transport, world_size):
    outcomes = new_ranks(transport, world_size, _close_with_a_work_under_way)
    message, seconds = values_of(outcomes)[0]
    assert "rank 1" in message and "closed its communicator" in message
    assert seconds < 2


def _threads_of_queues():
    return [thread for thread in threading.enumerate() if thread.name == "fastcomm group"]


def _wait_for_one_who_stays_away_from_shared_memory(place):
    watchdog.ANSWER_S = 0.2
    comm = communicator(place, timeout=timedelta(seconds=1))
    comm.barrier()
    if place.rank == 1:
        is_over = threading.Event()
        comm._exchange._in_host = lambda *arguments: is_over.wait()
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
