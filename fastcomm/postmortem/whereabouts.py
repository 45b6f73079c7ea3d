"""Where this process stands: what its reducers are doing, and where its main thread is. Ranks that
have waited in vain for this one put it into their errors; dump.py writes it into dumps.

A process of this host asks through a socket. A thread answers, which sleeps until then: the rank
that is asked may be stuck where no signal handler of Python's runs. It tells processes of the same
user only. Ranks of other hosts ask by a note instead: see watchdog.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType

from fastcomm.comm.who import Process, stat_of
from fastcomm.comm.words import MOST_ASKED
from fastcomm.postmortem.flight_recorder import living

N_FRAMES = 12  # of each thread, the innermost
MOST_COLUMNS = 160  # of a line of source
MOST_BYTES = 8192  # of an answer
PATIENCE_S = 1.0  # for one answer

_answering = 0  # the process whose thread answers
_listener: socket.socket | None = None  # of that thread


def stack_of(frame: FrameType) -> list[str]:
    """A line for each of its calls, the innermost last."""
    return [
        f'File "{one.filename}", line {one.lineno}, in {one.name}'
        + (f": {textwrap.shorten(one.line, MOST_COLUMNS)}" if one.line else "")
        for one in traceback.extract_stack(frame)[-N_FRAMES:]
    ]


def whereabouts() -> str:
    """Say in words where this process stands. Any thread may ask."""
    activities = [ref for recorder in living() for ref in recorder.activities.valuerefs()]
    doing = [f"{ref.key} {one.in_words()}" for ref in activities if (one := ref()) is not None]
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [] if frame is None else stack_of(frame)
    words = "; ".join([*doing, "its main thread stands at"])
    return "\n".join([words, *(f"    {line}" for line in stack)])


def answer_questions() -> None:
    """Called by init(): from now on a thread tells who asks where this process stands."""
    global _answering, _listener
    if _answering == os.getpid():
        return
    _answering = os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(_answering))
        listener.listen()
    except OSError:  # the name is taken, or there are no such sockets here: nobody will be told
        listener.close()
        return
    _listener = listener
    threading.Thread(target=_answer, args=(listener,), name="fastcomm answers", daemon=True).start()


def _leave_to_parent() -> None:
    """In a forked child: only the parent's end may keep its name alive."""
    if _listener is not None:
        _listener.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _answer(listener: socket.socket) -> None:
    own = listener.getsockname()
    while True:
        try:
            if listener.getsockname() != own:
                return  # somebody has closed all descriptors, and this is another's socket now
            asker, _ = listener.accept()
            with asker:
                if _peer_of(asker)[1] == os.geteuid():
                    asker.settimeout(PATIENCE_S)
                    asker.sendall(whereabouts().encode(errors="replace")[:MOST_BYTES])
        except Exception:  # the asker is gone, or no descriptor is left, or threads come and go
            time.sleep(0.1)


def whereabouts_of(processes: Sequence[Process]) -> str:
    """Where these processes of this host stand, a paragraph for each that answers."""
    found = [(one.rank, ask(one.pid)) for one in processes[:MOST_ASKED]]
    return "".join(f"\nrank {rank}: {answer}" for rank, answer in found if answer)


def ask(pid: int) -> str:
    """Where that process of this host stands, in words; empty where nobody can tell."""
    try:
        with socket.socket(socket.AF_UNIX) as asker:
            asker.settimeout(PATIENCE_S)
            asker.connect(_address(pid))
            if _peer_of(asker) != (pid, os.geteuid()):  # a container beside may have this pid, too
                return ""
            with asker.makefile("rb") as answer:
                return answer.read(MOST_BYTES).decode(errors="replace")
    except TimeoutError:
        with contextlib.suppress(OSError):  # there is no such process
            if stat_of(pid)[0] in "Tt":
                return "it is stopped, by SIGSTOP or a debugger"
            return "no answer: it is in compiled code that holds Python's lock, or has no core"
    except OSError:
        pass
    return ""


def _address(pid: int) -> str:
    """In the abstract namespace, where no file is left behind."""
    return f"\0fastcomm {pid}"


def _peer_of(connected: socket.socket) -> tuple[int, int]:
    """The pid, as this process sees it, and the user at the other end."""
    size = struct.calcsize("3i")
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user
