"""The file of a dump: the newest collectives of a rank's communicators, and where its threads
stand. When it is written is in dump.py; diagnosis.py reads those of all ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastcomm.comm.collective import name_of
from fastcomm.comm.words import called
from fastcomm.postmortem.flight_recorder import Entry, FlightRecorder
from fastcomm.postmortem.whereabouts import stack_of

# Errors that end a communicator, and with it what other ranks may still be waiting for.
_CUT_SHORT = ("FastcommError", "NcclError", "PeerLostError", "TimeoutError")


def write(folder: Path, why: str, recorders: list[FlightRecorder]) -> Path:
    """Writes this process's file, in place of that of before; returns its path. Raises RuntimeError
    if there are no recorders, OSError.
    """
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
                "what": in_words(entry) if channel is None else _message_in_words(entry),
                "kind": entry.kind if channel is None else "message",
                "op": entry.op,
                "dtype": None if entry.dtype is None else name_of(entry.dtype),
                "numel": entry.numel,
                "root": entry.root,
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
    """Its entries, each with its number, and whether it is over. Those that no thread has begun get
    the numbers that they would have had.
    """
    entries = recorder.entries()
    numbers: list[int] = []
    for entry in entries:
        is_guessed = not entry.number and not _has_ended(entry)
        numbers.append(numbers[-1] + 1 if is_guessed and numbers else entry.number)
    return list(zip(numbers, entries, over_of(entries, recorder.epoch), strict=True))


def in_words(entry: Entry) -> str:
    """As error messages call the collective."""
    if entry.dtype is None:
        return entry.kind
    return called(
        *(entry.kind, entry.numel, entry.dtype),
        op=entry.op,
        root=entry.root,
        label=entry.label,
        step=entry.step,
    ).words


def _message_in_words(entry: Entry) -> str:
    """A broadcast of a channel: the ranks of that are numbered otherwise."""
    assert entry.dtype is not None  # for the type checker
    return called("message", entry.numel, entry.dtype).words


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
