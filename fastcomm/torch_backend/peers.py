"""Peers: the processes of a group's other ranks on this host. Finds those that have ended.

When a rank is lost, torch's engines only say that a connection broke. The kernel knows which
process has ended. No thread watches: a look costs a few microseconds per process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from fastcomm.comm.deadline import Deadline
from fastcomm.comm.who import Process
from fastcomm.launching.bootstrap import process_has_ended

_DYING_S = 0.3  # a process that is killed closes its connections a little before it counts as ended


class Peers:
    """The processes of this host's ranks, without this process's own."""

    def __init__(self, processes: Iterable[Process]) -> None:
        self._processes = tuple(processes)

    def ended(self, ranks: Collection[int] | None = None) -> list[Process]:
        """Those of `ranks` (None: all) that have ended."""
        wanted = [one for one in self._processes if ranks is None or one.rank in ranks]
        return [one for one in wanted if process_has_ended(one.pid)]

    def ended_soon(self) -> list[Process]:
        """Returns as `ended`; waits a moment for the first one."""
        deadline = Deadline(_DYING_S)
        while not (ended := self.ended()) and not deadline.is_over():
            time.sleep(0.005)
        return ended
