"""When a rank dumps what it is at, as files in a folder, because a job hangs or has failed. What
the files hold is in dump_files.py.

The environment variable FASTCOMM_DUMP names the folder. Then a rank writes there when its
communicator fails, when it gets SIGUSR2, and when another rank asks: by a file, as the one that is
asked may be stuck where no signal handler of Python's runs, or on another host. A rank whose
communicator has failed asks the others: the late one shows then where it is late.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from fastcomm.comm.deadline import Deadline
from fastcomm.comm.lifetime import call_on_failure, n_failure_calls
from fastcomm.errors import FastcommError, TimeoutError
from fastcomm.postmortem.dump_files import write
from fastcomm.postmortem.flight_recorder import FlightRecorder, living

VARIABLE = "FASTCOMM_DUMP"
# Files in the folder. Whoever touches one asks all ranks for a dump: a person, or a rank whose
# communicator has failed.
ASK, FAILED = "ask", "failed"
LOOK_S = 0.5  # how often a rank looks whether it is asked
ANSWER_S = 3.0  # how long a rank that has timed out keeps its process for the others to answer
# How long a dump of a failure stays, whatever other ranks or this one's own later failures ask for.
SETTLED_S = 60.0

_writing = threading.RLock()  # held by whoever writes; a signal handler may do so in between
_done: list[None] = []  # an element for each call of _dump_failure that has ended
_settled_until = 0.0  # by time.monotonic()
_folder: Path | None = None  # what FASTCOMM_DUMP named when watch() began
_watcher = 0  # the process in which that was


def dump(folder: str | os.PathLike[str]) -> Path:
    """Writes what this rank's communicators have done last, and where its threads stand, to a file
    in the folder, which is made if need be; returns its path. Local: no rank waits for another, and
    any thread may call it at any time. A second dump of this process replaces the first.

    `python -m fastcomm diagnose FOLDER` says what the files of all ranks show.

    Raises RuntimeError if this process has no communicator, OSError if the folder cannot be
    written.
    """
    return _write(Path(folder), "asked for", living())


def watch() -> None:
    """Called by init(): lets FASTCOMM_DUMP take effect, once in a process."""
    global _folder, _watcher, _writing, _settled_until
    named = os.environ.get(VARIABLE)
    if not named or _watcher == os.getpid():
        return
    folder = Path(named).absolute()  # the script may go elsewhere
    _watcher, _folder = os.getpid(), folder
    _writing, _settled_until = threading.RLock(), 0.0  # not those of a parent
    _done[:] = [None] * n_failure_calls()
    call_on_failure(_dump_failure, living)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, lambda *_: _attempt(folder, "SIGUSR2", living()))
    threading.Thread(target=_look, args=(folder,), name="fastcomm dump", daemon=True).start()


def _look(folder: Path) -> None:
    asked, failed = _touched(folder / ASK), _touched(folder / FAILED)
    while True:
        time.sleep(LOOK_S)
        before, asked = asked, _touched(folder / ASK)
        if asked > before:
            _attempt(folder, "asked", living())
        before, failed = failed, _touched(folder / FAILED)
        if failed > before and not _is_settled():
            _settle()
            _attempt(folder, "another rank's communicator has failed", living())


def _touched(path: Path) -> int:
    """When, in ns; 0: never."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def ask(folder: Path, name: str = ASK) -> None:
    """Asks all living ranks for a dump. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()


def _is_settled() -> bool:
    return time.monotonic() < _settled_until


def _settle() -> None:
    """What is dumped now tells most of a failure."""
    global _settled_until
    _settled_until = time.monotonic() + SETTLED_S


def _dump_failure(failure: FastcommError, recorders: list[FlightRecorder]) -> None:
    """A communicator has failed: dumps, and lets the other ranks dump. On a thread of its own."""
    folder = _folder
    try:
        # FastcommError itself is what close() and abort() leave
        is_wanted = type(failure) is not FastcommError and not _is_settled()
        if folder is not None and _watcher == os.getpid() and is_wanted:
            _settle()
            if _attempt(folder, f"{type(failure).__name__}: {failure}", recorders) is not None:
                ask(folder, FAILED)
                if isinstance(failure, TimeoutError):  # else one is lost, and will not answer
                    _await_others(folder, recorders)
    except OSError as error:
        _complain(f"{folder}: {error}")
    finally:
        _done.append(None)


def await_dumps() -> None:
    """Called as the process ends: lets dumps come to their end. The launcher may end all ranks as
    soon as this one ends.
    """
    if _folder is not None and _watcher == os.getpid():
        deadline = Deadline(ANSWER_S + 1)
        while len(_done) < n_failure_calls() and not deadline.is_over():
            time.sleep(0.02)


def _await_others(folder: Path, recorders: list[FlightRecorder]) -> None:
    wanted = {f"_{pid}.json" for recorder in recorders for pid in recorder.pids}
    deadline = Deadline(ANSWER_S)
    while not deadline.is_over():
        there = {path.name for path in folder.glob("fastcomm_rank_*.json")}
        if all(any(name.endswith(end) for name in there) for end in wanted):
            return
        time.sleep(0.05)


def _attempt(folder: Path, why: str, recorders: list[FlightRecorder]) -> Path | None:
    try:
        return _write(folder, why, recorders)
    except Exception as error:  # in a signal handler, where nobody expects one
        _complain(f"{folder}: {error}")
        return None


def _complain(what: str) -> None:
    os.write(2, f"fastcomm: no dump in {what}\n".encode())  # as print() may be under way


def _write(folder: Path, why: str, recorders: list[FlightRecorder]) -> Path:
    with _writing:
        return write(folder, why, recorders)
