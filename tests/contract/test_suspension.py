"""Processes that are stopped for longer than the timeout and go on: a job that was suspended."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from fastcomm import FastcommError, InitError, TimeoutError
from tests.contract import new_ranks
from tests.support import process_groups
from tests.support.bodies import communicator, note, noted, raised, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.transports import over

TIMEOUT = timedelta(seconds=2)
STOPPED_S = 3.0  # longer than the timeout
LATE_S = 0.5  # when the job goes on


def _suspend(*ranks, place, seconds=STOPPED_S):
    """Stops these ranks, a moment later. Those that are not rank 0 return afterwards: they come
    late to what rank 0 calls meanwhile.
    """
    note(place, **{f"pid {place.rank}": os.getpid()})
    if place.rank == 0:
        for rank in ranks:
            wait_for_note(place, f"pid {rank}")
        pids = " ".join(noted(place, f"pid {rank}") for rank in ranks)
        script = f"sleep 0.3; kill -STOP {pids}; sleep {seconds}; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", script])
        return
    before = time.monotonic()
    while (now := time.monotonic()) - before < seconds / 2:
        before = now
        time.sleep(0.01)
    time.sleep(LATE_S)


def _reduce_in_a_suspended_job(place):
    comm = communicator(place, timeout=TIMEOUT)
    comm.barrier()
    _suspend(0, 1, place=place)
    for tensor in (torch.ones(3), torch.ones(70_000)):
        comm.all_reduce(tensor)
        assert bool((tensor == 2).all())


@over(2)
def test_a_suspended_job_goes_on(transport, world_size):
    values_of(new_ranks(transport, world_size, _reduce_in_a_suspended_job))


def _miss_a_rank(place, what):
    """What rank 0 says, after a suspension, of rank 1, which does not come."""
    if what == "collective":
        wait = communicator(place, timeout=TIMEOUT).barrier
        wait()
    else:

        def wait():
            communicator(place, timeout=TIMEOUT)

    _suspend(0, 1, place=place)
    if place.rank == 0:
        message, *_ = raised((TimeoutError, InitError), wait)
        note(place, over=True)
        return message
    wait_for_note(place, "over")
    return None


@over(2)
def test_a_rank_that_does_not_come_after_a_suspension_is_missed(transport, world_size):
    message, _ = values_of(new_ranks(transport, world_size, _miss_a_rank, "collective"))
    assert "waited 2 s" in message and "missing: rank 1" in message


def test_a_rank_that_does_not_meet_the_others_after_a_suspension_is_missed():
    message, _ = values_of(fresh_ranks(2, _miss_a_rank, "init"))
    assert "waited 2 s" in message and "missing: rank 1" in message


def _suspend_one(place):
    comm = communicator(place, timeout=TIMEOUT)
    comm.barrier()
    _suspend(1, place=place, seconds=8)  # the others ask where it is, too
    return raised(FastcommError, lambda: comm.all_reduce(torch.ones(5000)))[0]


@over(2)
def test_a_rank_that_was_suspended_alone_hears_that_the_others_missed_it(transport, world_size):
    of_the_other, own = values_of(new_ranks(transport, world_size, _suspend_one))
    assert "waited 2 s" in of_the_other and "missing: rank 1" in of_the_other
    assert own == of_the_other or "rank 0" in own and "gave up on rank 1" in own


def _reduce_by_the_backend_in_a_suspended_job(place):
    process_groups.start(place, TIMEOUT)
    dist.barrier()
    _suspend(0, 1, place=place)
    dist.all_reduce(tensor := torch.ones(70_000))
    assert bool((tensor == 2).all())


def test_a_suspended_job_goes_on_over_the_backend():
    values_of(fresh_ranks(2, _reduce_by_the_backend_in_a_suspended_job))
