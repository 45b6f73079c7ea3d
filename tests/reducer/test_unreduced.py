"""Gradients that no round has reduced are reduced by the next one, or refused before a step. What a
user makes of reduced ones is stepped.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from fastcomm import FastcommError
from tests.support.bodies import finish_together, hear_of_it
from tests.support.models import (
    Heads,
    assert_gradients,
    attached,
    backward,
    check_backward,
    loss_of,
    mean_gradients,
    mlp,
)
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*EVERY_TRANSPORT),
    pytest.mark.pairwise,
]


def put(model: nn.Module, rank: int) -> None:
    """Makes gradients by hand, in tensors of their own."""
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_refused(model, optimizer, name: str) -> None:
    """Every time it is asked, and before anything has moved."""
    before = values(model)
    for _ in range(2):
        with pytest.raises(FastcommError, match=rf"{name} .*reduce\(\) on every rank"):
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class HeadsWithScale(Heads):
    """With a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


# Written in place


@pytest.mark.parametrize("is_moved", [False, True])
@on_ranks(2)
def test_gradients_replaced_behind_data_are_refused_once_they_were_stepped(comm, is_moved):
    """Also of a view that was moved out of its bucket before the step."""
    model, _, optimizer = attached(comm)
    backward(model, comm.rank)
    if is_moved:
        model[2].bias.grad.data = torch.ones(16)
    optimizer.step()
    model[2].bias.grad.data = torch.full((16,), comm.rank + 1.0)
    assert_refused(model, optimizer, r"2\.bias")


@on_ranks(2)
def test_zeroed_gradients_may_be_stepped(comm):
    """As an optimizer over two models does when one of them has not run."""
    model, _, optimizer = attached(comm)
    backward(model, comm.rank)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@pytest.mark.parametrize("at_home", [True, False])
@on_ranks(2)
def test_gradients_that_the_reducer_clips_after_a_step_may_be_stepped_again(comm, at_home):
    model, reducer, optimizer = attached(comm)
    backward(model, comm.rank)
    if not at_home:
        for p in model.parameters():
            p.grad = 2 * p.grad
    optimizer.step()
    reducer.clip_grad_norm_(1e-3)
    optimizer.step()
    assert reducer.grad_norm() < 2e-3


@on_ranks(2)
def test_gradients_that_a_step_writes_may_be_stepped_again(comm):
    class Centred(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.sub_(p.grad.mean()), alpha=0.1)

    model, _, _ = attached(comm)
    optimizer = Centred(model.parameters(), lr=0.1)
    backward(model, comm.rank)
    optimizer.step()
    optimizer.step()


# Of one parameter alone


@pytest.mark.parametrize("by_hand", ["new tensor", "in place"])
@on_ranks(2)
def test_a_gradient_by_hand_before_backward_takes_part(comm, buckets, by_hand):
    model, reducer, optimizer = attached(comm, HeadsWithScale(), **buckets)
    if by_hand == "in place":
        model.scale.grad = torch.ones(3)
        reducer.reduce()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.scale.grad.fill_(comm.rank + 1.0)
    else:
        model.scale.grad = torch.full((3,), comm.rank + 1.0)
    loss_of(model, comm.rank, 0, 0).backward()
    assert torch.equal(model.scale.grad, torch.full((3,), 1.5))
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_gradient_by_hand_before_backward_takes_part_whoever_steps(comm):
    """Without an optimizer nobody says that the last round's gradients were used."""
    model, reducer, _ = attached(comm, HeadsWithScale())
    model.scale.grad = torch.ones(3)
    reducer.reduce()
    model.zero_grad()
    model.scale.grad = torch.full((3,), comm.rank + 1.0)
    loss_of(model, comm.rank, 0, 0).backward()
    assert torch.equal(model.scale.grad, torch.full((3,), 1.5))


@on_ranks(2)
def test_a_gradient_with_a_graph_stays_when_a_backward_does_not_use_it(comm):
    model, _, optimizer = attached(comm, Heads(), op="sum")
    loss_of(model, comm.rank, 0, 0).backward(create_graph=True)
    kept = model.heads[0].bias.grad
    before = kept.detach().clone()
    for step in range(1, 3):
        model.trunk.zero_grad()
        loss_of(model, comm.rank, step, 1).backward()
        optimizer.step()
        assert model.heads[0].bias.grad is kept
        assert torch.equal(kept, before)
    model.zero_grad()  # or its graph would keep the model, and the reducer, in the next test


@on_ranks(2)
def test_a_gradient_that_a_backward_does_not_use_stays_with_every_op(comm, buckets):
    model, _, optimizer = attached(comm, Heads(), op="sum", **buckets)
    loss_of(model, comm.rank, 0, 0).backward()
    head = model.heads[0].bias
    head.grad.mul_(0.5)
    before = head.grad.clone()
    for step in range(1, 4):
        loss_of(model, comm.rank, step, 1).backward()
        assert torch.equal(head.grad, before)
        optimizer.step()


# Made before the reducer looks at them


