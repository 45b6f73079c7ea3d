"""Dumps: a rank writes what it is at to a file in a folder, because a job hangs or has failed: the
newest collectives of its communicators, and where its threads stand. diagnosis.py reads the files
of all ranks.

The environment variable FASTCOMM_DUMP names the folder. Then a rank writes there when its
communicator fails, when it gets SIGUSR2, and when another rank asks: by a file, as the one that is
asked may be stuck where no signal handler of Python's runs, or on another host. A rank whose
communicator has failed asks the others: the late one shows then where it is late.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastcomm.comm.deadline import Deadline
from fastcomm.comm.standing import call_on_failure, n_failure_calls
from fastcomm.comm.words import called
from fastcomm.errors import FastcommError, TimeoutError
from fastcomm.postmortem.flight_recorder import Entry, FlightRecorder, living
from fastcomm.postmortem.whereabouts import stack_of

VARIABLE = "FASTCOMM_DUMP"
# Files in the folder. Whoever touches one asks all ranks for a dump: a person, or a rank whose
# communicator has failed.
ASK, FAILED = "ask", "failed"
LOOK_S = 0.5  # how often a rank looks whether it is asked
ANSWER_S = 3.0  # how long a rank that has timed out keeps its process for the others to answer
# How long a dump of a failure stays, whatever other ranks or this one's own later failures ask for.
SETTLED_S = 60.0
# Errors that end a communicator, and with it what other ranks may still be waiting for.
_CUT_SHORT = ("FastcommError", "NcclError", "PeerLostError", "TimeoutError")

_done: list[None] = []  # an element for each call of _dump_failure that has ended
_quiet_until = 0.0  # by time.monotonic()
_folder: Path | None = None  # what FASTCOMM_DUMP named when watch() began
_watcher = 0  # the process in which that was


def dump(folder: str | os.PathLike[str]) -> Path:
    """Writes what this rank's communicators did last, and where its threads stand, to a file in the
    folder, and returns its path. Creates the folder. Any thread may call it at any time; no rank
    waits for another. A second dump of this process replaces the first.

    `python -m fastcomm diagnose FOLDER` shows what the files of all ranks say.

    Raises RuntimeError if this process has no communicator, OSError if the folder cannot be
    written.
    """
    return _write(Path(folder), "asked for", living())


def watch() -> None:
    """Called by init(): lets FASTCOMM_DUMP take effect, once in a process."""
    global _folder, _watcher, _quiet_until
    named = os.environ.get(VARIABLE)
    if not named or _watcher == os.getpid():
        return
    folder = Path(named).absolute()  # the script may go elsewhere
    _watcher, _folder = os.getpid(), folder
    _quiet_until = 0.0  # not that of a parent
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
        if failed > before and not _is_quiet():
            _be_quiet()
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


def _is_quiet() -> bool:
    return time.monotonic() < _quiet_until


def _be_quiet() -> None:
    """What is dumped now tells most of a failure."""
    global _quiet_until
    _quiet_until = time.monotonic() + SETTLED_S


def _dump_failure(failure: FastcommError, recorders: list[FlightRecorder]) -> None:
    """A communicator has failed: dumps, and lets the other ranks dump. On a thread of its own."""
    folder = _folder
    try:
        # FastcommError itself is what close() and abort() leave
        is_wanted = type(failure) is not FastcommError and not _is_quiet()
        if folder is not None and _watcher == os.getpid() and is_wanted:
            _be_quiet()
            if _attempt(folder, f"{type(failure).__name__}: {failure}", recorders) is not None:
                ask(folder, FAILED)
                if isinstance(failure, TimeoutError):  # else one is lost, and will not answer
                    _await_others(folder, recorders)
    except OSError as error:
        _complain(f"{folder}: {error}")
    finally:
        _done.append(None)


def await_dumps() -> None:
    """Lets dumps come to their end, before the launcher may see that this process has ended."""
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


# ---- what a file holds --------------------------------------------------------------------------


def _write(folder: Path, why: str, recorders: list[FlightRecorder]) -> Path:
    """Writes this process's file, in place of an earlier one. Raises RuntimeError or OSError."""
    if not recorders:
        raise RuntimeError("this process has no communicator")
    widest = max(recorders, key=lambda recorder: len(recorder.pids))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fastcomm_rank_{widest.rank}_{os.getpid()}.json"
    content = {
        "version": 1,
        "rank": widest.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time_ns": time.time_ns(),
        "why": why,
        "threads": _threads(),
        "communicators": [_as_dict(recorder) for recorder in recorders],
    }
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".", delete=False) as beside:
        json.dump(content, beside, indent=1)
    os.replace(beside.name, path)  # whoever reads it meanwhile finds one of them, whole
    return path


