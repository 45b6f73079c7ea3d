"""Diagnosis: what the dumps of all ranks say about a job that hung or failed. Which rank did not
come, to what, and where it stood; see dump.py for the files.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fastcomm.comm import forms
from fastcomm.comm.who import Process
from fastcomm.postmortem import dump

_NS = range(2**62)
# The form of a dump: see dump.py, which writes more than is read here.
_ENTRY = {
    "epoch": forms.NUMBER,
    "number": forms.NUMBER,
    "what": str,
    "kind": str,
    "label": forms.NUMBER,
    "posted_ns": _NS,
    "ended_ns": _NS,
    "is_over": bool,
}
_COMMUNICATOR = {
    "backend": str,
    "rank": forms.NUMBER,
    "pids": [forms.PID],
    "channel": {None, (forms.NUMBER, forms.NUMBER)},
    "names": {str: str},
    "activities": {str: str},
    "entries": [_ENTRY],
}
_DUMP = {
    "rank": forms.NUMBER,
    "pid": forms.PID,
    "host": str,
    "time_ns": _NS,
    "why": str,
    "threads": {str: [str]},
    "communicators": [_COMMUNICATOR],
}
APART_S = 600.0  # the dumps of one job are not further apart


@dataclass
class Rank:
    """One rank of one communicator, as its dump shows it. entries: of its FlightRecorder, as are
    names and activities. idle: what to say of it where there are none.
    """

    rank: int
    file: dict[str, Any]
    entries: list[dict[str, Any]]
    names: dict[str, str]
    activities: dict[str, str] = field(default_factory=dict)
    idle: str = "it has called no collective"

    def waits_for(self, over: Container[tuple[int, int]]) -> dict[str, Any] | None:
        """The oldest collective that is over neither here nor elsewhere. over: positions."""
        waiting = (
            one for one in self.entries if not one["is_over"] and position_of(one) not in over
        )
        return next(waiting, None)

    def in_words(self) -> str:
        return Process(self.rank, self.file["pid"], self.file["host"]).in_words()

    def has_come_to(self, position: tuple[int, int]) -> bool:
        return any(position_of(entry) >= position for entry in self.entries)

    def named(self, entry: dict[str, Any]) -> str:
        """The collective in words, with the parameters of a bucket; or the message."""
        if entry["kind"] == "message":
            return f"a {entry['what']}"
        names = self.names.get(str(entry["label"]))
        number = entry["number"] or "still without a number"
        return f"collective number {number}, {entry['what']}" + (f" of {names}" if names else "")


@dataclass
class Group:
    """A communicator: the ranks that have the same processes, in the same order. channel: of a
    channel, from which rank to which its messages go; these are its ranks.
    """

    backend: str
    n_ranks: int
    ranks: list[Rank] = field(default_factory=list)
    channel: tuple[int, int] | None = None

    def in_words(self) -> str:
        if self.channel is None:
            return f"Communicator {self.backend!r} of {self.n_ranks} ranks:"
        return f"Messages from rank {self.channel[0]} to rank {self.channel[1]}:"

    @property
    def absent(self) -> list[int]:
        """The ranks that have left no dump."""
        return sorted(set(self.channel or range(self.n_ranks)) - {one.rank for one in self.ranks})


def diagnose(folder: Path) -> list[str]:
    """The verdict on the dumps in the folder, as lines for people. Raises FileNotFoundError where
    there are none, ValueError for a file that is not a dump.
    """
    files = read(folder)
    lines = [f"{len(files)} dump{'s' if len(files) > 1 else ''} in {folder}"]
    reasons: dict[str, list[int]] = {}
    for file in files:
        reasons.setdefault(file["why"], []).append(file["rank"])
    for why, ranks in reasons.items():
        lines.append(f"  {_ranks_in_words(ranks)}: {why}")
    for group in groups_of(files):
        if group.channel is None or any(one.waits_for(()) for one in group.ranks):
            lines += ["", *verdict(group)]
    return lines


def read(folder: Path) -> list[dict[str, Any]]:
    """The dumps of the newest job in the folder, by rank."""
    files: list[dict[str, Any]] = []
    for path in folder.glob("fastcomm_rank_*.json"):
        files.append(forms.read(path.read_bytes(), _DUMP, str(path), ValueError))
    if not files:
        raise FileNotFoundError(
            f"no dump of any rank in {folder}. If one has failed, set {dump.VARIABLE}={folder} for "
            "all ranks before they start, or call fastcomm.dump()"
        )
    newest = max(file["time_ns"] for file in files)
    of_one_job = [file for file in files if newest - file["time_ns"] < APART_S * 1e9]
    return sorted(of_one_job, key=lambda file: int(file["rank"]))


def groups_of(files: Sequence[dict[str, Any]]) -> list[Group]:
    """The communicators and their channels, the widest first. Those of the same processes and
    backend are told apart by the order in which each rank has made them.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    for file in files:
        seen: dict[tuple[Any, ...], int] = {}
        for one in file["communicators"]:
            pids = tuple(one["pids"])
            channel = None if one["channel"] is None else tuple(one["channel"])
            alike = channel or one["backend"], pids
            seen[alike] = seen.get(alike, 0) + 1
            group = groups.setdefault(
                (seen[alike], *alike), Group(one["backend"], len(pids), channel=channel)
            )
            group.ranks.append(
                Rank(one["rank"], file, one["entries"], one["names"], one["activities"])
            )
    for (_, _, pids), group in groups.items():
        group.ranks += _other_end_of(group, pids, files)
    return sorted(groups.values(), key=lambda group: -group.n_ranks)


