"""A ShardedOptimizer: as the plain optimizer, of one rank and of two that share a card."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fastcomm
from tests.gpu import MANY_BUCKETS, STEPS, assert_same_parameters, inputs, loss_of, mlp
from tests.gpu.test_several_ranks import oracle, small
from tests.support.models import batch
from tests.support.ranks import on_ranks
from tests.support.sharded_pairs import Lion

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run ci/gpu.sh where there is one"
)

KINDS = pytest.mark.parametrize("kind", [torch.optim.AdamW, Lion], ids=["equal", "whole"])


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, inputs()).backward()
        optimizer.step()


def test_a_sharded_step_does_not_synchronise(comm):
    model, x = mlp(), inputs()
    reducer = fastcomm.Reducer(comm, **MANY_BUCKETS, wire_dtype=torch.bfloat16).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1, momentum=0.9)
    loss_of(model, x).backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_sharded_step_gives_the_parameters_of_eager_ones(comm):
    models = [mlp(), mlp()]
    optimizers = [
        fastcomm.ShardedOptimizer(
            fastcomm.Reducer(comm, **MANY_BUCKETS).attach(model), torch.optim.SGD, lr=0.1
        )
        for model in models
    ]
    train(models[0], optimizers[0], 2 * STEPS)
    x = inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(models[1], optimizers[1], STEPS)
        optimizers[1].zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_of(models[1], x).backward()
        optimizers[1].step()
    for _ in range(STEPS):
        graph.replay()
    assert_same_parameters(models[1], models[0])


@pytest.mark.usefixtures("transport")
@pytest.mark.transports("nccl")
@pytest.mark.parametrize("elementwise", [True, False], ids=["equal", "whole"])
@on_ranks(2)
def test_shards_of_ranks_that_share_a_card_train_as_one_process_does(comm, elementwise):
    model = small().float().to(comm.device)
    reducer = fastcomm.Reducer(comm, bucket_cap_mb=0.0002)
    optimizer = fastcomm.ShardedOptimizer(
        reducer.attach(model),
        torch.optim.SGD,
        lr=0.1,
        elementwise=elementwise,
    )
    for step in range(STEPS):
        with torch.device("cpu"):
            x, y = batch(comm.rank, step)
        optimizer.zero_grad()
        F.mse_loss(model(x.to(comm.device)), y.to(comm.device)).backward()
        optimizer.step()
    reducer.check_in_sync(optimizer)
    for parameter, exact in zip(
        model.parameters(), oracle(comm.world_size, STEPS).parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.cpu().double(), exact, rtol=1e-5, atol=1e-6)
