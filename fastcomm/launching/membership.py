"""Membership: which processes a communicator has, and how those that are left of one meet anew.

They meet at the store where they have met first, and each meeting has a number there. Who comes
writes down who it is. The first that does so leads: as soon as every rank of the old communicator
has come or is known to be lost, it writes down who takes part, and in which order. Processes that
wait in init() meanwhile take part, too. Where the leader, or another that takes part, is lost
before all are connected, the rest hold the next meeting. So does a rank that hears of it later,
whose communicator seemed to be made: its number is the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, PeerLostError, TimeoutError
from fastcomm.launching.bootstrap import (
    Caller,
    MeetingPoint,
    StoreBootstrap,
    TakenIn,
    host_identity,
    own_connection,
)

_log = logging.getLogger("fastcomm")
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02
_GRACE_S = 5.0  # how much longer than the leader the others wait
_MOST_TIMES = 3  # how often the timeout may pass, while ranks are lost that meet
_CALLER = Caller("rebuild()", "a lost rank may not be noticed at once: call rebuild() again")


class Member(NamedTuple):
    """A process that takes part in a meeting.

    slot: the rank that it was started as, which it keeps.
    before: its rank in the communicator before; None: it was in none.
    """

    slot: int
    before: int | None
    pid: int
    host: str


class Meeting(NamedTuple):
    """What the leader writes down: all that a process needs to take part.

    prefix: of the keys in the store. backend: as init() takes it. n_slots: how many ranks were
    started at first. n_before: how many ranks the communicator before had.
    """

    prefix: str
    number: int
    backend: str
    n_slots: int
    n_before: int
    members: list[Member]

    @staticmethod
    def read(note: Any) -> Meeting:
        meeting = Meeting(*note)
        return meeting._replace(members=[Member(*member) for member in meeting.members])

    def rank_of(self, slot: int) -> int | None:
        """The rank of the process in the new communicator; None: it takes no part."""
        slots = [member.slot for member in self.members]
        return slots.index(slot) if slot in slots else None

    def in_words(self) -> str:
        came = [rank for rank, one in enumerate(self.members) if one.before is None]
        stayed = {one.before: rank for rank, one in enumerate(self.members)}
        gone = [rank for rank in range(self.n_before) if rank not in stayed]
        words = [f"{len(self.members)} in place of {self.n_before}"]
        words += [f"rank {rank} has left" for rank in gone]
        words += [
            f"rank {before} is rank {rank} now"
            for before, rank in stayed.items()
            if before is not None and before != rank
        ]
        words += [f"rank {rank} has come" for rank in came]
        return "; ".join(words)


# Makes a communicator over a backend, once ranks have met. Returns the ranks of this host, too.
Connect = Callable[[StoreBootstrap, str], tuple[Transport, Sequence[int]]]


class Membership:
    """Which processes the ranks of a communicator are.

    came_anew: this rank was not in the communicator before; None: there was none before.
    """

    def __init__(self, point: MeetingPoint, connect: Connect, meeting: Meeting, slot: int) -> None:
        """slot: this process's."""
        self._point, self._connect, self._meeting, self._slot = point, connect, meeting, slot
        self._successor: Transport | None = None
        rank = meeting.rank_of(slot)
        assert rank is not None  # for the type checker
        is_first = meeting.number == 0
        self.came_anew = None if is_first else meeting.members[rank].before is None

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this host."""
        here = host_identity()
        return [rank for rank, one in enumerate(self._meeting.members) if one.host == here]

    @property
    def newest(self) -> Transport | None:
        """The communicator that the ranks have now that have met anew; None: they have not."""
        if self._successor is None:
            return None
        newest: Transport | None = self._successor.membership.newest
        return self._successor if newest is None else newest

    # -- meeting anew ------------------------------------------------------------------------------

    def rebuild(self, comm: Transport, timeout: timedelta) -> Transport:
        """See Communicator.rebuild."""
        newest = self.newest
        if newest is not None and newest.failure is None:
            return newest
        if newest is not None:
            membership: Membership = newest.membership
            return membership.rebuild(newest, timeout)
        self._successor = self._meet_anew(comm, timeout)
        comm.close()
        return self._successor

    def _meet_anew(self, comm: Transport, timeout: timedelta) -> Transport:
        point, number = self._point, self._meeting.number
        until = time.monotonic() + _MOST_TIMES * timeout.total_seconds()
        while True:
            try:
                number = self._next_number(number)
                meeting = self._hold(comm, number, timeout)
                if meeting is not None:
                    if meeting.rank_of(self._slot) is None:  # it came too late
                        again = point.bootstrap(self._slot, meeting.n_slots, timeout)
                        return arrive(again, self._connect, meeting.backend, timeout)
                    return join(point, self._connect, meeting, self._slot, timeout)
                trouble: Exception | None = None
            except FastcommError as error:  # another was lost meanwhile
                trouble = error
            except RuntimeError as error:  # of the store, and with it is gone what was written
                trouble = error
                point.reopen(timeout)
                number -= 1
            if time.monotonic() > until:
                raise TimeoutError(
                    f"rank {comm.rank}: the ranks that are left have tried to meet anew for "
                    f"{_MOST_TIMES * timeout.total_seconds():g} s, and others were lost meanwhile "
                    f"each time; the last: {trouble or 'the one that led'}"
                ) from trouble

    def _next_number(self, after: int) -> int:
        """The number of the meeting that is held now, or that this rank is the first to come to."""
        store = self._point.store
        counter = f"{self._meeting.prefix}/n_rebuilt"
        number = int(store.add(counter, 0))
        while number <= after:
            number = int(store.compare_set(counter, str(number), str(after + 1)))
        return number

    def _hold(self, comm: Transport, number: int, timeout: timedelta) -> Meeting | None:
        """Takes part in a meeting until it is known who does. None: the next one is held."""
        store = PrefixStore(f"{self._meeting.prefix}/{number}", self._point.store)
        me = Member(self._slot, comm.rank, os.getpid(), host_identity())
        store.set(f"came/{self._slot}", json.dumps(me))
        leader = int(store.compare_set("leader", "", str(self._slot)))
        others = _Others(comm, self._meeting.members, self._slot)
        until = time.monotonic() + timeout.total_seconds()
        pause = _PAUSE_S
        while not store.check(["members"]):
            if self._next_number(number - 1) != number:
                return None
            others.look(store)
            if leader == self._slot:
                if others.are_known or time.monotonic() > until:
                    self._decide(store, number)
                    break
            elif leader in others.lost or time.monotonic() > until + _GRACE_S:
                store.compare_set("members", "", json.dumps(None))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        note = json.loads(store.get("members"))
        return None if note is None else Meeting.read(note)

    def _decide(self, store: Any, number: int) -> None:
        """Writes down who takes part: those who came, and who waits for a first meeting."""
        point, n_slots = self._point, self._meeting.n_slots
        came = [
            Member(*json.loads(store.get(f"came/{slot}")))
            for slot in range(n_slots)
            if store.check([f"came/{slot}"])
        ]
        taken = {member.slot for member in came}
        waiting = point.waiting([slot for slot in range(n_slots) if slot not in taken])
        members = came + [Member(slot, None, *process) for slot, process in waiting.items()]
        meeting = Meeting(
            *(self._meeting.prefix, number, self._meeting.backend, n_slots),
            *(len(self._meeting.members), sorted(members)),
        )
        written = store.compare_set("members", "", json.dumps(meeting))
        if waiting and json.loads(written) is not None:
            point.take_in(meeting)

    def is_awaited(self) -> bool:
        """Whether a process waits to be taken in."""
        present = {member.slot for member in self._meeting.members}
        others = [slot for slot in range(self._meeting.n_slots) if slot not in present]
        with contextlib.suppress(RuntimeError):  # the store is gone
            return bool(self._point.waiting(others))
        return False


class _Others:
    """The other ranks of the old communicator, as far as this one knows in a meeting: those that
    have come, and those that are lost.
    """

    def __init__(self, comm: Transport, members: Sequence[Member], own_slot: int) -> None:
        here = host_identity()
        self._unreachable = {members[rank].slot for rank in getattr(comm.failure, "ranks", ())}
        # By slot; 0 where it cannot be watched from here.
        self._pids = {
            member.slot: comm.pids[rank] if member.host == here else 0
            for rank, member in enumerate(members)
            if member.slot != own_slot
        }
        self._came: set[int] = set()
        self.lost: set[int] = set()

    def look(self, store: Any) -> None:
        """Notes who has come or is lost meanwhile, and tells the others of the latter."""
        for slot in self._pids.keys() - self.lost:
            if self._pids[slot] and _has_ended(self._pids[slot]):
                self._lose(store, slot)
            elif store.check([f"lost/{slot}"]):
                self.lost.add(slot)
            elif slot in self._came or store.check([f"came/{slot}"]):
                self._came.add(slot)
            elif slot in self._unreachable:
                self._lose(store, slot)

    def _lose(self, store: Any, slot: int) -> None:
        store.set(f"lost/{slot}", "")
        self.lost.add(slot)

    @property
    def are_known(self) -> bool:
        return self._pids.keys() == self._came | self.lost


def arrive(
    bootstrap: StoreBootstrap, connect: Connect, backend: str, timeout: timedelta
) -> Transport:
    """Makes the communicator of ranks that meet for the first time; or, if these have met before
    and go on without a lost rank, takes this process's part in theirs. Raises FastcommError.
    """
    slot, n_slots, point = bootstrap.rank, bootstrap.world_size, bootstrap.point
    assert point is not None  # for the type checker
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            comm, neighbours = connect(bootstrap, backend)
        except TakenIn as taken:
            try:
                return join(point, connect, Meeting.read(taken.note), slot, timeout)
            except FastcommError:  # another was lost meanwhile; the rest meet without this one
                if time.monotonic() > until:
                    raise
            bootstrap = point.bootstrap(slot, n_slots, timeout)
            continue
        here = host_identity()
        members = [
            Member(rank, rank, pid, here if rank in neighbours else "")
            for rank, pid in enumerate(comm.pids)
        ]
        first = Meeting(point.prefix, 0, backend_of(comm, backend), n_slots, n_slots, members)
        comm.membership = Membership(point, connect, first, slot)
        return comm


def backend_of(comm: Transport, asked_for: str) -> str:
    """The backend for the ranks that are left, which may be on fewer hosts, and for those that
    come, which may be on more. What a reducer can do does not become less.
    """
    return asked_for if comm.backend == "shm" else comm.backend


def join(
    point: MeetingPoint, connect: Connect, meeting: Meeting, slot: int, timeout: timedelta
) -> Transport:
    """Makes the communicator of a meeting's members. Collective. Raises FastcommError where one of
    them is lost.
    """
    rank = meeting.rank_of(slot)
    assert rank is not None  # for the type checker
    world = f"{meeting.prefix}/{meeting.number}/world"
    bootstrap = StoreBootstrap(
        *(PrefixStore(world, own_connection(point.store)), rank, len(meeting.members), timeout),
        caller=_CALLER,
        look=partial(_look_for, meeting.members),
    )
    comm, _ = connect(bootstrap, meeting.backend)
    comm.membership = Membership(point, connect, meeting, slot)
    if rank == next(r for r, member in enumerate(meeting.members) if member.before is not None):
        _log.warning(f"the ranks have met anew: {meeting.in_words()}")
    return comm


def _look_for(members: Collection[Member]) -> None:
    """Raises PeerLostError if a process of this host has ended."""
    here = host_identity()
    for rank, member in enumerate(members):
        if member.host == here and member.pid != os.getpid() and _has_ended(member.pid):
            raise PeerLostError(f"rank {rank} (pid {member.pid}) has ended", [rank])


def _has_ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(process)
