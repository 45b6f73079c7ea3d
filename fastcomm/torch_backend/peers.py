"""Peers: the processes of a group's other ranks on this host. Finds those that have ended.

Torch's engines say of a lost rank only that a connection broke. The kernel knows which process has
ended. Nothing is watched: a look costs a few microseconds for each process.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable, Mapping

_DYING_S = 0.3  # a process that is killed closes its connections a little before it counts as ended


class Peers:
    """The processes of this host's ranks. pids: by rank, without this process's own."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)

    def ended(self, ranks: Iterable[int] | None = None) -> dict[int, int]:
        """Which of `ranks` (None: all) have ended: their pids, by rank."""
        wanted = self._pids if ranks is None else set(ranks) & self._pids.keys()
        return {rank: self._pids[rank] for rank in sorted(wanted) if _has_ended(self._pids[rank])}

    def ended_soon(self) -> dict[int, int]:
        """As `ended`; waits a moment for the first one."""
        deadline = time.monotonic() + _DYING_S
        while not (ended := self.ended()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return ended


def _has_ended(pid: int) -> bool:
    """Also true of a process whose parent has not asked for its exit status yet."""
    try:
        lifeline = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready = select.poll()
        ready.register(lifeline, select.POLLIN)
        return bool(ready.poll(0))
    finally:
        os.close(lifeline)
