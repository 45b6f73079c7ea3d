"""Which gradients a reducer gives for every kind of parameter, and with several reducers side by
side.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcomm
from tests.support.models import (
    SMALL_BUCKETS,
    assert_gradients,
    backward,
    batch,
    check_gradients,
    gradients,
    mean_gradients,
    mlp,
    seed,
)
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.pairwise]

# Kinds of parameters


@on_ranks(2)
def test_refresh_keeps_the_gradients(comm, buckets):
    model = mlp()
    reducer = check_gradients(comm, model, backward, **buckets)
    before = gradients(model)
    reducer.refresh()
    assert_gradients(model, before)


@on_ranks(2)
def test_a_model_of_two_thousand_tiny_parameters_is_reduced(comm):
    def run(model, rank):
        sum(
            step * (parameter * (rank + 1.0)).sum()
            for step, parameter in enumerate(model.parameters())
        ).backward()

    check_gradients(comm, nn.ParameterList(torch.ones(3) for _ in range(2000)), run)


# Several reducers


class _Gan(nn.ModuleDict):
    def __init__(self):
        seed(0)
        super().__init__({"generator": nn.Linear(8, 8), "discriminator": mlp()})

    def fake(self, rank, step):
        return self["generator"](batch(rank, step)[0])

    def judge(self, images, target):
        return (self["discriminator"](images) - target).square().mean()


def _generator_step(gan, rank, step=0):
    gan["generator"].zero_grad()
    gan.judge(gan.fake(rank, step), 1).backward()


def _attach_both(comm, gan, buckets):
    return [fastcomm.Reducer(comm, **buckets).attach(part) for part in gan.values()]


@on_ranks(2)
def test_no_sync_of_one_reducer_does_not_hold_for_the_other(comm, buckets):
    gan = _Gan()
    expected = mean_gradients(gan, comm.world_size, _generator_step)
    local = mean_gradients(gan, 1, lambda gan, _: _generator_step(gan, comm.rank))
    generator, _ = _attach_both(comm, gan, buckets)
    with generator.no_sync():
        _generator_step(gan, comm.rank)
    assert_gradients(gan["generator"], local[:2])
    assert_gradients(gan["discriminator"], expected[2:])


# What a reducer says of itself


@on_ranks(2)
def test_a_reducer_says_what_it_holds(comm):
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.bfloat16)
    where = f"over {comm.backend}, rank {comm.rank} of 2>"
    detached = f"<Reducer: detached; op mean, wire_dtype torch.bfloat16; {where}"
    assert repr(reducer) == detached
    model = nn.Linear(2000, 3)
    reducer.attach(model)
    assert repr(reducer).startswith(
        "<Reducer: Linear, 2 trainable parameters of 6,003 elements in 1 bucket; op mean"
    )
    reducer.detach()
    assert repr(reducer) == detached


@on_ranks(2)
def test_a_reducer_of_named_parameters_says_so(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm, op="sum").attach(model.named_parameters())
    assert "<Reducer: named parameters, " in repr(reducer) and "op sum" in repr(reducer)


@pytest.mark.transports("shm", "group")
@on_ranks(2)
def test_models_that_ranks_reach_in_different_orders_want_one_reducer(comm):
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    reducers = [fastcomm.Reducer(comm).attach(one) for one in models]
    with pytest.raises(fastcomm.FastcommError, match="give these models one reducer"):
        models[comm.rank](torch.ones(2, 4)).sum().backward()
    assert len(reducers) == 2


@on_ranks(2)
def test_one_reducer_of_two_models_takes_their_gradients_in_any_order(comm):
    """The loss of each rank goes through the models in an order of its own."""
    models = nn.ModuleList([mlp(), mlp()])
    fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(models)

    def loss(models, rank):
        first, second = models if rank else reversed(models)
        x, y = batch(rank)
        return F.mse_loss(second(first(x).repeat(1, 2)), y)

    loss(models, comm.rank).backward()
    expected = mean_gradients(
        models, comm.world_size, lambda models, rank: loss(models, rank).backward()
    )
    assert_gradients(models, expected)
