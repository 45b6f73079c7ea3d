"""How gradients get into a flat buffer over the transports that copy them there, wherever
they lie.
"""

from __future__ import annotations

import pytest
import torch

import fastcomm
from tests.support.models import SMALL_BUCKETS, backward, gradients, mean_gradients, mlp
from tests.support.ranks import on_ranks
from tests.support.transports import TRANSPORTS_OVER_TORCH

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*TRANSPORTS_OVER_TORCH),
]


def attached(comm, hooked=False):
    """A model with a bucket for each parameter, after a step, and the gradients of the next one."""
    model = mlp()
    hook = (None, _allreduce) if hooked else None
    fastcomm.Reducer(comm, hook=hook, **SMALL_BUCKETS).attach(model)
    backward(model, comm.rank)
    model.zero_grad()
    return model, mean_gradients(model, comm.world_size, backward)


def _allreduce(comm, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@on_ranks(2)
def test_a_gradient_may_be_another_tensor_on_its_own_memory(comm):
    model, expected = attached(comm)
    backward(model, comm.rank)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.detach().zero_()
    backward(model, comm.rank)
    for gradient, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@on_ranks(2)
def test_gradients_of_a_reducer_that_is_gone_may_be_used(comm):
    model, _ = attached(comm)
    backward(model, comm.rank)
    kept = [parameter.grad for parameter in model.parameters()]
    fresh, expected = attached(comm)
    del model
    for parameter, gradient in zip(fresh.parameters(), kept, strict=True):
        parameter.grad = gradient.zero_()
    backward(fresh, comm.rank)
    for gradient, wanted in zip(gradients(fresh), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
