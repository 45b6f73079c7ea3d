"""Whether a backward is running, and whose: read off Python's stack, where autograd has frames of
its own. It has no other name for this.

The one place that knows these frames. Everything here holds for the calling thread.
"""

from __future__ import annotations

import sys
import threading

import torch

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


def caller_is_called_by_autograd() -> bool:
    """True where the calling function was called from C++ during backward, that is by DDP."""
    try:
        return sys._getframe(2).f_code is _RUN_BACKWARD
    except ValueError:  # there is none: a thread of autograd's own
        return True


def came_out_of_backward(error: BaseException | None) -> bool:
    """Whether the exception has passed through a backward on its way."""
    traceback = None if error is None else error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code is not _RUN_BACKWARD:
        traceback = traceback.tb_next
    return traceback is not None
