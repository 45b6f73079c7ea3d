"""A signal handler that raises while this rank is known to wait in backward, and the gate behind
which another rank is held back until then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tests.support.bodies import meeting_place

TICK_S = 0.002
# A rank whose stack has not moved for so long, at two signals, waits.
STILL_S = 0.02


class Interrupted(Exception):
    """What the signal handler raises."""


def gate_of_ranks() -> Path:
    """A pipe: who opens it for reading waits for the one who opens it for writing."""
    gate = meeting_place() / "gate"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(gate)
    return gate


@contextlib.contextmanager
def interrupting(gate: Path) -> Iterator[Callable[[Tensor], Tensor]]:
    """Raises Interrupted, once, while a backward waits for its peers, having opened the gate. That
    backward is of a loss that has gone through the function this gives."""
    ticker = _Ticker(gate)
    before = signal.signal(signal.SIGALRM, ticker.tick)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield lambda loss: _Armed.apply(loss, ticker)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Ticker:
    def __init__(self, gate: Path) -> None:
        self._gate = gate
        self._is_armed = False
        self._position: tuple[tuple[int, int], ...] = ()
        self._since = 0.0

    def arm(self) -> None:
        self._is_armed = True

    def tick(self, number: int, frame: FrameType | None) -> None:
        if not self._is_armed:
            return
        position = []
        while frame is not None:
            position.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        now = time.monotonic()
        if tuple(position) != self._position:
            self._position, self._since = tuple(position), now
        elif now - self._since >= STILL_S:
            self._is_armed = False
            self._gate.write_bytes(b"")
            raise Interrupted


class _Armed(torch.autograd.Function):
    """The identity. When all nodes of its backward are through, the ticker is armed: what is left
    then is what a reducer does at the end."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, ticker: _Ticker) -> Tensor:
        ctx.ticker = ticker
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.ticker.arm)
        return gradient, None
