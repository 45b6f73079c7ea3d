"""Puts off what signal handlers do, for what all ranks must do to its end, or none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def putting_off_signals() -> Iterator[None]:
    """The first signal that Python handles in the block is handled after it, the second one at
    once. Handlers run in the main thread only, so elsewhere there is nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {}
    waiting: list[tuple[int, FrameType | None]] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        if waiting:
            handlers[number](number, frame)
        else:
            waiting.append((number, frame))

    def take_back() -> None:
        for one, handler in handlers.items():
            signal.signal(one, handler)

    try:
        for one in signal.valid_signals():
            handler = signal.getsignal(one)
            if callable(handler):  # else it is not Python's
                handlers[one] = handler
                signal.signal(one, put_off)
        yield
    except BaseException:
        take_back()
        for number, frame in waiting:
            with contextlib.suppress(BaseException):  # what it raises would hide what is raised
                handlers[number](number, frame)
        raise
    take_back()
    for number, frame in waiting:
        handlers[number](number, frame)
