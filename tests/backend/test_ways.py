"""Which way a collective of the backend "fastcomm" goes: over its own communicator, or Gloo's."""

from __future__ import annotations

import threading
import time
from collections import Counter

import torch
import torch.distributed as dist

from tests.support.outcomes import values_of
from tests.support.process_groups import start
from tests.support.ranks import fresh_ranks
from tests.support.reference import DTYPES


class _Counting:
    """The group's communicator, counting what it reduces by dtype."""

    def __init__(self, comm):
        self._comm, self.counts = comm, Counter()

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_reduce(self, tensor, *arguments, **options):
        self.counts[tensor.dtype] += 1
        return self._comm.all_reduce(tensor, *arguments, **options)


def _reduce(place):
    start(place)
    shared = dist.group.WORLD._cpu
    counting = shared.comm = _Counting(shared.comm)
    for dtype in (*DTYPES, torch.int8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = torch.full((3,), place.rank + 1, dtype=dtype)
            dist.all_reduce(tensor, op)
            assert tensor.tolist() == [3 if op == dist.ReduceOp.SUM else 2] * 3
    dist.destroy_process_group()
    return dict(counting.counts)


def test_every_dtype_of_the_transport_is_reduced_by_it_and_no_other():
    assert values_of(fresh_ranks(2, _reduce)) == [dict.fromkeys(DTYPES, 2)] * 2


def _threads_of_progress():
    return [thread for thread in threading.enumerate() if thread.name == "fastcomm-progress"]


def _leave_the_work_to_the_thread(place):
    start(place)
    if place.rank == 1:
        time.sleep(0.5)  # rank 0's thread has to wait for it; here all may be done in the call
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    deadline = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert _threads_of_progress() or place.rank == 1
    work.wait()
    time.sleep(0.05)  # the thread has nothing to do, and sleeps
    dist.destroy_process_group()
    for thread in _threads_of_progress():
        thread.join(5)
    return len(_threads_of_progress())


def test_the_thread_that_makes_progress_ends_with_its_group():
    assert values_of(fresh_ranks(2, _leave_the_work_to_the_thread)) == [0, 0]
