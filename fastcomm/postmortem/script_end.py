"""What becomes of communicators that are still open when a process comes to its end: they tell
their peers, who would see a process that is gone and not why, and end. One that is killed tells
nobody.

The interpreter ends a daemon thread that comes back from C++ after that by ending the process, with
SIGABRT. So threads that wait in torch are begun here, and come to their end before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Protocol

from fastcomm.comm.deadline import Deadline
from fastcomm.comm.times import SLICE_S
from fastcomm.postmortem.dump import await_dumps

_FIRST = 1000  # before the stores are closed that the ranks have met at
_LEAVE_S = 2.0  # how long threads have to come to their end


class Telling(Protocol):
    def tell_of_end(self, has_raised: bool) -> None:
        """Tells the peers that this rank will take part in nothing more, and refuses what is called
        afterwards. Threads of its own leave. has_raised: an exception has ended its script.
        """


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
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


def start_thread(name: str, function: Callable[..., None], *arguments: object) -> threading.Thread:
    """A daemon thread that leaves when the communicators end."""
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def _tell() -> None:
    has_raised = getattr(sys, "last_value", None) is not None  # and nobody has caught it
    with contextlib.ExitStack() as ending:  # the last comes first, whatever one of them raises
        ending.callback(_await_threads)
        ending.callback(await_dumps)
        for end in list(_open):
            ending.callback(end.tell_of_end, has_raised)


def _await_threads() -> None:
    deadline = Deadline(_LEAVE_S)
    for thread in list(_threads):
        while thread.is_alive() and not deadline.is_over():
            thread.join(min(SLICE_S, deadline.left_s()))
