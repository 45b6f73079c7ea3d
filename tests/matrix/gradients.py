"""Gradients in the user's hands"""

from __future__ import annotations

import functools
import multiprocessing
import os

import torch
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.matrix.functions import BY_HAND
from tests.matrix.row import Training, error, reduced, trains
from tests.support.bodies import finish_together
from tests.support.models import Heads, backward, batch, loss_of, mlp


@trains("`p.grad = None` between two backwards", mlp)
def set_to_none(model, rank, i):
    backward(model, rank, i)
    model[2].weight.grad = None
    backward(model, rank, i + 10)


@trains("`zero_grad(set_to_none=False)`", mlp)
def zeroed(model, rank, i):
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        backward(model, rank, i)


@reduced("gradients that are there before attach(): they are part of the first mean")
def before_attach(case):
    def make():
        model = mlp()
        backward(model, 7)
        return model

    training = Training(case, make)
    training.backward(backward)
    training.update()
    training.step(backward)


@reduced("gradients that are there before attach(), of parameters the first backward does not use")
def before_attach_unused(case):
    def make():
        model = Heads()
        loss_of(model, 7, 0, 0).backward()
        return model

    training = Training(case, make)
    training.backward(_use_one_head)
    training.update()
    training.step(_use_one_head)


def _use_one_head(model, rank, i):
    loss_of(model, rank, i, 1).backward()


@trains("gradients changed in place between two backwards", mlp)
def changed_in_place(model, rank, i):
    backward(model, rank, i)
    for p in model.parameters():
        p.grad.mul_(0.5)
    backward(model, rank, i + 10)


@trains("gradients replaced by other tensors between two backwards", mlp)
def replaced(model, rank, i):
    backward(model, rank, i)
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0).t().contiguous().t()
    backward(model, rank, i + 10)


@reduced("`p.grad` replaced after backward by what is made of it, then `optimizer.step()`")
def replaced_after_backward(case):
    def halve(model):
        for p in model.parameters():
            p.grad = p.grad / 2

    training = Training(case, mlp)
    for _ in range(3):
        training.zero_grad()
        training.backward(backward)
        training.change(halve)
        training.update()


@reduced("gradients in the user's `comm.empty` memory")
def in_memory_of_the_communicator(case):
    def run(model, rank, i):
        sizes = [p.numel() for p in model.parameters()]
        parts = case.comm.empty(sum(sizes), dtype=torch.float32).zero_().split(sizes)
        for p, part in zip(model.parameters(), parts, strict=True):
            p.grad = part.view_as(p)
        backward(model, rank, i)

    case.train(mlp, run)


@error(
    "two parameters' gradients exchanged",
    match=r"(0|2)\.bias.*clone",
    instead="`clone()` gradients before you exchange them",
)
def exchanged(case):
    def exchange(model):
        model[0].bias.grad, model[2].bias.grad = model[2].bias.grad, model[0].bias.grad

    training = case.train(mlp, backward)
    training.zero_grad()
    training.backward(backward)
    finish_together(case.comm)  # rank 0 has computed the oracle: the others are ahead of it
    exchange(training.model)
    with case.refused(may_hear=True):
        backward(training.model, case.rank)
    training.assert_parameters()

    def run(model, rank, i):
        backward(model, rank, i)
        model[0].bias.grad, model[2].bias.grad = (model[k].bias.grad.clone() for k in (2, 0))
        backward(model, rank, i + 10)

    training.step(run)
    training.step(backward)


@reduced("a gradient with the negative bit set")
def negative_bit(case):
    def make():
        model = mlp()
        for p in model.parameters():
            p.register_hook(lambda g: torch._neg_view(g.clone()))
        return model

    probe = make()
    backward(probe, 0)
    assert probe[0].weight.grad.is_neg(), "autograd resolves the bit: the row shows nothing"
    case.train(make, backward)


# Gradients made by hand


def _evolve(model, rank, i):
    """An evolution strategy: the gradient is noise, weighted by what it does to the loss.

    The noise goes into copies: what adding and subtracting it leaves behind differs by rank.
    """
    generator = torch.Generator("cpu").manual_seed(100 * i + rank)
    x, y = batch(rank, i)
    named = dict(model.named_parameters())
    noise = {}
    for name, p in named.items():
        noise[name] = torch.randn(p.shape, generator=generator, device="cpu").to(p.device) / 10
    with torch.no_grad():
        moved = {name: p + noise[name] for name, p in named.items()}
        loss = F.mse_loss(functional_call(model, moved, (x,)), y)
    for name, p in named.items():
        p.grad = loss * noise[name]


