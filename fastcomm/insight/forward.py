"""Watching a module's forward, which its parameters' hooks do not see."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ForwardListener(Protocol):
    """Hears when a forward begins and ends, and when a backward reaches its output."""

    def begin_forward(self) -> None: ...
    def end_forward(self) -> None: ...
    def reach_output(self) -> None: ...


def watch_forward(model: nn.Module, listener: ForwardListener) -> list[RemovableHandle]:
    """Tells the listener when the module's forward begins and ends, and when a backward reaches its
    output. In what torch.compile traces there is nothing to see.
    """
    begin, end = _Begin(listener), _End(listener)
    return [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]


def _nothing(*_: object) -> None:
    """The hook of a copy of the module."""


class _Hook:
    """Does nothing on a copy of the module."""

    def __init__(self, listener: ForwardListener) -> None:
        self._listener = listener

    def __reduce__(self) -> Any:
        return _that_of_a_copy, ()


def _that_of_a_copy() -> Any:
    return _nothing


class _Begin(_Hook):
    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._listener.begin_forward()


class _End(_Hook):
    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._listener.end_forward()
        tensor = _first_with_graph(output)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self._reach_output)

    def _reach_output(self, _: object) -> None:
        self._listener.reach_output()


def _first_with_graph(output: Any) -> Tensor | None:
    """The first tensor of a model's output that has a graph: the loss, where models return one."""
    values = output.values() if isinstance(output, dict) else output
    for value in values if isinstance(values, (tuple, list)) or values is not output else [output]:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value
    return None
