"""Peers: the processes of a group's other ranks on this host. Finds those that have ended.

When a rank is lost, torch's engines only say that a connection broke. The kernel knows which
process has ended. No thread watches: a look costs a few microseconds per process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from fastcomm.comm.deadline import Deadline
from fastcomm.launching.bootstrap import process_has_ended

_DYING_S = 0.3  # a process that is killed closes its connections a little before it counts as ended


class Peers:
    """The processes of this host's ranks. pids: by rank, without this process's own."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)

    def ended(self, ranks: Iterable[int] | None = None) -> dict[int, int]:
        """The pids of those of `ranks` (None: all) that have ended, by rank."""
        wanted = self._pids if ranks is None else set(ranks) & self._pids.keys()
        pids = {rank: self._pids[rank] for rank in sorted(wanted)}
        return {rank: pid for rank, pid in pids.items() if process_has_ended(pid)}

    def ended_soon(self) -> dict[int, int]:
        """Returns as `ended`; waits a moment for the first one."""
        deadline = Deadline(_DYING_S)
        while not (ended := self.ended()) and not deadline.is_over():
            time.sleep(0.005)
        return ended
