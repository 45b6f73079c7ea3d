"""What a rank was at when a job hung or failed, as files in a folder: the newest collectives of its
communicators, and where its threads stand. insight/diagnosis.py reads the folder of all ranks.

The environment variable FASTCOMM_DUMP names the folder. Then a rank writes there when its
communicator fails, when it gets SIGUSR2, and when another rank asks: by a file, as the one that is
asked may be stuck where no signal handler of Python's runs, or on another host. A rank whose
communicator has failed asks the others: the late one shows then where it is late.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastcomm.comm.collective import name_of, sentence
from fastcomm.comm.flight_recorder import Entry, FlightRecorder, living
from fastcomm.comm.lifetime import call_on_failure, n_failure_calls
from fastcomm.comm.whereabouts import stack_of
from fastcomm.errors import FastcommError, TimeoutError

VARIABLE = "FASTCOMM_DUMP"
# Files in the folder. Whoever touches one asks all ranks for a dump: a person, or a rank whose
# communicator has failed.
ASK, FAILED = "ask", "failed"
LOOK_S = 0.5  # how often a rank looks whether it is asked
ANSWER_S = 3.0  # how long a rank that has timed out keeps its process for the others to answer
# How long a dump of a failure stays, whatever other ranks or this one's own later failures ask for.
SETTLED_S = 60.0

# Names by which every torch's fr_trace knows a collective.
_IN_TORCH = {
    "all_gather_single": "_all_gather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "barrier": "all_reduce_barrier",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all_single": "all_to_all",
    "reduce": "reduce",
    # of unequal shards: of the whole, so that sizes agree
    "reduce_scatter_v": "allreduce_coalesced",
    "all_gather_v": "allreduce_coalesced",
}
_TORCH_DTYPES = {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"}

# Errors that end a communicator, and with it what other ranks may still be waiting for.
_CUT_SHORT = ("FastcommError", "NcclError", "PeerLostError", "TimeoutError")

_writing = threading.RLock()  # held by whoever writes; a signal handler may do so in between
_done: list[None] = []  # an element for each call of _dump_failure that has ended
_settled_until = 0.0  # by time.monotonic()
_folder: Path | None = None  # what FASTCOMM_DUMP named when watch() began
_watcher = 0  # the process in which that was


def dump(folder: str | os.PathLike[str]) -> Path:
    """Writes what this rank's communicators have done last, and where its threads stand, to a file
    in the folder, which is made if need be; returns its path. Local: no rank waits for another, and
    any thread may call it at any time. A second dump of this process replaces the first.

    `python -m fastcomm diagnose FOLDER` says what the files of all ranks show; torch's own fr_trace
    reads the files torch_trace_* beside them.

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
    call_on_failure(_dump_failure)
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
        deadline = time.monotonic() + ANSWER_S + 1
        while len(_done) < n_failure_calls() and time.monotonic() < deadline:
            time.sleep(0.02)


def _await_others(folder: Path, recorders: list[FlightRecorder]) -> None:
    wanted = {f"_{pid}.json" for recorder in recorders for pid in recorder.pids}
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
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
    if not recorders:
        raise RuntimeError("this process has no communicator")
    widest = max(recorders, key=lambda recorder: len(recorder.pids))
    folder.mkdir(parents=True, exist_ok=True)
    with _writing:
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
        _replace(path, json.dumps(content, indent=1).encode())
        _replace(folder / f"torch_trace_{widest.rank}", pickle.dumps(_as_torch(recorders)))
    return path


def _replace(path: Path, content: bytes) -> None:
    """Replaces the file atomically."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as beside:
        beside.write(content)
    os.replace(beside.name, path)


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
    return {
        "backend": recorder.backend,
        "rank": recorder.rank,
        "pids": recorder.pids,
        "names": {str(label): names for label, names in recorder.names.items()},
        "activities": {name: one.in_words() for name, one in list(recorder.activities.items())},
        "entries": [
            {
                "epoch": entry.epoch,
                "number": number,
                "what": in_words(entry),
                "kind": entry.kind,
                "op": entry.op,
                "dtype": None if entry.dtype is None else name_of(entry.dtype),
                "numel": entry.numel,
                "nbytes": _nbytes(entry),
                "root": entry.root,
                "label": entry.label,
                "posted_ns": entry.posted_ns,
                "started_ns": entry.started_ns,
                "ended_ns": entry.ended_ns,
                "error": entry.error,
                "is_over": is_over,
            }
            for number, entry, is_over in _numbered(recorder)
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
    return sentence(
        entry.kind,
        entry.numel,
        entry.dtype,
        op=entry.op,
        root=entry.root,
        label=entry.label,
    )


def _nbytes(entry: Entry) -> int:
    return 0 if entry.dtype is None else entry.numel * entry.dtype.itemsize


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


def _as_torch(recorders: list[FlightRecorder]) -> dict[str, Any]:
    """The communicators of all ranks in the format of torch's flight recorder, version 2.10."""
    n_ranks = max(len(recorder.pids) for recorder in recorders)
    of_all = [recorder for recorder in recorders if len(recorder.pids) == n_ranks]
    entries: list[dict[str, Any]] = []
    groups: dict[str, dict[str, str]] = {}
    for i, recorder in enumerate(of_all):
        name = str(i), f"fastcomm {recorder.backend}"
        groups[name[0]] = {
            "name": name[0],
            "desc": name[1],
            "ranks": str(list(range(n_ranks))),
        }
        for number, entry, is_over in _numbered(recorder):
            if entry.kind in _IN_TORCH:
                entries.append(
                    {"record_id": len(entries), "pg_id": i, "process_group": name}
                    | _entry_as_torch(number, entry, is_over, n_ranks)
                )
    return {"version": "2.10", "entries": entries, "pg_config": groups, "pg_status": {}}


def _entry_as_torch(number: int, entry: Entry, is_over: bool, n_ranks: int) -> dict[str, Any]:
    kind = _IN_TORCH[entry.kind]
    source, target = entry.numel, entry.numel
    if kind == "_all_gather_base":
        target *= n_ranks
    elif kind == "_reduce_scatter_base":
        target //= n_ranks
    name = "" if entry.dtype is None else name_of(entry.dtype)
    dtype = [_TORCH_DTYPES.get(name, name.capitalize())]
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{kind}",  # whatever it was: older ones know no other name
        "time_created_ns": entry.posted_ns,
        "time_discovered_started_ns": entry.started_ns or None,
        "time_discovered_completed_ns": entry.ended_ns or None,
        "input_sizes": [[source]],
        "input_dtypes": dtype,
        "output_sizes": [[target]],
        "output_dtypes": dtype,
        "state": "completed" if is_over else "started" if entry.started_ns else "scheduled",
        "retired": is_over,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [],
    }