@on_ranks(2)
def test_gradients_from_no_sync_before_refresh_take_part(comm, buckets):
    def run(model, rank):
        loss_of(model, rank, 0, 0).backward()
        loss_of(model, rank, 1, 1).backward()

    model = Heads()
    expected = mean_gradients(model, comm.world_size, run)
    _, reducer, optimizer = attached(comm, model, **buckets)
    for _ in range(2):  # at first in tensors of their own, then in the buckets
        with reducer.no_sync():
            loss_of(model, comm.rank, 0, 0).backward()
        reducer.refresh()
        loss_of(model, comm.rank, 1, 1).backward()
        assert_gradients(model, expected)
        optimizer.step()
        reducer.check_in_sync()
        model.load_state_dict(Heads().state_dict())
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("reduces_backwards", [True, False])
@on_ranks(2)
def test_gradients_may_be_changed_and_stepped_after_refresh(comm, reduces_backwards):
    model, reducer, optimizer = attached(comm)
    if reduces_backwards:
        backward(model, comm.rank)
    else:
        with reducer.no_sync():
            backward(model, comm.rank)
    reducer.refresh()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


@on_ranks(2)
def test_gradients_accumulated_while_detached_take_part(comm):
    model, reducer, optimizer = attached(comm, Heads())
    loss_of(model, comm.rank, 0, 0).backward()
    optimizer.step()
    reducer.detach()
    loss_of(model, comm.rank, 1, 0).backward()
    reducer.attach(model)
    loss_of(model, comm.rank, 2, 1).backward()
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_no_sync_does_not_vouch_for_gradients_made_by_hand_later(comm, buckets):
    model, reducer, optimizer = attached(comm, **buckets)
    for _ in range(2):
        with reducer.no_sync():
            backward(model, comm.rank)
        optimizer.zero_grad()
        put(model, comm.rank)
        assert_refused(model, optimizer, r"4\.bias")
        optimizer.zero_grad()
        backward(model, comm.rank)
        optimizer.step()


# Two optimizers


@pytest.mark.parametrize("when", ["before both", "between"])
@on_ranks(2)
def test_two_optimizers_step_replaced_gradients(comm, when):
    model, reducer, _ = attached(comm)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:])]
    for step in range(3):
        model.zero_grad()
        backward(model, comm.rank, step)
        for optimizer, part in zip(optimizers, (parameters, parameters[2:]), strict=True):
            if when == "between" or optimizer is optimizers[0]:
                for p in part:
                    p.grad = p.grad / p.grad.norm()
            optimizer.step()
        reducer.grad_norm()
    reducer.check_in_sync()


@pytest.mark.parametrize("is_new", [True, False])
@on_ranks(2)
def test_another_optimizer_does_not_step_gradients_by_hand(comm, is_new):
    model, _, optimizer = attached(comm)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
        if step == 0 and not is_new:
            other.step()
    put(model, comm.rank)
    assert_refused(model, other, r"4\.bias")


@on_ranks(2)
def test_what_no_sync_has_made_is_reduced_once(comm, buckets):
    model, reducer, _ = attached(comm, Heads(), op="sum", **buckets)
    loss_of(model, comm.rank, 0, 0, 1).backward()
    model.zero_grad(set_to_none=False)
    with reducer.no_sync():
        loss_of(model, comm.rank, 1, 0, 1).backward()
    loss_of(model, comm.rank, 2, 0).backward()
    reduced = [p.grad.clone() for p in model.heads[1].parameters()]
    for part in (model.trunk, model.heads[0]):
        part.zero_grad()
    loss_of(model, comm.rank, 3, 0).backward()
    assert_gradients(model.heads[1], reduced)


# Changed in hooks


def halve_in_place(p):
    p.grad.mul_(0.5)


def halve(p):
    p.grad = p.grad * 0.5


def halve_behind_data(p):
    p.grad.data = p.grad.data * 0.5


HALVES = [halve_in_place, halve, halve_behind_data]


def _of_step(step, model, rank):
    backward(model, rank, step)


@pytest.mark.parametrize("hook", HALVES, ids=lambda hook: hook.__name__)
@on_ranks(2)
def test_what_a_parameters_own_hook_makes_of_its_gradient_is_reduced(comm, buckets, hook):
    """Registered after attach(), so that it runs behind the reducer's."""
    model, reducer, _ = attached(comm, **buckets)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        expected = mean_gradients(mlp(), comm.world_size, functools.partial(_of_step, step))
        model.zero_grad()
        backward(model, comm.rank, step)
        assert_gradients(model, [0.5 * gradient for gradient in expected])
    reducer.detach()


@pytest.mark.parametrize("how", HALVES, ids=lambda how: how.__name__)
@on_ranks(2)
def test_a_gradient_that_another_layers_hook_changes_meanwhile_is_an_error(comm, how):
    model, _, _ = attached(comm, bucket_cap_mb=1e-5)
    handle = model[0].register_full_backward_hook(lambda *_: how(model[4].weight))
    finish_together(comm)
    with pytest.raises(FastcommError, match=r"4\.weight was changed by a hook while|abandoned"):
        backward(model, comm.rank)
        hear_of_it(comm)
    handle.remove()
    finish_together(comm)
    check_backward(comm, model)


@on_ranks(2)
def test_another_layers_hook_may_change_a_gradient_where_nothing_overlaps(comm):
    model, _, _ = attached(comm, overlap=False, bucket_cap_mb=1e-5)
    expected = mean_gradients(mlp(), comm.world_size, backward)
    model[0].register_full_backward_hook(lambda *_: halve_in_place(model[4].weight))
    backward(model, comm.rank)
    names = [name for name, _ in model.named_parameters()]
    halved = [g * 0.5 if n == "4.weight" else g for n, g in zip(names, expected, strict=True)]
    assert_gradients(model, halved)
