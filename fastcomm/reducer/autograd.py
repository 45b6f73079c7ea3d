"""What a reducer has to know about the running backward and autograd has no name for: its frames on
Python's stack, and its compilers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from fastcomm.errors import FastcommError

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_BACKWARD_OF_A_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__


def enclosing_backward() -> tuple[bool, torch.autograd.graph.Node | None]:
    """Whether the backward that ends now ran inside another one, and the autograd Function that ran
    it, if one did.

    A reentrant checkpoint runs one, or a hook that calls backward. On a GPU hooks run on a thread
    of autograd's own, where the outermost backward is not on the stack.
    """
    n_backwards = int(_is_thread_of_autograd())
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _BACKWARD_OF_A_FUNCTION:
            return True, frame.f_locals["self"]
        n_backwards += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    return n_backwards > 1, None


def _is_thread_of_autograd() -> bool:
    """Not any thread that `threading` has not started: users have pools of their own in C++.
    Autograd names its threads.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return False
    with open("/proc/thread-self/comm") as name:
        return name.read().startswith("pt_autograd")


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
