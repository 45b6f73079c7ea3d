"""Optimizers, and several models"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.matrix.row import Training, error, reduced, sgd
from tests.support.models import Fail, backward, batch, loss_of, mlp, seed


@reduced("one optimizer with several param groups, gradients accumulated over two backwards")
def param_groups(case):
    def groups(parameters):
        parameters = list(parameters)
        weights, biases = parameters[::2], parameters[1::2]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 1e-2}]
        return torch.optim.AdamW(groups, lr=1e-3)

    def run(model, rank, i):
        with case.no_sync(model):
            backward(model, rank, i)
        backward(model, rank, i + 10)

    case.train(mlp, run, optimizer=groups)


@reduced("`foreach` and `fused` optimizers")
def fused_optimizers(case):
    case.train(mlp, backward, optimizer=functools.partial(torch.optim.Adam, fused=True))
    case.train(mlp, backward, optimizer=functools.partial(torch.optim.SGD, lr=0.1, foreach=True))


@reduced("`LBFGS` whose closure returns the ranks' mean loss (`comm.all_reduce(loss, 'mean')`)")
def lbfgs(case):
    make_optimizer = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=4)
    training = Training(case, mlp, optimizer=make_optimizer)

    def closure():
        training.model.zero_grad()
        loss = loss_of(training.model, case.rank)
        loss.backward()
        loss = loss.detach().reshape(1)
        case.comm.all_reduce(loss, "mean")
        return loss[0]

    def whole_batch(replica):
        replica.zero_grad()
        loss = torch.stack([loss_of(replica, rank) for rank in range(case.world_size)]).mean()
        loss.backward()
        return loss

    for _ in range(2):
        training.optimizer.step(closure)
        for replica, optimizer in zip(training.replicas, training.replica_optimizers, strict=True):
            optimizer.step(functools.partial(whole_batch, replica))
        training.assert_parameters()


@reduced("`reducer.clip_grad_norm_` in place of torch's")
def reducers_clip(case):
    training = Training(case, mlp)
    for _ in range(2):
        training.zero_grad()
        training.backward(backward)
        training.reducer.clip_grad_norm_(0.1)
        for replica in training.replicas:
            torch.nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
        training.update()


# Optimizers that step inside backward

IN_BACKWARD = {
    "match": r"(weight|bias).*(after backward|reduce)\(\)",
    "instead": "step after backward",
}


def _step_in_hooks(model):
    """An optimizer for each parameter, stepping as soon as it can; returns the hooks."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        p.grad = None

    return [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]


def _refuse_steps_in_hooks(case, training, handles):
    for _ in range(2):
        training.zero_grad()
        with case.refused():
            backward(training.model, case.rank)
        training.assert_parameters()
    for handle in handles:
        handle.remove()
    for _ in range(2):
        training.step(backward)


@error("an optimizer that steps inside backward, in post-accumulate hooks", **IN_BACKWARD)
def step_in_backward(case):
    training = case.train(mlp, backward)
    _refuse_steps_in_hooks(case, training, _step_in_hooks(training.model))


def _with_a_local_part():
    seed(0)
    return nn.Sequential(nn.Linear(8, 8), mlp())


@reduced("an optimizer that steps another model, without a reducer, inside the same backward")
def step_of_another_in_backward(case):
    def make():
        model = _with_a_local_part()
        _step_in_hooks(model[0])
        return model

    training = case.train(
        make,
        backward,
        parts=lambda model: [model[1]],
        optimizer=lambda parameters: sgd(list(parameters)[2:]),
    )
    stepped = training.model[0].weight
    assert not torch.equal(stepped, _with_a_local_part()[0].weight)
    for replica in training.replicas[:1]:
        torch.testing.assert_close(stepped, replica[0].weight)


# Several models


@reduced("two models, a reducer each on one communicator, one loss, one optimizer over both")
def two_models(case):
    case.train(_with_a_local_part, backward, parts=list)


@reduced("two models in turn, a reducer and an optimizer each, on one communicator (GANs)")
def two_models_in_turn(case):
    one, other = Training(case, mlp), Training(case, mlp)
    for _ in range(2):
        one.step(backward)
        other.step(lambda model, rank, i: backward(model, rank, i + 10))


@reduced("one model whose loss goes through another attached, frozen one")
def through_another(case):
    def make():
        model = _with_a_local_part()
        model[1].requires_grad_(False)
        return model

    case.train(
        make,
        backward,
        parts=lambda model: [model[0]],
        optimizer=lambda parameters: sgd(list(parameters)[:2]),
    )


# Steps that fail


@error(
    "an exception in backward on one rank: the others learn of it",
    match=r"rank 1 .*abandon|abandon.* rank 1",
    instead="`zero_grad()` and go on with the next batch, on every rank",
)
def exception_in_backward(case):
    def run(model, rank, i):
        x, y = batch(rank, i)
        F.mse_loss(model[2:](Fail.apply(model[:2](x), rank == 1)), y).backward()

    training = case.train(mlp, backward)
    with case.refused(RuntimeError, "out of luck") if case.rank == 1 else case.refused():
        run(training.model, case.rank, training.n_steps)
    training.assert_parameters()
    for _ in range(2):
        training.step(backward)


@error(
    "an exception in forward on one rank: the others learn of it by `comm.abandon()`",
    match=r"rank 1 .*abandon|abandon.* rank 1",
    instead="catch it, `comm.abandon()`, and go on with the next batch, on every rank",
)
def exception_in_forward(case):
    training = case.train(mlp, backward)
    training.zero_grad()
    if case.rank == 1:
        with case.refused(ValueError, "bad batch"):
            raise ValueError("bad batch")
        case.comm.abandon()
    else:
        with case.refused():
            backward(training.model, case.rank)
    training.assert_parameters()
    for _ in range(2):
        training.step(backward)


@error(
    "a backward through a freed graph",
    match="second time",
    instead="`retain_graph=True`",
    raises=RuntimeError,
)
def freed_graph(case):
    training = case.train(mlp, backward)
    loss = loss_of(training.model, case.rank)
    loss.backward()
    with case.refused():
        loss.backward()
    for _ in range(2):
        training.step(backward)


@error(
    "a backward after `comm.close()`",
    match="close",
    instead="`reducer.detach()` to train on alone, or a new communicator",
    is_whole=False,
)
def closed(case):
    training = case.train(mlp, backward)
    case.comm.close()
    with case.refused():
        backward(training.model, case.rank)
    training.reducer.detach()
    training.zero_grad()
    backward(training.model, case.rank)  # on its own
