"""Ways to call backward"""

from __future__ import annotations

import ctypes
import functools
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.matrix.row import Training, error, reduced, train_row, trains
from tests.support.models import SMALL_BUCKETS, backward, batch, loss_of, mlp

row = functools.partial(train_row, __name__)

row("plain_backward", "`loss.backward()`", mlp)
row("many_buckets", "`loss.backward()` of a model in many buckets", mlp, **SMALL_BUCKETS)


@trains("`torch.autograd.backward([loss, loss])`", mlp)
def list_of_losses(model, rank, i):
    torch.autograd.backward([loss_of(model, rank, i), loss_of(model, rank, i + 10)])


@trains("`output.backward(gradient)` of something that is no scalar", mlp)
def backward_of_a_vector(model, rank, i):
    model(batch(rank, i)[0]).backward(batch(rank, i)[1])


@trains("two losses, two backwards", mlp)
def two_backwards(model, rank, i):
    first, second = loss_of(model, rank, i), loss_of(model, rank, i + 10)
    first.backward()
    second.backward()


@trains("two backwards through one graph (`retain_graph=True`)", mlp)
def retain_graph(model, rank, i):
    hidden = model(batch(rank, i)[0])
    hidden.sum().backward(retain_graph=True)
    hidden.square().sum().backward()


@trains("`loss.backward(inputs=[...])`: the others get no gradient", mlp)
def backward_inputs(model, rank, i):
    loss_of(model, rank, i).backward(inputs=[model[0].weight, model[4].bias])


@trains("`torch.autograd.grad` (not a reduction: what it returns is local), then backward", mlp)
def autograd_grad_is_local(model, rank, i):
    local = torch.autograd.grad(loss_of(model, rank, i + 10), model[0].weight)[0]
    again = torch.autograd.grad(loss_of(model, rank, i + 10), model[0].weight)[0]
    assert torch.equal(local, again)
    backward(model, rank, i)


def _mean_loss(case, model, i):
    """The oracle's loss where gradients of gradients meet: that of all ranks' batches at once."""
    return torch.stack([loss_of(model, rank, i) for rank in range(case.world_size)]).mean()


@trains("`loss.backward(create_graph=True)`", mlp)
def create_graph(model, rank, i):
    loss_of(model, rank, i).backward(create_graph=True)


@reduced("`backward(create_graph=True)`, then backward of a penalty on the reduced `p.grad`")
def penalty_on_reduced_gradients(case):
    def penalise(model):
        sum(p.grad.square().sum() for p in model.parameters()).backward()

    def run(model, rank, i):
        loss_of(model, rank, i).backward(create_graph=True)
        penalise(model)

    def whole_batch(model, rank, i):
        _mean_loss(case, model, i).backward(create_graph=True)
        penalise(model)

    case.train(mlp, run, oracle=whole_batch)


@trains("gradient penalty by `torch.autograd.grad(..., create_graph=True)`", mlp)
def gradient_penalty(model, rank, i):
    x = batch(rank, i)[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (loss_of(model, rank, i) + slope.square().sum()).backward()


@reduced("two backwards in a step with the parameters moved between them (SAM)")
def sharpness_aware(case):
    def sam(loss):
        def run(model, rank, i):
            loss(model, rank, i).backward()
            moves = [0.05 * p.grad for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            model.zero_grad()
            loss(model, rank, i).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)

        return run

    case.train(mlp, sam(loss_of), oracle=sam(lambda model, _, i: _mean_loss(case, model, i)))


# Threads. An unused parameter makes the end of backward do some of the work.


def _with_unused():
    model = mlp()
    model.unused = nn.Parameter(torch.ones(3))
    return model


@trains("backward in a `threading.Thread`, some parameters unused", _with_unused)
def in_a_thread(model, rank, i):
    thread = threading.Thread(target=backward, args=(model, rank, i))
    thread.start()
    thread.join()


@reduced("backward in a thread of a C library, some parameters unused")
def in_a_thread_of_c(case):
    libc = ctypes.CDLL(None)

    def run(model, rank, i):
        thread = ctypes.c_ulong()

        @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        def body(_):
            backward(model, rank, i)

        assert libc.pthread_create(ctypes.byref(thread), None, body, None) == 0
        libc.pthread_join(thread, None)

    case.train(_with_unused, run)


# Accumulation


@reduced("gradient accumulation with `no_sync()`")
def no_sync(case):
    def run(model, rank, i):
        with case.no_sync(model):
            backward(model, rank, i)
            backward(model, rank, i + 10)
        backward(model, rank, i + 20)

    case.train(mlp, run)


@trains("gradient accumulation without `no_sync()`", mlp)
def accumulation(model, rank, i):
    backward(model, rank, i)
    backward(model, rank, i + 10)


# Checkpointing


def _checkpointed(reentrant):
    def run(model, rank, i):
        x, y = batch(rank, i)
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
        F.mse_loss(checkpoint(model[2:], hidden, use_reentrant=reentrant), y).backward()

    return run


def _shared_layer(reentrant):
    def run(model, rank, i):
        x, y = batch(rank, i)
        hidden = model[0](x)
        for _ in range(2):
            hidden = checkpoint(model[1:4], hidden, use_reentrant=reentrant)
        F.mse_loss(model[4](hidden), y).backward()

    return run


row("checkpointing", "`checkpoint(..., use_reentrant=False)`", mlp, _checkpointed(False))
row("reentrant_checkpointing", "`checkpoint(..., use_reentrant=True)`", mlp, _checkpointed(True))
row(
    "shared_layer",
    "a layer under two non-reentrant checkpoints",
    mlp,
    _shared_layer(False),
    **SMALL_BUCKETS,
)
row(
    "shared_layer_without_overlap",
    "a layer under two reentrant checkpoints, with `Reducer(overlap=False)`",
    mlp,
    _shared_layer(True),
    overlap=False,
    **SMALL_BUCKETS,
)


@error(
    "a layer under two reentrant checkpoints, its bucket launched in between",
    match=r"2\.(weight|bias).*use_reentrant=False.*overlap=False",
    instead="`checkpoint(..., use_reentrant=False)`, or `Reducer(overlap=False)`",
)
def shared_layer_under_reentrant(case):
    training = Training(case, mlp, **SMALL_BUCKETS)
    with case.refused(may_hear=True):
        _shared_layer(reentrant=True)(training.model, case.rank, 0)
    training.assert_parameters()
    training.step(_shared_layer(reentrant=False))
    training.step(backward)
