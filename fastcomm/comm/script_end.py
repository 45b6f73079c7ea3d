"""What becomes of communicators that are still open when a process comes to its end: they tell
their peers, who would see a process that is gone and not why. One that is killed tells nobody.
"""

from __future__ import annotations

import os
import sys
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

from fastcomm.comm.dump import await_dumps

_FIRST = 1000  # before the stores are closed that the ranks have met at


class Telling(Protocol):
    def tell_of_end(self, has_raised: bool) -> None:
        """Tells the peers that this rank will take part in nothing more. has_raised: an exception
        has ended its script.
        """


_open: weakref.WeakSet[Telling] = weakref.WeakSet()
_pid = 0  # of the process that will call _tell()


def tell_at_end(end: Telling) -> None:
    """`end` is one rank's end of a communicator."""
    global _pid
    _open.add(end)
    # multiprocessing's, as its forked processes skip atexit: here it comes after the handlers that
    # a script has registered, which may use the communicator still.
    if _pid != os.getpid():
        _pid = os.getpid()
        Finalize(None, _tell, exitpriority=_FIRST)


def _tell() -> None:
    has_raised = getattr(sys, "last_value", None) is not None  # and nobody has caught it
    for end in list(_open):
        end.tell_of_end(has_raised)
    await_dumps()
