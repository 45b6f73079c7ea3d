"""Functions, hooks and torch.func"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests.matrix.row import Training, error, reduced, train_row, trains
from tests.support.bodies import finish_together
from tests.support.models import SMALL_BUCKETS, Fail, backward, batch, loss_of, mlp, seed

row = functools.partial(train_row, __name__)


def _two_layers():
    seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, bias=False))


class _Scale(torch.autograd.Function):
    """Returns None for the second of its inputs."""

    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@trains("a custom `autograd.Function`", mlp)
def custom_function(model, rank, i):
    x, y = batch(rank, i)
    F.mse_loss(Fail.apply(model(x), False), y).backward()


@trains("a `Function` that returns None for a parameter: its gradient stays None", _two_layers)
def function_returns_none(model, rank, i):
    x, y = batch(rank, i)
    F.mse_loss(_Scale.apply(model[0](x), model[1].weight), y).backward()


@trains("a `Function` that returns None on some ranks only: they count as zero", _two_layers)
def function_returns_none_on_a_rank(model, rank, i):
    x, y = batch(rank, i)
    hidden, weight = model[0](x), model[1].weight
    F.mse_loss(_Scale.apply(hidden, weight) if rank == 0 else hidden * weight, y).backward()


class _Fused(torch.autograd.Function):
    """A loss that works out its gradients in forward, as fused cross entropies do."""

    @staticmethod
    def forward(ctx, hidden, weight, target):
        with torch.enable_grad():
            inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.mse_loss(inputs[0] @ inputs[1].t(), target)
            ctx.save_for_backward(*torch.autograd.grad(loss, inputs))
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = ctx.saved_tensors
        return gradient * of_hidden, gradient * of_weight, None


@trains(
    "a loss whose `Function` works out its gradients in forward (fused cross entropy)", _two_layers
)
def gradients_in_forward(model, rank, i):
    x, y = batch(rank, i)
    _Fused.apply(model[0](x), model[1].weight, y).backward()


class _BackwardInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        with torch.enable_grad():
            layer(x.detach()).square().sum().backward()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@trains("a backward inside a `Function`'s forward", _two_layers)
def backward_in_forward(model, rank, i):
    hidden = _BackwardInForward.apply(model[0](batch(rank, i)[0]), model[1])
    F.mse_loss(model[1](hidden), batch(rank, i)[1]).backward()


@trains("a backward inside a tensor's hook", _two_layers)
def backward_in_a_hook(model, rank, i):
    def another(_):
        with torch.enable_grad():
            model[1](batch(rank, i + 10)[1]).square().mean().backward()

    hidden = model[0](batch(rank, i)[0])
    hidden.register_hook(another)
    hidden.square().mean().backward()


# Hooks


def _hooked():
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda g: 2 * g)
    return model


def _double(p):
    p.grad.mul_(2)


def _hook_all(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_double)
    return model


row("tensor_hooks", "`parameter.register_hook` that changes the gradient", _hooked)
row(
    "post_accumulate_hooks",
    "`register_post_accumulate_grad_hook` before attach(): what it leaves is reduced",
    lambda: _hook_all(mlp()),
)


@reduced("`register_post_accumulate_grad_hook` after attach(): what it leaves is reduced")
def late_post_accumulate_hooks(case):
    training = case.train(mlp, backward)
    training.change(_hook_all)
    for _ in range(2):
        training.step(backward)


@error(
    "`register_post_accumulate_grad_hook` that updates the parameter and drops its gradient (LOMO)",
    match=r"(weight|bias).* hook .*after backward\(\)",
    instead="update parameters after backward",
)
def update_in_hooks(case):
    def drop(p):
        p.grad = None  # a real one has moved the parameter before

    training = Training(case, mlp)
    handles = [p.register_post_accumulate_grad_hook(drop) for p in training.model.parameters()]
    for _ in range(2):
        with case.refused(may_hear=True):
            backward(training.model, case.rank)
    for handle in handles:
        handle.remove()
    training.step(backward)


@reduced("`module.register_full_backward_hook`")
def module_hooks(case):
    def make():
        model = mlp()
        model[2].register_full_backward_hook(lambda _, gradients, __: (2 * gradients[0],))
        return model

    case.train(make, backward)


@error(
    "a module's backward hook that changes another layer's `.grad`, its bucket launched in between",
    match=r"4\.weight was changed by a hook while",
    instead="change it after backward, in the parameter's own hooks, or `Reducer(overlap=False)`",
)
def changing_another_layers_gradient(case):
    training = Training(case, mlp, **SMALL_BUCKETS)
    model = training.model

    def double(*_):
        model[4].weight.grad.mul_(2)

    handle = model[0].register_full_backward_hook(double)
    for _ in range(2):
        finish_together(case.comm)
        with case.refused(may_hear=True):
            backward(model, case.rank)
    handle.remove()
    training.step(backward)


# torch.func


def _functional_loss(model, parameters, rank, i):
    x, y = batch(rank, i)
    return F.mse_loss(functional_call(model, parameters, (x,)), y)


@trains("`functional_call` with the model's own parameters, `loss.backward()`", mlp)
def functional_call_of_its_own(model, rank, i):
    _functional_loss(model, dict(model.named_parameters()), rank, i).backward()


@trains("an inner loop on fast weights, then `outer_loss.backward()` (MAML)", mlp)
def maml(model, rank, i):
    fast = dict(model.named_parameters())
    for inner in range(2):
        loss = _functional_loss(model, fast, rank, inner)
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        steps = dict(zip(fast, slopes, strict=True))
        fast = {name: p - 0.1 * steps[name] for name, p in fast.items()}
    _functional_loss(model, fast, rank, i + 10).backward()


def _set_private_gradients(model, rank, i):
    """A gradient for each sample, clipped each, added up: DP-SGD without its noise."""

    def loss(parameters, x, y):
        return F.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    slopes = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *batch(rank, i))
    norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
    factors = (0.5 / norms).clamp(max=1)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("s,s...->...", factors, slopes[name])


@reduced("gradients of every sample by `vmap`, clipped (DP-SGD), then `reducer.reduce()`")
def private_gradients(case):
    case.train(mlp, lambda *args: (_set_private_gradients(*args), case.reduce(args[0])))


BY_HAND = {
    "match": r"(weight|bias).*reduce\(\)",
    "instead": "`reducer.reduce()` before the step, on every rank",
}


def _set_autograd_gradients(model, rank, i):
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loss_of(model, rank, i), parameters)
    for p, slope in zip(parameters, slopes, strict=True):
        p.grad = slope


@reduced(
    "gradients by `torch.autograd.grad` or `torch.func.grad`, put into `.grad`, then "
    "`reducer.reduce()`"
)
def autograd_grad(case):
    case.train(mlp, lambda *args: (_set_autograd_gradients(*args), case.reduce(args[0])))
