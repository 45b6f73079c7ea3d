"""What a reducer asks of autograd: hooks on gradients, a call at the end of the running backward or
when the one around it goes on, and a refusal of its compilers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from fastcomm.errors import FastcommError
from fastcomm.reducer.gradient_hook import EndOfBackward


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """register_post_accumulate_grad_hook, which torch forgets to tell its C++ half about after
    swap_tensors.
    """
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return handle


def is_hooked_behind(parameter: torch.Tensor, kind: type) -> bool:
    """Hooks run on its gradient after the one of this kind."""
    hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    return bool(hooks) and not isinstance(hooks[-1], kind)


def call_at_end_of_backward(callback: EndOfBackward) -> None:
    """Of the backward that is running on this thread. One that ends with an exception drops the
    callback uncalled.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def call_when_outer_goes_on(node: torch.autograd.graph.Node, function: Callable[[], None]) -> None:
    """Calls `function` once the backward that has run `node`, in which another one has just ended,
    comes to the nodes behind it.

    Callbacks belong to the running backward. From there on that is the outer one again.
    """
    handles: list[RemovableHandle] = []

    def outer_goes_on(_: object) -> None:
        for handle in handles:
            handle.remove()
        function()

    handles.extend(
        behind.register_prehook(outer_goes_on)
        for behind, _ in node.next_functions
        if behind is not None
    )


def refuse_compiled_autograd() -> None:
    """Compiled autograd calls hooks, but nothing at the end of a backward. Raises FastcommError
    where it is on.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    flags = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    if module is not None and any(getattr(module, flag, False) for flag in flags):
        raise FastcommError(
            "compiled autograd does not tell when a backward ends, so that gradients would stay "
            "unreduced: leave it off, "
            "or call detach() and, after each backward, reduce the gradients with the communicator"
        )
