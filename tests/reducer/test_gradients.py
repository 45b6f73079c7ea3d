"""How gradients get into a flat buffer, wherever they lie, and whether they lie anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from fastcomm import FastcommError
from tests.support.bodies import finish_together
from tests.support.models import SMALL_BUCKETS, attached, backward, gradients, mean_gradients
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT, TRANSPORTS_OVER_TORCH

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]


def _after_a_step(comm):
    """A model with a bucket for each parameter, after a step, and the gradients of the next one."""
    model, _, _ = attached(comm, **SMALL_BUCKETS)
    backward(model, comm.rank)
    model.zero_grad()
    return model, mean_gradients(model, comm.world_size, backward)


@on_ranks(2)
def test_a_gradient_may_be_another_tensor_on_its_own_memory(comm):
    model, expected = _after_a_step(comm)
    backward(model, comm.rank)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.detach().zero_()
    backward(model, comm.rank)
    for gradient, wanted in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.transports(*TRANSPORTS_OVER_TORCH)
@on_ranks(2)
def test_gradients_of_a_reducer_that_is_gone_may_be_used(comm):
    model, _ = _after_a_step(comm)
    backward(model, comm.rank)
    kept = [parameter.grad for parameter in model.parameters()]
    fresh, expected = _after_a_step(comm)
    del model
    for parameter, gradient in zip(fresh.parameters(), kept, strict=True):
        parameter.grad = gradient.zero_()
    backward(fresh, comm.rank)
    for gradient, wanted in zip(gradients(fresh), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


class Pair(nn.Module):
    """Two vectors, of which losses use what they like."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6000))

    def whole(self):
        return torch.cat([self.first, self.second])


@on_ranks(2)
def test_gradients_that_are_torchs_zero_tensors_count_as_zeros(comm, buckets):
    """As of the derivative of sgn(), which is zero everywhere."""
    model, reducer, _ = attached(comm, Pair(), **buckets)
    for is_on_all in (False, True):
        model.zero_grad()
        loss = torch.sgn(model.whole()).sum()
        if comm.rank == 0 and not is_on_all:
            loss = (2 * model.whole()).sum()
        loss.backward()
        for gradient in gradients(model):
            assert torch.equal(gradient, torch.full_like(gradient, 0.0 if is_on_all else 1.0))
    with reducer.no_sync():
        model.zero_grad()
        torch.sgn(model.whole()).sum().backward()
    assert reducer.grad_norm() == 0
    assert reducer.clip_grad_norm_(1.0) == 0
    reducer.reduce()
    assert not any(gradient.any() for gradient in gradients(model))


def in_fake_mode(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        (model.whole() * 2).sum().backward()


def of_a_wrapper(model):
    factors = TwoTensor(torch.ones(6000), torch.ones(6000))
    ((model.second * factors).sum() + model.first.sum()).backward()


def by_hand(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "make", [in_fake_mode, of_a_wrapper, by_hand], ids=lambda make: make.__name__
)
@on_ranks(2)
def test_gradients_without_memory_are_refused_by_name(comm, make):
    model, reducer, _ = attached(comm, Pair())
    words = r"gradient of parameter (first|second) is a \w+ without memory|abandoned"
    with pytest.raises(FastcommError, match=words):
        make(model)
        reducer.reduce()
    finish_together(comm)
    model.zero_grad()
    model.whole().sum().backward()
    assert all(torch.equal(g, torch.ones_like(g)) for g in gradients(model))


@on_ranks(2)
def test_attach_and_check_in_sync_refuse_parameters_without_memory(comm):
    model, reducer, _ = attached(comm, Pair())
    if comm.rank == 1:
        model.second.untyped_storage().resize_(0)
    errors, words = (FastcommError, ValueError), "parameter second is a .* without memory"
    with pytest.raises(errors, match=words):
        reducer.check_in_sync()
    reducer.detach()
    with pytest.raises(errors, match=words):
        reducer.attach(model)


# Gradients that have been moved


def assign(gradient):
    gradient.data = gradient.data * 100


def share(gradient):
    gradient.share_memory_()
    gradient.data.mul_(100)  # a write that torch does not count


def put_elsewhere(gradient):
    gradient.set_(gradient * 100)


MOVES = [assign, share, put_elsewhere]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@on_ranks(2)
def test_norms_counts_and_clipping_see_gradients_that_were_moved(comm, move, buckets):
    model, reducer, _ = attached(comm, nn.Linear(400, 1, bias=False), **buckets)
    for step in range(4):
        model.zero_grad()
        model(torch.ones(1, 400)).sum().backward()
        move(model.weight.grad)
        torch.testing.assert_close(reducer.grad_norm(), torch.tensor(2000.0))
        torch.testing.assert_close(reducer.clip_grad_norm_(1.0), torch.tensor(2000.0))
        torch.testing.assert_close(model.weight.grad.norm(), torch.tensor(1.0))
        if step % 2:
            model.weight.grad.data.fill_(float("inf"))
            assert reducer.nonfinite_count() == 400


@on_ranks(2)
def test_a_gradient_that_nobody_uses_stays_though_it_is_another_tensor_on_its_memory(comm):
    model, _, _ = attached(comm, Pair(), op="sum")
    model.whole().sum().backward()
    model.first.grad = model.first.grad.detach()
    model.second.sum().backward()
    assert torch.equal(model.first.grad, torch.full((4,), float(comm.world_size)))


@on_ranks(2)
def test_a_gradient_that_was_turned_in_place_is_reduced_as_it_is(comm):
    model, reducer, _ = attached(comm, nn.Linear(3, 3, bias=False))
    model(torch.ones(1, 3)).sum().backward()
    wanted = torch.arange(9.0).view(3, 3)
    model.weight.grad.copy_(wanted if comm.rank else wanted.t())
    if comm.rank == 0:
        model.weight.grad.t_()
    reducer.reduce()
    assert torch.equal(model.weight.grad, wanted)
