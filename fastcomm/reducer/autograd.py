"""What a reducer asks of autograd: hooks on gradients, and a refusal of its compilers."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from fastcomm.errors import FastcommError


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """register_post_accumulate_grad_hook, which torch forgets to tell its C++ half about after
    swap_tensors.
    """
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return handle


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
