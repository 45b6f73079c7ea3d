"""Watching a module's forward, which its parameters' hooks do not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from fastcomm.insight.recorder import Phases, Recorder


def watch_forward(model: nn.Module, listener: Recorder | Phases) -> list[RemovableHandle]:
    """Tells the listener when the module's forward begins and ends, and when a backward reaches its
    output. In what torch.compile traces there is nothing to see.
    """
    hooks = _Hooks(listener)
    return [model.register_forward_pre_hook(hooks.begin), model.register_forward_hook(hooks.end)]


class _Hooks:
    """Those of one module. On a copy of the module they do nothing."""

    def __init__(self, listener: Recorder | Phases | None = None) -> None:
        self._listener = listener

    def __reduce__(self) -> Any:
        return _Hooks, ()

    def begin(self, *_: object) -> None:
        if self._listener is not None and _is_training():
            self._listener.begin_forward()

    def end(self, module: nn.Module, inputs: object, output: object) -> None:
        if self._listener is not None and _is_training():
            self._listener.end_forward()
            node = _first_node(output)
            if node is not None:
                node.register_prehook(self._reach_output)

    def _reach_output(self, _: object) -> None:
        if self._listener is not None:
            self._listener.reach_output()


def _is_training() -> bool:
    return not torch.compiler.is_compiling() and torch.is_grad_enabled()


def _first_node(output: Any) -> Node | None:
    """That of the first tensor of the output that has a graph, such as the loss."""
    values = list(output.values()) if isinstance(output, dict) else output
    tensors = values if isinstance(values, (tuple, list)) else [values]
    nodes = (one.grad_fn for one in tensors if isinstance(one, Tensor))
    return next((node for node in nodes if node is not None), None)