def _threads() -> dict[str, list[str]]:
    """Where each thread stands, the innermost call last; the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    found = {}
    for ident, frame in frames:
        if ident == threading.get_ident() and ident != main:
            continue  # this dump's
        name = f"{names.get(ident, 'thread')} ({ident})" if ident != main else "MainThread"
        found[name] = stack_of(frame)
    return found


def _as_dict(recorder: FlightRecorder) -> dict[str, Any]:
    channel = recorder.channel
    return {
        "backend": recorder.backend,
        "rank": recorder.rank if channel is None else channel[recorder.rank],
        "pids": recorder.pids,
        "channel": channel,
        "names": {str(label): names for label, names in recorder.names.items()},
        "activities": {name: one.in_words() for name, one in list(recorder.activities.items())},
        "entries": [
            {
                "epoch": entry.epoch,
                "number": number,
                "what": in_words(entry, is_message=channel is not None),
                "kind": entry.kind if channel is None else "message",
                "label": entry.label,
                "posted_ns": entry.posted_ns,
                "started_ns": entry.started_ns,
                "ended_ns": entry.ended_ns,
                "error": entry.error,
                "is_over": is_over,
            }
            for number, entry, is_over in _numbered(recorder)
            if channel is None or entry.kind == "broadcast"
        ],
    }


def _numbered(recorder: FlightRecorder) -> list[tuple[int, Entry, bool]]:
    """Its entries: the number, guessed where no thread has begun one; and whether it is over."""
    entries = recorder.entries()
    numbers: list[int] = []
    for entry in entries:
        is_guessed = not entry.number and not _has_ended(entry)
        numbers.append(numbers[-1] + 1 if is_guessed and numbers else entry.number)
    return list(zip(numbers, entries, over_of(entries, recorder.epoch), strict=True))


def in_words(entry: Entry, *, is_message: bool = False) -> str:
    """As error messages call the collective. is_message: a broadcast of a channel."""
    if entry.dtype is None:
        return entry.kind
    if is_message:  # the ranks of a channel are numbered otherwise
        return called("message", entry.numel, entry.dtype).words
    return called(
        *(entry.kind, entry.numel, entry.dtype),
        op=entry.op,
        root=entry.root,
        label=entry.label,
        fingerprint=entry.fingerprint,
    ).words


def over_of(entries: Sequence[Entry], epoch: int) -> list[bool]:
    """Which entries of a communicator are over: not what its failure has cut short. On a GPU most
    ends go unobserved: what comes before one of its lane that is over is over, too, and so is all
    from before the ranks have met anew.
    """
    newest_ended: dict[int, tuple[int, int]] = {}
    for entry in entries:
        if _has_ended(entry) and entry.lane >= 0:
            newest = newest_ended.get(entry.lane, (0, 0))
            newest_ended[entry.lane] = max(newest, _position(entry))
    return [
        _has_ended(entry)
        or entry.epoch < epoch
        or (entry.number > 0 and _position(entry) <= newest_ended.get(entry.lane, (0, 0)))
        for entry in entries
    ]


def _has_ended(entry: Entry) -> bool:
    return bool(entry.ended_ns) and entry.error not in _CUT_SHORT


def _position(entry: Entry) -> tuple[int, int]:
    return entry.epoch, entry.number
