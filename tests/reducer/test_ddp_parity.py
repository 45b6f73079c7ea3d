"""fastcomm against torch's DistributedDataParallel over Gloo, step by step: bitwise the same
gradients from two ranks, where both add two numbers; from three on Gloo adds in another order, and
the gradients agree to 1e-6 of their norm.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from tests.support.bodies import gloo
from tests.support.models import (
    Transformer,
    backward,
    convnet,
    gradients,
    image_backward,
    mlp,
    seed,
    text_backward,
)
from tests.support.ranks import on_ranks


def _wide_mlp():
    seed(0)
    return nn.Sequential(
        nn.Linear(8, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 4)
    )


MODELS = pytest.mark.parametrize(
    "make, run",
    [
        (mlp, backward),
        (_wide_mlp, backward),
        (convnet, image_backward),
        (Transformer, text_backward),
    ],
    ids=["mlp", "wide mlp", "convnet", "transformer"],
)


def _pair(comm, model, buckets, **ddp_options):
    """The model under DDP, and the model itself under a reducer."""
    ddp = DistributedDataParallel(copy.deepcopy(model), process_group=gloo(), **ddp_options)
    return ddp, fastcomm.Reducer(comm, **buckets).attach(model)


def _assert_bitwise_equal(ddp, model):
    for (name, parameter), wanted in zip(model.named_parameters(), gradients(ddp), strict=True):
        if wanted is None:
            assert parameter.grad is None, name
        else:
            assert torch.equal(parameter.grad, wanted), (
                f"{name}: off by {(parameter.grad - wanted).abs().max()}"
            )


@MODELS
@on_ranks(2)
def test_gradients_of_two_ranks_are_bitwise_those_of_ddp(comm, buckets, make, run):
    model = make()
    ddp, _ = _pair(comm, model, buckets)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (ddp, model)]
    for step in range(4):
        for one, optimizer in zip((ddp, model), optimizers, strict=True):
            optimizer.zero_grad()
            run(one, comm.rank, step)
        _assert_bitwise_equal(ddp, model)
        for optimizer in optimizers:
            optimizer.step()
