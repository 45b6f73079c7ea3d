"""Several collectives under way at a time, and threads."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from fastcomm import FastcommError
from tests.support.bodies import my_place, note, noted
from tests.support.collective_checks import cut
from tests.support.ranks import on_ranks
from tests.support.reference import (
    PLACES,
    assert_reduced,
    check_all_reduce,
    check_async_collectives,
    placed,
    shards_of,
)
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")

# Over shared memory they decide on the way through it.
SIZES = (0, 1, 37, 1023, 1024, 1025, 65_537, 300_001)


def places_of(comm):
    return PLACES if comm.backend == "shm" else ("ordinary",)


def sizes_of(comm):
    return SIZES if comm.backend == "shm" else (0, 37, 1025, 65_537)


@over(2, 3)
@on_ranks()
def test_an_async_all_reduce_is_in_place_after_wait(comm):
    for where in places_of(comm):
        for numel in sizes_of(comm):
            shards = shards_of(torch.float32, comm.world_size, numel)
            tensor = placed(comm, where, shards[comm.rank])
            work = comm.all_reduce(tensor, async_op=True)
            work.wait()
            assert work.is_completed() or comm.device.type == "cuda"
            assert_reduced(comm, tensor, shards, "sum")


def _launch_before_the_other_comes(comm, call):
    """Whether rank 0 saw its work unfinished, and then finished without waiting for it."""
    tensor = torch.ones(5000)
    if comm.rank == 1:
        while not _is_noted(f"launched {call}"):
            time.sleep(0.01)
        comm.all_reduce(tensor)
        return tensor.sum().item()
    work = comm.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    note(my_place(), **{f"launched {call}": True})
    deadline = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    work.wait()
    return tensor.sum().item()


def _is_noted(name):
    try:
        return bool(noted(my_place(), name))
    except FileNotFoundError:
        return False


# NCCL's stand-in carries a collective out in the call.
@over(2, nccl=())
def test_an_async_all_reduce_does_not_wait_for_anybody(ranks, world_size):
    assert ranks(world_size, _launch_before_the_other_comes, time.monotonic_ns()) == [10_000] * 2


@pytest.mark.parametrize("order", ["in order", "backwards"])
@over(2, 3)
@on_ranks()
def test_any_number_of_collectives_may_be_under_way(comm, order):
    for where in places_of(comm):
        n = 50 if comm.backend == "shm" else 30
        shards = [shards_of(torch.float32, comm.world_size, 37 * i * i, seed=i) for i in range(n)]
        tensors = [placed(comm, where, of_one[comm.rank]) for of_one in shards]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works if order == "in order" else reversed(works):
            work.wait()
        for tensor, of_one in zip(tensors, shards, strict=True):
            assert_reduced(comm, tensor, of_one, "sum")


@over(2, 3)
@on_ranks()
def test_collectives_of_every_kind_may_be_under_way(comm):
    check_async_collectives(comm)


@pytest.mark.parametrize("order", ["in order", "backwards"])
@over(2, 3)
@on_ranks()
def test_many_tensors_as_one_may_be_under_way_beside_others(comm, order):
    works, checks = [], []
    for i, numel in enumerate((5, 37, 3000, 200_000)):
        for op in ("sum", "mean"):
            shards = shards_of(torch.float32, comm.world_size, numel, seed=i)
            tensors = [part.to(comm.device, copy=True) for part in cut(shards[comm.rank])]
            single = shards[comm.rank].to(comm.device, copy=True)
            works.append(comm.all_reduce_coalesced(tensors, op, async_op=True))
            works.append(comm.all_reduce(single, op, async_op=True))
            checks.append((tensors, single, shards, op))
    for work in works if order == "in order" else reversed(works):
        work.wait()
        assert work.is_completed() or comm.device.type == "cuda"
    for tensors, single, shards, op in checks:
        assert_reduced(comm, torch.cat([one.view(-1) for one in tensors]), shards, op)
        assert_reduced(comm, single, shards, op)


@over(2)
@on_ranks()
def test_wait_may_be_called_twice(comm):
    tensor = torch.ones(10)
    work = comm.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.tolist() == [comm.world_size] * 10
    tensor.add_(1)
    work.wait()
    assert tensor.tolist() == [comm.world_size + 1] * 10
    tensors = [torch.ones(3), torch.ones(2000)]
    work = comm.all_reduce_coalesced(tensors, async_op=True)
    work.wait()
    tensors[1].add_(1)
    work.wait()
    assert tensors[1].tolist() == [comm.world_size + 1] * 2000


@over(2, shm=(2, 3))
@on_ranks()
def test_a_work_that_nobody_holds_does_no_harm(comm):
    for where in places_of(comm):
        for numel in sizes_of(comm):
            comm.all_reduce(placed(comm, where, torch.ones(numel)), async_op=True)
            comm.all_reduce_coalesced(cut(placed(comm, where, torch.ones(numel))), async_op=True)
            gc.collect()
            # in what memory a work has given back too early, if it has
            others = [placed(comm, where, torch.full((numel,), 7.0)) for _ in range(3)]
            check_all_reduce(comm, where=where)
            assert all((other == 7).all() for other in others)


# Threads


@over(2, group=(), hierarchical=())
@on_ranks()
def test_a_second_thread_in_the_communicator_is_told_so(comm):
    assert not comm.is_threadsafe
    comm.barrier()  # over NCCL, which connects in the first call, and the host waits in that
    if comm.rank == 1:
        time.sleep(0.6)
        comm.barrier()
        return
    waiting = threading.Thread(target=comm.barrier)
    waiting.start()
    time.sleep(0.2)
    with pytest.raises(FastcommError, match="thread"):
        comm.all_reduce(torch.ones(10))
    waiting.join()


@over(2, shm=(), nccl=())
@on_ranks()
def test_a_second_thread_in_a_threadsafe_communicator_is_served(comm):
    assert comm.is_threadsafe
    if comm.rank == 1:
        time.sleep(0.3)
    waiting = threading.Thread(target=comm.barrier)
    waiting.start()
    time.sleep(0.1)
    check_all_reduce(comm)
    waiting.join()


@over(2)
@on_ranks()
def test_threads_may_take_turns(comm):
    for _ in range(5):
        thread = threading.Thread(target=check_all_reduce, args=(comm,))
        thread.start()
        thread.join()
        check_all_reduce(comm)
