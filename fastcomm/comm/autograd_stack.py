"""Tells whether a backward is running, which one, and which one an exception has come out of. Reads
it off Python's stack, where autograd has frames of its own: autograd has no API for it.

Only this module knows these frames. All functions answer for the calling thread.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType

import torch

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_BACKWARD_OF_A_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__

_known = threading.local()


def enclosing_backward() -> tuple[bool, torch.autograd.graph.Node | None]:
    """Whether the backward that ends now ran inside another one, and the autograd Function that ran
    it, if one did.

    Reentrant checkpoints and hooks that call backward run such backwards. On a GPU, hooks run on a
    thread of autograd's own, whose stack does not show the outermost backward.
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
    """Looked up once for a thread: it is asked in every step."""
    if not hasattr(_known, "is_of_autograd"):
        _known.is_of_autograd = _has_autograds_name()
    return bool(_known.is_of_autograd)


def _has_autograds_name() -> bool:
    """By the name that autograd gives its threads. It is not enough that `threading` has not
    started the thread: users have thread pools of their own in C++.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return False
    with open("/proc/thread-self/comm") as name:
        return name.read().startswith("pt_autograd")


def caller_is_called_by_autograd() -> bool:
    """True where the calling function was called from C++ during backward, that is by DDP."""
    try:
        return sys._getframe(2).f_code is _RUN_BACKWARD
    except ValueError:  # no Python caller: a thread of autograd's own
        return True


def is_inside_backward() -> bool:
    """Whether the caller runs in a hook, or in another function that a backward calls."""
    return torch._C._current_graph_task_id() != -1


def is_handled_inside_backward(error: BaseException | None) -> bool:
    """Whether the exception was caught inside the same backward that the caller runs in."""
    if error is None or error.__traceback__ is None:
        return False
    catching = error.__traceback__.tb_frame
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        if frame is catching:
            return True
        frame = frame.f_back
    return False


class RunningBackward:
    """The innermost backward that runs on this thread, identified by the tensor it began with.
    Keeps nothing of it alive.

    root: that tensor. None on a thread of autograd's own, where it cannot be seen: then any
    backward counts as this one.
    """

    def __init__(self, root: object) -> None:
        self._root = weakref.ref(root) if isinstance(root, torch.Tensor) else None

    def has_raised(self, error: BaseException | None) -> bool:
        """Whether the exception has come out of this backward."""
        if self._root is None:
            return any(True for _ in _backwards_of(error))
        root = self._root()
        return root is not None and any(_root(frame) is root for frame in _backwards_of(error))


def running_backward() -> RunningBackward | None:
    """The innermost backward on this thread, or None."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
    if frame is not None:
        return RunningBackward(_root(frame))
    return RunningBackward(None) if _is_thread_of_autograd() else None


def _root(frame: FrameType) -> object:
    """The first tensor that the backward began with, or the first edge of the graph."""
    return frame.f_locals[_RUN_BACKWARD.co_varnames[0]][0]


def _backwards_of(error: BaseException | None) -> Iterator[FrameType]:
    """The frames of the backwards that the exception has passed through."""
    traceback = None if error is None else error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is _RUN_BACKWARD:
            yield traceback.tb_frame
        traceback = traceback.tb_next