@reduced("gradients of an evolution strategy, then `reducer.reduce()`")
def evolution(case):
    case.train(mlp, lambda *args: (_evolve(*args), case.reduce(args[0])))


@reduced("gradients set by hand for some parameters on some ranks, then `reducer.reduce()`")
def partly_by_hand(case):
    def run(model, rank, i):
        for p in list(model.parameters())[: 4 - 2 * (rank % 2)]:
            p.grad = torch.full_like(p, rank + i + 1.0)
        case.reduce(model)

    case.train(mlp, run)


@trains("a gradient set by hand before a backward that does not use the parameter", Heads)
def by_hand_before_backward(model, rank, i):
    model.heads[0].bias.grad = torch.full((4,), rank + i + 1.0)
    _use_one_head(model, rank, i)


@error("a gradient set by hand after a backward that does not use the parameter", **BY_HAND)
def by_hand_after_backward(case):
    training = Training(case, Heads)
    bias = training.model.heads[0].bias
    for _ in range(2):
        training.zero_grad()
        _use_one_head(training.model, case.rank, training.n_steps)
        bias.grad = torch.full((4,), case.rank + 1.0)
        with case.refused():
            training.optimizer.step()
        training.assert_parameters()
    training.step(_use_one_head)


@error("gradients set by hand, then `optimizer.step()`", **BY_HAND)
def by_hand(case):
    training = case.train(mlp, backward)
    for _ in range(2):
        training.zero_grad()
        _evolve(training.model, case.rank, training.n_steps)
        with case.refused():
            training.optimizer.step()
        training.assert_parameters()
    training.step(lambda *args: (_evolve(*args), case.reduce(args[0])))
    training.step(backward)


@error("gradients written by hand into zeroed ones, then `optimizer.step()`", **BY_HAND)
def by_hand_in_place(case):
    def write(model, rank, i):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad.fill_(rank + i + 1.0)

    training = case.train(mlp, backward)
    for _ in range(2):
        training.model.zero_grad(set_to_none=False)
        write(training.model, case.rank, training.n_steps)
        with case.refused():
            training.optimizer.step()
        training.assert_parameters()
    training.step(lambda *args: (write(*args), case.reduce(args[0])))
    training.step(backward)


@error(
    "gradients set by hand, then `grad_norm()`, `clip_grad_norm_()` or `nonfinite_count()`",
    **BY_HAND,
)
def figures_by_hand(case):
    training = case.train(mlp, backward)
    reducer = training.reducer
    for ask in (
        reducer.grad_norm,
        functools.partial(reducer.clip_grad_norm_, 1.0),
        reducer.nonfinite_count,
    ):
        training.zero_grad()
        _evolve(training.model, case.rank, training.n_steps)
        with case.refused():
            ask()
    training.assert_parameters()
    training.zero_grad()
    training.backward(lambda *args: (_evolve(*args), case.reduce(args[0])))
    reducer.grad_norm()
    training.step(backward)


# Processes


@reduced("a forked child that writes into `p.grad`: the parent's gradients stay what they are")
def forked(case):
    training = case.train(mlp, backward)
    training.zero_grad()
    training.backward(backward)
    before = [p.grad.clone() for p in training.model.parameters()]
    child = os.fork()
    if not child:
        try:
            for p in training.model.parameters():
                p.grad.zero_()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    after = [p.grad for p in training.model.parameters()]
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))
    training.update()
    training.step(backward)


class _Numbers(Dataset):
    def __init__(self, rank):
        self.items = [batch(rank, i)[0] for i in range(4)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@reduced("`DataLoader` workers (`num_workers=2`, fork) started during training")
def loader_workers(case):
    multiprocessing.current_process().daemon = False  # a daemon, unlike a user, may not have any
    training = case.train(mlp, backward)
    for _ in range(2):
        numbers = _Numbers(case.rank)
        for x in DataLoader(numbers, num_workers=2, multiprocessing_context="fork"):
            assert x.shape == (1, 4, 8)
        training.step(backward)
