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
    batch,
    check_gradients,
    mean_gradients,
    mlp,
)
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.pairwise]

# Kinds of parameters


@on_ranks(2)
def test_a_model_of_two_thousand_tiny_parameters_is_reduced(comm):
    def run(model, rank):
        sum(
            step * (parameter * (rank + 1.0)).sum()
            for step, parameter in enumerate(model.parameters())
        ).backward()

    check_gradients(comm, nn.ParameterList(torch.ones(3) for _ in range(2000)), run)


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