def _other_end_of(
    group: Group, pids: Sequence[int], files: Sequence[dict[str, Any]]
) -> Iterator[Rank]:
    """The rank that has left a dump, and has not begun this channel."""
    for rank, pid, call in zip(group.channel or (), pids, ("send()", "recv()"), strict=False):
        of_it = [file for file in files if file["pid"] == pid]
        if rank in group.absent and len(of_it) == 1:  # pids are of one host
            yield Rank(rank, of_it[0], [], {}, idle=f"it has not called {call}")


def position_of(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["epoch"], entry["number"]


def verdict(group: Group) -> Iterator[str]:
    """Who waits for whom, and where that one stands."""
    absent = group.absent
    yield group.in_words()
    # On a GPU a rank learns late that something is over. Where one has its result, all have come to
    # it: but not to a broadcast, whose source need not wait, nor to what gathers shards, of which
    # one may be empty.
    over = {
        position_of(entry)
        for one in group.ranks
        for entry in one.entries
        if entry["is_over"] and entry["kind"] in ("all_reduce", "barrier", "message")
    }
    waiting = [one for one in group.ranks if one.waits_for(over) is not None]
    if not waiting:
        yield "  no rank that has left a dump waits in a collective"
    else:
        position = min(position_of(entry) for one in waiting if (entry := one.waits_for(over)))
        there = [one for one in waiting if one.has_come_to(position)]
        late = [one for one in group.ranks if not one.has_come_to(position)]
        for what, ranks in _calls(there, position).items():
            yield f"  {_ranks_in_words(ranks)} wait{'s' if len(ranks) == 1 else ''} for {what}"
        for one in late:
            yield from _who_is_late(one, "it" if group.channel else f"number {position[1]}")
        if not late and not absent:
            yield (
                "  all ranks have come to it: it moves slowly, or the way between them is broken"
                if len(_calls(there, position)) == 1
                else "  the ranks have called different collectives"
            )
    if absent:
        yield (
            f"  {_ranks_in_words(absent)}: no dump. Dead, stuck where no Python runs, or started "
            f"without {dump.VARIABLE}"
        )


def _calls(ranks: Sequence[Rank], position: tuple[int, int]) -> dict[str, list[int]]:
    """What the ranks wait for there, as the first of them names it, and which ranks."""
    calls: dict[str, list[int]] = {}
    names: dict[str, str] = {}  # ranks may name parameters differently
    for one in ranks:
        for entry in one.entries:
            if position_of(entry) == position and not entry["is_over"]:
                name = names.setdefault(entry["what"], one.named(entry))
                calls.setdefault(name, []).append(one.rank)
    return calls


def _who_is_late(one: Rank, where: str) -> Iterator[str]:
    newest = one.entries[-1] if one.entries else None
    yield f"  {one.in_words()} has not come to {where}"
    if newest is None:
        yield f"    {one.idle}"
    elif newest["ended_ns"]:
        ago = (one.file["time_ns"] - newest["ended_ns"]) / 1e9
        yield f"    its last was {one.named(newest)}"
        yield f"    which ended at {_clock(newest['ended_ns'])}, {ago:.1f} s before its dump"
    else:
        yield f"    its last was {one.named(newest)}, posted at {_clock(newest['posted_ns'])}"
    for name, activity in one.activities.items():
        yield f"    {name} was {activity}"
    for name, stack in list(one.file["threads"].items())[:1]:
        yield f"    {name} stood at"
        yield from (f"      {line}" for line in stack)


def _clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9).strftime("%H:%M:%S.%f")[:-3]


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
