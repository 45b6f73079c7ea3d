"""The default device and dtype are the user's: nothing that fastcomm makes depends on them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import fastcomm
from tests.support.ranks import on_ranks
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


@contextlib.contextmanager
def _other_defaults():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _model(comm):
    options = {"device": comm.device, "dtype": torch.float32}
    model = nn.Sequential(
        nn.Embedding(6, 4, sparse=True, **options), nn.Linear(4, 3, **options), nn.ReLU()
    )
    model.append(nn.BatchNorm1d(3, **options))
    for parameter in model.parameters():
        numel = parameter.numel()
        parameter.data.copy_(torch.linspace(-1, 1, numel, **options).view(parameter.shape))
    return model


def _trained(comm):
    """The values of some trainings, which use most of what there is."""
    model = _model(comm)
    reducer = fastcomm.Reducer(comm, skip_nonfinite=True, audit=1)
    reducer.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        reducer.set_weight(1.0 + comm.rank)
        rows = torch.tensor([number, comm.rank, 2], device=comm.device)
        model(rows).square().sum().backward()
        reducer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    reducer.sync_buffers()
    reducer.check_in_sync(optimizer)
    reducer.detach()

    dense = _model(comm)[1]
    reducer.attach(dense)
    sharded = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1, momentum=0.9)
    dense(model[0].weight.detach()).sum().backward()
    reducer.grad_norm()
    sharded.step()
    sharded.load_state_dict(sharded.full_state_dict())
    reducer.detach()

    alone, reducer = _model(comm)[1], fastcomm.Reducer(comm)
    reducer.attach(alone)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    with reducer.join(range(1 + comm.rank)) as batches:
        for _ in batches:
            alone(model[0].weight.detach()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with fastcomm.LocalSGD(reducer, every=2):
        for _ in range(4):
            (alone(model[0].weight.detach()).sum() * (1 + comm.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    reducer.detach()
    return [*model.state_dict().values(), *dense.parameters(), *alone.parameters()]


@over(2)
@on_ranks()
def test_trainings_do_not_depend_on_the_default_device_and_dtype(comm):
    wanted = _trained(comm)
    with _other_defaults():
        found = _trained(comm)
        assert comm.empty(0, dtype=torch.float32).device == comm.device
        out, own = (torch.full((4,), 1.0 + comm.rank, device=comm.device) for _ in range(2))
        comm.all_to_all_single(out, own, [2, 2], [2, 2])
    assert out.tolist() == [1, 1, 2, 2]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
