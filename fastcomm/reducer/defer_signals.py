"""What all ranks do together between two rounds, or none: puts off what signal handlers do, and
tells the other ranks of an error.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError


@contextlib.contextmanager
def all_or_none(comm: Transport, stop: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Around what all ranks do together, or none. stop: called where it cannot be done."""
    with defer_signals():
        try:
            yield
        except BaseException as error:
            # The others are not to wait for this one.
            stop()
            with contextlib.suppress(FastcommError):
                comm.abandon()
            comm.standing.mark(error)
            raise


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """The first signal that Python handles in the block, whatever it is, is handled after it, the
    second one at once. Handlers run in the main thread only: elsewhere there is nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {}
    waiting: list[tuple[int, FrameType | None]] = []

    is_over = False

    def put_off(number: int, frame: FrameType | None) -> None:
        if waiting or is_over:
            handlers[number](number, frame)
        else:
            waiting.append((number, frame))

    error: BaseException | None = None
    try:
        for one in signal.valid_signals():
            handler = signal.getsignal(one)
            if callable(handler):  # else it is not Python's
                handlers[one] = handler
                signal.signal(one, put_off)
        yield
    except BaseException as raised:
        error = raised
    is_over = True  # whatever interrupts what follows, no signal is swallowed
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    finally:
        _handle(waiting, handlers, error)
    if error is not None:
        raise error


def _handle(
    waiting: list[tuple[int, FrameType | None]],
    handlers: dict[int, Any],
    error: BaseException | None,
) -> None:
    """What a handler raises comes from the error, as in GroupWork.wait."""
    for number, frame in waiting:
        try:
            handlers[number](number, frame)
        except BaseException as late:
            raise late from error
