"""The files of a dump, one of fastcomm's and one that torch's fr_trace reads: the newest
collectives of a rank's communicators, and where its threads stand. When they are written is in
dump.py; diagnosis.py reads those of all ranks.
"""

from __future__ import annotations

import json
import os
import pickle
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


def write(folder: Path, why: str, recorders: list[FlightRecorder]) -> Path:
    """Writes this process's files, in place of those of before; returns the path of its own. Raises
    RuntimeError if there are no recorders, OSError.
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
    recorders = [recorder for recorder in recorders if recorder.channel is None]
    n_ranks = max((len(recorder.pids) for recorder in recorders), default=0)
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
