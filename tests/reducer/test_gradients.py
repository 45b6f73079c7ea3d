"""How gradients get into a flat buffer over the transports that copy them there, wherever
they lie.
"""

from __future__ import annotations

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
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
def test_gradients_with_the_negative_bit_keep_their_sign(comm):
    model, expected = attached(comm)
    for parameter in model.parameters():
        parameter.grad = torch._neg_view(torch.full_like(parameter, -3.0))
    backward(model, comm.rank)
    for gradient, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(gradient, 3 + wanted)


@pytest.mark.parametrize("hooked", [False, True])
@on_ranks(2)
def test_gradients_exchanged_between_buckets_are_refused(comm, hooked):
    model, _ = attached(comm, hooked)
    backward(model, comm.rank)
    one, other = model[0].bias, model[2].bias
    one.grad, other.grad = other.grad, one.grad
    with pytest.raises(FastcommError, match="lies in that of another one"):
        backward(model, comm.rank)
    comm.barrier()


@on_ranks(2)
def test_gradients_may_lie_in_memory_the_user_has_from_the_communicator(comm):
    model, expected = attached(comm)
    for parameter in model.parameters():
        memory = comm.empty(parameter.numel(), dtype=torch.float32)
        parameter.grad = memory.view_as(parameter).fill_(1)
    backward(model, comm.rank)
    for gradient, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(gradient, 1 + wanted)


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
def test_a_parameter_that_was_shrunk_after_attach_is_refused(comm):
    model, _ = attached(comm)
    head = model[4]
    head.weight.data, head.bias.data = head.weight.data[:1].clone(), head.bias.data[:1].clone()
    with pytest.raises(FastcommError, match=r"shape \(1,?( 16)?\).*\(4,?( 16)?\).*refresh"):
        model(torch.ones(4, 8)).sum().backward()
    assert head.weight.grad is None or head.weight.grad.shape == (1, 16)
    comm.barrier()


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
