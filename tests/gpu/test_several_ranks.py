"""Two and four ranks that share a card."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcomm
from fastcomm.insight.stragglers import FIRST_ROUNDS
from tests.gpu import STEPS, ids
from tests.support.models import batch
from tests.support.process_groups import world
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run ci/gpu.sh where there is one"
)


def small() -> nn.Sequential:
    """On the CPU and in float64, the same on every rank."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def oracle(world_size: int, steps: int) -> nn.Module:
    """Trained in one process on the batches of all ranks together."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.device("cpu"):
            losses = [
                F.mse_loss(model(x.double()), y.double())
                for x, y in (batch(rank, step) for rank in range(world_size))
            ]
        (sum(losses) / world_size).backward()
        optimizer.step()
    return model


def train_on_ranks(comm: Any, steps: int, **options: Any) -> nn.Module:
    model = small().float().to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastcomm.Reducer(comm, bucket_cap_mb=0.0002, **options).attach(model)
    for step in range(steps):
        with torch.device("cpu"):
            x, y = batch(comm.rank, step)
        optimizer.zero_grad()
        F.mse_loss(model(x.to(comm.device)), y.to(comm.device)).backward()
        optimizer.step()
    return model.cpu().double()


# A parameter's relative and absolute error after STEPS steps: a few roundings of what travels.
TOLERANCES = {
    None: (1e-5, 1e-6),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
    torch.float8_e5m2: (0.2, 0.2),
    torch.int8: (2e-2, 2e-2),
}


@pytest.mark.usefixtures("transport")
@pytest.mark.transports("nccl")
@pytest.mark.parametrize("wire", TOLERANCES, ids=ids)
@on_ranks(2, 4)
def test_ranks_that_share_a_card_train_as_one_process_does(comm, wire):
    model = train_on_ranks(comm, STEPS, wire_dtype=wire)
    rtol, atol = TOLERANCES[wire]
    for parameter, exact in zip(
        model.parameters(), oracle(comm.world_size, STEPS).parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, exact, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("transport")
@pytest.mark.transports("nccl")
@on_ranks(2)
def test_two_streams_of_two_ranks_that_share_a_card_do_not_block_each_other(comm):
    model = train_on_ranks(comm, STEPS, streams=2)
    for parameter, exact in zip(
        model.parameters(), oracle(comm.world_size, STEPS).parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("transport")
@pytest.mark.transports("nccl")
@on_ranks(2)
def test_synchronised_batch_norm_over_the_backend_sees_the_whole_batch(comm):
    world()
    with torch.device("cpu"):
        whole = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    whole = whole.to(comm.device)
    alone = nn.BatchNorm1d(4).to(comm.device)
    shared = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    mine = slice(8 * comm.rank, 8 * comm.rank + 8)
    torch.testing.assert_close(shared(whole[mine]), alone(whole)[mine])
    torch.testing.assert_close(shared.running_var, alone.running_var)


@pytest.mark.usefixtures("transport")
@pytest.mark.transports("nccl")
@on_ranks(2)
def test_who_is_late_is_told_by_the_devices_time(comm):
    model = nn.Linear(64, 64).to(comm.device)
    reducer = fastcomm.Reducer(comm).attach(model)
    reducer.stragglers()
    for _ in range(2 * FIRST_ROUNDS):
        time.sleep(0.02 * comm.rank)
        model(torch.ones(4, 64, device=comm.device)).sum().backward()
    (straggler,) = reducer.stragglers()
    assert (straggler.rank, straggler.phase) == (1, "data and other")
    assert straggler.late_ms > 10
