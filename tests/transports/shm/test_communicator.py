"""What only ShmCommunicator promises: its place beside other communicators of the process, and the
GIL.
"""

from __future__ import annotations

import mmap
import threading
import time

import pytest
import torch

import fastcomm
from tests.support.bodies import gloo
from tests.support.ranks import on_ranks
from tests.support.reference import (
    PLACES,
    assert_same_bits,
    check_all_reduce,
    placed,
    reduced,
    shards_of,
)


@on_ranks(2)
def test_communicators_side_by_side_do_not_disturb_each_other(comm):
    with fastcomm.init(group=gloo()) as other:
        for where in PLACES:
            shards = shards_of(torch.float32, comm.world_size, 20_000)
            tensor = placed(other, where, shards[comm.rank])
            work = other.all_reduce(tensor, async_op=True)
            check_all_reduce(comm, where=where)
            work.wait()
            assert_same_bits(tensor, reduced(shards, "sum"))
    check_all_reduce(comm)


@on_ranks(2)
def test_a_tensor_of_another_communicator_is_an_ordinary_one(comm):
    # so that the two do not lie equally far apart on both ranks
    between = mmap.mmap(-1, (comm.rank + 1) << 30)
    with fastcomm.init(group=gloo()) as other:
        for one, its_own in ((comm, other), (other, comm)):
            tensor = its_own.empty(20_000, dtype=torch.float32).fill_(1)
            one.all_reduce(tensor)
            assert (tensor == 2).all()
    between.close()


def test_a_communicator_says_its_rank(tmp_path):
    with fastcomm.init(init_method=f"file://{tmp_path}/store", rank=0, world_size=1) as comm:
        assert repr(comm) == "<ShmCommunicator: rank 0 of 1>"


@pytest.mark.parametrize("numel", [10, 5000, 300_001])
@on_ranks(2)
def test_python_threads_run_while_a_collective_waits(comm, numel):
    ticks = []
    is_over = threading.Event()

    def tick():
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    if comm.rank == 1:
        time.sleep(0.5)
        comm.all_reduce(torch.ones(numel))
        return
    thread = threading.Thread(target=tick)
    thread.start()
    comm.all_reduce(torch.ones(numel))
    is_over.set()
    thread.join()
    assert len(ticks) > 50
    assert max(after - before for before, after in zip(ticks, ticks[1:], strict=False)) < 0.2
