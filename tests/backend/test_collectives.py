"""The backend "fastcomm" of torch.distributed: every collective on the fast path, against
Gloo's result.

That a call took the fast path shows in an average of integers, which Gloo refuses.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastcomm
from fastcomm.comm.collective import CPU_DTYPES, REDUCTIONS
from tests.support import process_groups
from tests.support.outcomes import values_of
from tests.support.process_groups import gloo, noted_all_reduces, start, values, world
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.reference import DTYPES

ranks = process_groups.ranks  # a pool of this module's own


OPS = tuple(getattr(dist.ReduceOp, one.of_torch) for one in REDUCTIONS if one.name != "mean")


@dataclass(frozen=True)
class Rank:
    """Another one, whose `values` are wanted."""

    rank: int


def total_of(comm, numel: int = 12) -> torch.Tensor:
    """The sum of all ranks' values."""
    return torch.stack([values(Rank(rank), numel) for rank in range(comm.world_size)]).sum(0)


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
@on_ranks(2, 3)
def test_all_reduce_gives_what_gloo_gives(comm, dtype):
    for op in OPS:
        ours, wanted = values(comm, dtype=dtype), values(comm, dtype=dtype)
        dist.all_reduce(ours, op, group=world())
        dist.all_reduce(wanted, op, group=gloo())
        assert torch.equal(ours, wanted), op


@on_ranks(2)
def test_a_parameter_is_reduced_in_place(comm):
    world()
    parameter = nn.Parameter(values(comm).view(3, 4).t())
    dist.all_reduce(parameter)
    wanted = total_of(comm).view(3, 4).t()
    assert torch.equal(parameter.detach(), wanted) and parameter.requires_grad


@on_ranks(2)
def test_the_future_of_an_all_reduce_holds_a_list_of_its_tensor(comm):
    world()
    tensor = values(comm)
    value = (
        dist.all_reduce(tensor, async_op=True)
        .get_future()
        .then(lambda future: future.value()[0] * 2)
        .wait()
    )
    assert torch.equal(value, tensor * 2)


@on_ranks(2)
def test_an_all_reduce_goes_on_while_its_caller_waits_for_something_else(comm):
    world()
    tensor, note = values(comm, 300_000), torch.zeros(1)
    if comm.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.barrier(group=gloo())
        dist.recv(note, 1)  # comes only after rank 1 has the result
        work.wait()
    else:
        dist.barrier(group=gloo())  # had it come first, rank 0 would be through when it launches
        dist.all_reduce(tensor)
        dist.send(note, 0)
    assert torch.equal(tensor, total_of(comm, 300_000))


@on_ranks(2)
def test_a_wait_ends_at_its_timeout_though_another_thread_waits(comm):
    world()
    if comm.rank == 1:
        dist.recv(torch.zeros(1), 0)
    works = [dist.all_reduce(values(comm, 100_000), async_op=True) for _ in range(2)]
    if comm.rank == 0:
        thread = threading.Thread(target=works[0].wait)
        thread.start()
        time.sleep(0.05)
        with pytest.raises(fastcomm.TimeoutError, match="waited 0.2 s"):
            works[1].wait(timedelta(seconds=0.2))
        dist.send(torch.zeros(1), 1)
        thread.join()
    works[1].wait()
    assert all(work.is_success() for work in works)


@on_ranks(2)
def test_coalesced_all_reduces_give_what_single_ones_give(comm):
    world()
    tensors = [values(comm, numel) for numel in (3, 50)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, total_of(comm, tensor.numel()))


@on_ranks(2)
def test_what_is_coalesced_may_be_of_several_dtypes(comm):
    world()
    numbers, flags = torch.zeros(4), torch.zeros(2, dtype=torch.bool)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(numbers, torch.full((2,), float(comm.rank)))
        dist.all_gather_into_tensor(flags, torch.tensor([comm.rank == 1]))
    assert numbers.tolist() == [0, 0, 1, 1] and flags.tolist() == [False, True]


@on_ranks(2)
def test_a_list_of_the_wrong_length_is_refused(comm):
    world()
    with pytest.raises(ValueError, match="3 tensors for 2 ranks"):
        dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))


@on_ranks(2)
def test_functional_collectives_work(comm):
    from torch.distributed import _functional_collectives as functional

    own, mean = 2 * comm.rank * torch.arange(6), torch.arange(6)
    assert torch.equal(functional.all_reduce(own, "avg", world()).wait(), mean)
    assert torch.equal(
        functional.reduce_scatter_tensor(own, "avg", 0, world()).wait(), mean.view(2, 3)[comm.rank]
    )
    assert torch.equal(
        functional.all_gather_tensor(own, 0, world()).wait(), torch.cat([0 * mean, 2 * mean])
    )
    assert torch.equal(functional.broadcast(own, 1, world()).wait(), 2 * mean)


