"""Collectives and autograd: a collective is a write to the tensors that it changes, and to no
other. So a backward that needs what such a tensor held raises torch's error.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcomm
from tests.support.bodies import my_place, note, wait_for_note
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT, over

pytestmark = pytest.mark.usefixtures("transport")

SPOILT = "modified by an inplace operation"


def saved(numel):
    """A tensor that a backward needs: the derivative of exp is its result."""
    return torch.ones(numel, requires_grad=True).exp()


def calls(comm, y):
    """Collectives that write to `y`, on the ranks named; the others only give."""
    n, rank, other = y.numel(), comm.rank, torch.ones(y.numel())
    whole, part = torch.ones(n * comm.world_size), torch.ones(n // comm.world_size)
    everyone, root = range(comm.world_size), (0,)
    splits = [n // comm.world_size] * comm.world_size
    return {
        "all_reduce": (everyone, lambda **k: comm.all_reduce(y, **k)),
        "all_reduce of a mean": (everyone, lambda **k: comm.all_reduce(y, "mean", **k)),
        "all_reduce_coalesced": (everyone, lambda **k: comm.all_reduce_coalesced([other, y], **k)),
        "broadcast": (everyone[1:], lambda **k: comm.broadcast(y, **k)),
        "all_gather_single": (everyone, lambda **k: comm.all_gather_single(y, part, **k)),
        "reduce_scatter_single": (everyone, lambda **k: comm.reduce_scatter_single(y, whole, **k)),
        "gather": (root, lambda **k: comm.gather(None if rank else y, part, **k)),
        "gather of it": ((), lambda **k: comm.gather(None if rank else whole, y, **k)),
        "scatter": (everyone, lambda **k: comm.scatter(y, None if rank else whole, **k)),
        "all_to_all_single": (everyone, lambda **k: comm.all_to_all_single(y, other, **k)),
        "splits": (everyone, lambda **k: comm.all_to_all_single(y, other, splits, splits, **k)),
        "send and recv": ((1,), lambda **k: comm.recv(y, 0, **k) if rank else comm.send(y, 1, **k)),
        "broadcast_all": (everyone[1:], lambda **k: comm.broadcast_all([y])),
    }


@pytest.mark.parametrize("numel", [4, 100_000])
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@over(2)
@on_ranks()
def test_a_collective_is_a_write_to_what_it_changes(comm, is_async, numel):
    for name in calls(comm, saved(numel)):
        y = saved(numel)
        writers, call = calls(comm, y)[name]
        work = call(async_op=True) if is_async else call()
        if comm.rank in writers:  # with async_op from the call on
            with pytest.raises(RuntimeError, match=SPOILT):
                y.sum().backward()
        else:
            y.sum().backward()
        if work is not None:
            work.wait()


@over(2)
@on_ranks()
def test_what_is_used_while_a_collective_is_under_way_is_written_to_as_well(comm):
    tensor, weight = torch.ones(4), torch.ones(4, requires_grad=True)
    if comm.rank == 1 and not comm.has_streams:  # over NCCL a launch may wait for it
        wait_for_note(my_place(), "used")
    work = comm.all_reduce(tensor, async_op=True)
    product = (weight * tensor).sum()
    if comm.rank == 0:
        note(my_place(), used=True)
    work.wait()
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=SPOILT):
            product.backward()
    product = (weight * tensor).sum()
    work.wait()  # again: the result has been there
    product.backward()


@over(2)
@on_ranks()
def test_tensors_of_inference_mode_are_taken(comm):
    with torch.inference_mode():
        tensor = torch.ones(4)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [2] * 4


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(2)
def test_a_reduction_is_a_write_to_the_gradients_of_the_last_one(comm):
    model, weight = nn.Linear(4, 3), torch.ones(3, 4, requires_grad=True)
    fastcomm.Reducer(comm).attach(model)
    model(torch.ones(2, 4)).sum().backward()
    product = (model.weight.grad * weight).sum()
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=SPOILT):
        product.backward()


@pytest.mark.transports(*EVERY_TRANSPORT)
@pytest.mark.parametrize("keeps", [False, True], ids=["", "keep_gradients"])
@on_ranks(2)
def test_a_sharded_step_is_a_write_to_the_parameters_it_steps(comm, keeps):
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    reducer = fastcomm.Reducer(comm)
    reducer.attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1, keep_gradients=keeps)
    inputs = torch.ones(2, 4, requires_grad=True)
    stepped, other = (layer(inputs).sum() for layer in model)
    model[0](inputs.detach()).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=SPOILT):
        torch.autograd.grad(stepped, inputs)
    torch.autograd.grad(other, inputs)


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(2)
def test_buffers_are_written_to_where_they_are_copied_or_averaged(comm):
    model, weight = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    model.register_buffer("mean", torch.ones(2))
    reducer = fastcomm.Reducer(comm)
    reducer.attach(model)
    product = (weight * model.mean).sum()
    reducer.sync_buffers()
    if comm.rank == 1:  # rank 0's are those that are copied
        with pytest.raises(RuntimeError, match=SPOILT):
            product.backward()
    local = fastcomm.LocalSGD(reducer, every=2)
    product = (weight * model.mean).sum()
    local.average_buffers()
    with pytest.raises(RuntimeError, match=SPOILT):
        product.backward()
