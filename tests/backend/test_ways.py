"""Which way a collective of the backend "fastcomm" goes: over its own communicator, or Gloo's."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from tests.support.outcomes import values_of
from tests.support.process_groups import start
from tests.support.ranks import fresh_ranks
from tests.support.reference import DTYPES


def _average(place):
    start(place)
    averages = {}
    for dtype in DTYPES:
        tensor = torch.full((3,), 2 * place.rank, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        averages[dtype] = tensor.tolist()
    dist.destroy_process_group()
    return averages


def test_every_dtype_is_averaged_which_gloo_refuses():
    assert values_of(fresh_ranks(2, _average)) == [dict.fromkeys(DTYPES, [1] * 3)] * 2


def _threads_of_progress():
    return [thread for thread in threading.enumerate() if thread.name == "fastcomm-progress"]


def _leave_the_work_to_the_thread(place):
    start(place)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert _threads_of_progress()
    work.wait()
    time.sleep(0.05)  # the thread has nothing to do, and sleeps
    dist.destroy_process_group()
    for thread in _threads_of_progress():
        thread.join(5)
    return len(_threads_of_progress())


def test_the_thread_that_makes_progress_ends_with_its_group():
    assert values_of(fresh_ranks(2, _leave_the_work_to_the_thread)) == [0, 0]