@on_ranks(2)
def test_two_threads_share_a_group(comm):
    """Each reduces as many tensors as the other, of one size: whichever comes first, the ranks'
    calls match.
    """
    world()
    tensors = [torch.ones(1000) for _ in range(100)]

    def reduce(part: list[torch.Tensor]) -> None:
        for tensor in part:
            dist.all_reduce(tensor)

    threads = [threading.Thread(target=reduce, args=(tensors[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((tensor == 2).all()) for tensor in tensors)


@on_ranks(2)
def test_every_dtype_of_the_transport_is_reduced_by_it_and_no_other(comm):
    with noted_all_reduces() as noted:
        for dtype in (*DTYPES, torch.int8):
            tensor = torch.full((3,), comm.rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [3] * 3
    assert [dtype for dtype, _ in noted] == list(DTYPES)


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


# ---- results are in place once a work says that it is completed ----


def _gather_a_list(comm, is_async=True):
    rows = [torch.zeros(3) for _ in range(comm.world_size)]
    work = dist.all_gather(rows, torch.full((3,), 1.0 + comm.rank), async_op=is_async)
    return work, rows, [[1.0 + rank] * 3 for rank in range(comm.world_size)]


def _gather_into_a_tensor(comm, is_async=True):
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    whole = torch.zeros(comm.world_size, 2)
    work = gather(whole, torch.full((1, 2), 1.0 + comm.rank), async_op=is_async)
    return work, [whole], [[[1.0 + rank] * 2 for rank in range(comm.world_size)]]


def _reduce_a_tensor_with_gaps(comm, is_async=True):
    column = torch.ones(3, 2)[:, 0]
    work = dist.all_reduce(column, async_op=is_async)
    return work, [column], [[float(comm.world_size)] * 3]


def _broadcast_a_tensor_with_gaps(comm, is_async=True):
    column = torch.full((3, 2), 1.0 + comm.rank)[:, 0]
    return dist.broadcast(column, 1, async_op=is_async), [column], [[2.0] * 3]


def _reduce_and_scatter_into_a_column(comm, is_async=True):
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    column = torch.zeros(3, 2)[:, 0]
    whole = torch.arange(comm.world_size).repeat_interleave(3).float()
    work = scatter(column, whole, async_op=is_async)
    return work, [column], [[float(comm.world_size * comm.rank)] * 3]


def _reduce_and_scatter_a_list(comm, is_async=True):
    part, parts = torch.zeros(2), [torch.full((2,), float(to)) for to in range(comm.world_size)]
    work = dist.reduce_scatter(part, parts, async_op=is_async)
    return work, [part], [[float(comm.world_size * comm.rank)] * 2]


def _wait_for_all(comm, is_async=True):
    return dist.barrier(async_op=is_async), [], []


BEGIN = (
    _gather_a_list,
    _gather_into_a_tensor,
    _reduce_a_tensor_with_gaps,
    _broadcast_a_tensor_with_gaps,
    _reduce_and_scatter_into_a_column,
    _reduce_and_scatter_a_list,
)


@pytest.mark.parametrize("begin", BEGIN)
@on_ranks(2, 3)
def test_a_collective_puts_its_results_where_the_caller_wants_them(comm, begin):
    world()
    for is_async in (False, True):
        work, tensors, wanted = begin(comm, is_async)
        if is_async:
            assert work.wait()
        assert [tensor.tolist() for tensor in tensors] == wanted


@pytest.mark.parametrize("begin", [*BEGIN, _wait_for_all])
@on_ranks(2)
def test_an_async_collective_waits_for_nobody_and_is_completed_with_its_results(comm, begin):
    world()
    if comm.rank == 1:
        dist.recv(torch.zeros(1), 0)  # comes only after rank 0's call has returned
    work, tensors, wanted = begin(comm)
    if comm.rank == 0:
        assert not work.is_completed()
        dist.send(torch.zeros(1), 1)
    while not work.is_completed():
        time.sleep(0.001)
    assert [tensor.tolist() for tensor in tensors] == wanted
    assert work.wait()


@on_ranks(2)
def test_what_a_caller_writes_after_its_work_was_completed_stays(comm):
    world()
    work, (column,), _ = _reduce_a_tensor_with_gaps(comm)
    while not work.is_completed():
        time.sleep(0.001)
    column.fill_(7)
    work.wait()
    dist.barrier()
    assert column.tolist() == [7.0] * 3


@on_ranks(2)
def test_for_autograd_a_collective_is_a_write_to_what_it_changes(comm):
    world()
    rank, halves, both = comm.rank, list(torch.ones(2, 4)), (0, 1)
    calls = {
        "all_reduce": (both, dist.all_reduce),
        "broadcast": ((1,), lambda y: dist.broadcast(y, 0)),
        "reduce": ((0,), lambda y: dist.reduce(y, 0)),
        "scatter": (both, lambda y: dist.scatter(y, None if rank else halves, 0)),
        "gather": ((0,), lambda y: dist.gather(halves[0], None if rank else [y, halves[1]], 0)),
        "all_to_all_single": (both, lambda y: dist.all_to_all_single(y, torch.ones(4))),
        "all_gather_into_tensor": (both, lambda y: dist.all_gather_into_tensor(y, torch.ones(2))),
        "reduce_scatter_tensor": (both, lambda y: dist.reduce_scatter_tensor(y, torch.ones(8))),
        "send and recv": ((1,), lambda y: dist.recv(y, 0) if rank else dist.send(y, 1)),
    }
    for writers, call in calls.values():
        y = torch.ones(4, requires_grad=True).exp()
        with torch.no_grad():
            call(y)
        if rank in writers:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
