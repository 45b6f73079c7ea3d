"""Deadlines: how long a rank waits for others, in time in which its own process runs.

A job may be stopped as a whole and go on hours later (scontrol suspend, docker pause, Ctrl-Z). No
rank was late then. No system call tells how long a process was stopped. But who waits looks at the
clock several times a second. Where two looks of this process lie further apart than COUNTED_S, it
did not run, and the rest does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fastcomm.comm.times import COUNTED_S, SLICE_S

T = TypeVar("T")

# When somebody looked last, and how much did not count until then. One object: threads and signal
# handlers replace both together.
_looked = time.monotonic(), 0.0


def running_s() -> float:
    """Seconds for which this process has run, from some moment on. For what is looked at in every
    slice of a wait: a time that nobody looks at meanwhile counts COUNTED_S at most.

    Every look counts up to COUNTED_S. So a deadline of T seconds ends after T / COUNTED_S looks at
    the latest, however late each of them comes on a machine that is overloaded.
    """
    global _looked
    before, uncounted = _looked
    now = time.monotonic()
    uncounted += max(0.0, now - before - COUNTED_S)
    _looked = now, uncounted
    return now - uncounted


class Deadline:
    """The end of a wait of so many seconds, from now on. See running_s()."""

    def __init__(self, seconds: float) -> None:
        self._end = running_s() + seconds

    def left_s(self) -> float:
        return max(0.0, self._end - running_s())

    def is_over(self) -> bool:
        return self.left_s() == 0

    def await_(self, wait: Callable[[float], T]) -> T:
        """Calls wait(seconds), which waits so long at most, until it returns what is true, or the
        deadline is over. Returns what came last.
        """
        while not (found := wait(min(SLICE_S, self.left_s()))) and not self.is_over():
            pass
        return found
