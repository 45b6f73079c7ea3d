"""What a reducer needs from autograd: hooks on gradients, and calls at the end of the running
backward or when the outer one goes on. Frees what failed backwards have left. Refuses compiled
autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.autograd_stack import is_inside_backward
from fastcomm.errors import FastcommError
from fastcomm.reducer.hooks import EndOfBackward


def _n_names(parameter: torch.Tensor) -> int:
    return sys.getrefcount(parameter.grad)


_parameter = torch.zeros(1, requires_grad=True, dtype=torch.float32, device="cpu")
_parameter.grad = torch.zeros_like(_parameter)
_N_NAMES = _n_names(_parameter)  # of a gradient that nobody else holds: by the version of torch
del _parameter


def is_gradient_held(parameter: torch.Tensor) -> bool:
    """Whether somebody else holds the parameter's gradient, or a tensor of which he has made it a
    view. Not every gradient that shares its memory is: autograd cuts some from one piece.
    """
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        return False
    if parameter.grad.requires_grad:  # one with a graph stays
        return False
    return parameter.grad._base is not None or _n_names(parameter) > _N_NAMES


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Hooks the parameter's gradient. After swap_tensors torch forgets to tell its C++ half of the
    hook; setting the hooks again tells it.
    """
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return handle


def is_hooked_behind(parameter: torch.Tensor, kind: type) -> bool:
    """Whether another hook runs on the parameter's gradient after the one of this kind."""
    hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    return bool(hooks) and not isinstance(hooks[-1], kind)


def call_at_end_of_backward(callback: EndOfBackward) -> None:
    """Calls it at the end of the backward that is running on this thread. A backward that ends with
    an exception drops the callback uncalled.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def call_when_outer_goes_on(node: torch.autograd.graph.Node, function: Callable[[], None]) -> None:
    """Calls `function` once the outer backward goes on to the nodes behind `node`, in which an
    inner backward has just ended.

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


def free_failed_backwards() -> None:
    """Frees the nodes that backwards of this thread have not come to, because they have failed.

    On the CPU these wait in the thread's queue until its next backward drops them. Until then they
    hold the model's parameters, whose hooks hold the reducer, and no garbage collector sees them.
    """
    if not is_inside_backward():
        with torch.inference_mode(False), torch.enable_grad():
            scalar = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
            scalar.backward()


def refuse_compiled_autograd() -> None:
    """Compiled autograd calls hooks, but nothing at the end of a backward. Raises FastcommError
    where it is on.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    flags = ("compiled_autograd_enabled", "in_compiled_autograd_region")
    if module is not None and any(getattr(module, flag, False) for flag in flags):
        raise FastcommError(
            "compiled autograd does not tell when a backward ends, so that gradients would stay "
            "unreduced: leave it off (reducer.compile(model) overlaps without it), "
            "or call detach() and, after each backward, reduce the gradients with the communicator"
        )
