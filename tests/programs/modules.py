"""The modules of generated models, their data, and the stages in which a backward goes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.data import Backward, Layer, Model, Route, Touch

BATCH = 3


class OutOfLuck(Exception):
    """What a backward raises that is to fail."""


def fail(gradient: Tensor) -> None:
    raise OutOfLuck


Act = Callable[[Tensor], None]


class Heads(nn.Module):
    """Linear layers of which a forward uses some, or none."""

    def __init__(self, n: int, width: int, **options: Any) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width, **options) for _ in range(n))

    def forward(self, x: Tensor, used: int) -> Tensor:
        chosen = [head(x) for i, head in enumerate(self.heads) if used >> i & 1]
        return torch.stack(chosen).sum(0) if chosen else x


class Shared(nn.Linear):
    """A linear layer that is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class Transposed(nn.Module):
    """A weight whose memory is not in the order of its indices."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width + 1, width, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight)[:, :-1]


class Scale(nn.Module):
    """A parameter without dimensions, and one without elements."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty((), dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.nothing.sum()


class Unused(nn.Module):
    """A parameter that nobody uses."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x


MODULES: dict[str, Callable[[Layer, int, torch.dtype], nn.Module]] = {
    "linear": lambda layer, width, dtype: nn.Linear(width, width, layer.bias, dtype=dtype),
    "heads": lambda layer, width, dtype: Heads(layer.heads, width, bias=layer.bias, dtype=dtype),
    "norm": lambda layer, width, dtype: nn.LayerNorm(width, dtype=dtype),
    "batch norm": lambda layer, width, dtype: nn.BatchNorm1d(width, dtype=dtype),
    "shared": lambda layer, width, dtype: Shared(width, width, layer.bias, dtype=dtype),
    "transposed": lambda layer, width, dtype: Transposed(width, dtype),
    "scale": lambda layer, width, dtype: Scale(dtype),
    "unused": lambda layer, width, dtype: Unused(width, dtype),
}


class ProgramModel(nn.Module):
    """See data.Model. Equal seeds give equal values."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        self.width = model.width
        self.dtypes: list[torch.dtype] = []
        if not model.gain_is_last:
            self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.layers = nn.ModuleList()
        for layer in model.layers:
            self.grow(layer, seed)
        if model.gain_is_last:
            self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def grow(self, layer: Layer, seed: int) -> None:
        dtype = getattr(torch, layer.dtype)
        module = MODULES[layer.kind](layer, self.width, dtype)
        generator = torch.Generator("cpu").manual_seed(100 * seed + len(self.layers))
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                values = torch.randn(tensor.shape, generator=generator, dtype=dtype, device="cpu")
                tensor.data.copy_(values * (0.5 if tensor.numel() <= self.width else 0.3))
        if layer.kind == "batch norm":
            module.running_var.data.abs_()
        for parameter in module.parameters():
            parameter.requires_grad = not layer.frozen
        self.dtypes.append(dtype)
        self.layers.append(module)

    def _depth(self, route: Route) -> int:
        return len(self.layers) if route.depth < 0 else min(route.depth, len(self.layers))

    def trains(self, route: Route) -> bool:
        """Whether a backward reaches a parameter of some layer."""
        for module in self.layers[: self._depth(route)]:
            used: list[nn.Module] = [] if isinstance(module, Unused) else [module]
            if isinstance(module, Heads):
                used = [head for i, head in enumerate(module.heads) if route.heads >> i & 1]
            if any(p.requires_grad for one in used for p in one.parameters()):
                return True
        return False

    def forward(self, x: Tensor, route: Route, at: int | None = None, act: Act = fail) -> Tensor:
        depth = self._depth(route)
        at = None if at is None else min(at, depth)
        for i, (module, dtype) in enumerate(zip(self.layers, self.dtypes, strict=True)):
            if i == at:
                x.register_hook(act)
            if i >= depth:
                break
            arguments = (x.to(dtype), route.heads) if isinstance(module, Heads) else (x.to(dtype),)
            if route.wrap and route.wrapped >> i & 1:
                hidden = checkpoint(module, *arguments, use_reentrant=route.wrap == "reentrant")
            else:
                hidden = module(*arguments)
            x = torch.tanh(hidden)
        if at == len(self.layers):
            x.register_hook(act)
        return x

    def loss(
        self, rank: int, number: int, route: Route, at: int | None = None, act: Act = fail
    ) -> Tensor:
        """Of a batch that is this rank's and this number's. Where `gain` is used, its gradient
        comes first. act: called when the backward comes to layer `at`."""
        generator = torch.Generator("cpu").manual_seed(1000 * number + rank)
        x, y = torch.randn(
            2, BATCH, self.width, generator=generator, dtype=torch.float64, device="cpu"
        ).to(self.gain.device)
        hidden = self(x.requires_grad_(), route, at, act)
        error = (hidden.double() - y).square().mean()
        return self.gain * error if route.gain or not self.trains(route) else error


def stages(model: ProgramModel, operation: Any, rank: int, number: int) -> Iterator[None]:
    """Runs the backwards of an operation one after the other; yields after each."""
    route = operation.routes[rank]
    how = operation.how if isinstance(operation, Backward) else "once"
    if how == "inputs":  # torch refuses reentrant checkpoints then; and some input must be used
        route = replace(route, gain=True, wrap="" if route.wrap == "reentrant" else route.wrap)

    def loss(draw: int = 0) -> Tensor:
        return model.loss(rank, 10 * number + draw, route)

    if how == "twice":
        value = loss()
        value.backward(retain_graph=True)
        yield
        value.backward()
    elif how == "sum":
        (loss() + loss(1)).backward()
    elif how == "separately":
        values = loss(), loss(1)
        values[0].backward()
        yield
        values[1].backward()
    elif how == "inputs":
        trained = [p for p in model.parameters() if p.requires_grad and p is not model.gain]
        loss().backward(inputs=[model.gain, *trained[::2]])
    elif how == "thread":
        _in_thread(loss().backward)
    else:
        loss().backward()
    yield


def _in_thread(function: Callable[[], None]) -> None:
    """Runs it in a thread of its own; raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with contextlib.ExitStack() as stack:
        stack.callback(errors.clear)  # no circle through the traceback
        if errors:
            raise errors[0]


def touch_gradient(model: ProgramModel, touch: Touch, seed: int, is_set: bool) -> str:
    """Does to one gradient what `touch` says; with `is_set`, gives it new values on the way.
    Returns the parameter's name."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    name, parameter = trained[touch.parameter % len(trained)]
    if is_set:
        generator = torch.Generator("cpu").manual_seed(seed)
        values = torch.randn(
            parameter.shape, generator=generator, dtype=parameter.dtype, device="cpu"
        ).to(parameter.device)
        if touch.how == "scaled" and parameter.grad is not None:  # in place
            parameter.grad.copy_(values)
        else:
            parameter.grad = values
    if parameter.grad is None or touch.how == "none":
        parameter.grad = None
    elif touch.how == "own":
        parameter.grad = parameter.grad.clone()
    elif touch.how == "strided":
        parameter.grad = _with_other_strides(parameter.grad)
    elif not is_set:
        parameter.grad.mul_(0.5)
    return name


def _with_other_strides(tensor: Tensor) -> Tensor:
    if tensor.dim() < 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
