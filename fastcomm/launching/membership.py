"""Membership: which processes a communicator has, and how the remaining ones meet anew when others
are lost.

They meet at the store where they met first; each meeting has a number there. Every rank writes down
who it is, and the first to do so leads. As soon as each rank of the old communicator has come or is
known to be lost, the leader writes down who takes part, and in which order. Processes that wait in
init() take part, too. If one that takes part is lost before all are connected, the rest hold the
next meeting. A rank that was connected already joins that one when its communicator fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from operator import index
from typing import Any, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fastcomm.comm import forms
from fastcomm.comm.deadline import Deadline
from fastcomm.comm.objects import gather_objects
from fastcomm.comm.transport import Transport
from fastcomm.comm.who import PROCESS, Process
from fastcomm.comm.words import GONE
from fastcomm.errors import FastcommError, PeerLostError, TimeoutError
from fastcomm.launching.bootstrap import (
    Caller,
    MeetingPoint,
    StoreBootstrap,
    TakenIn,
    has_ended,
    host_identity,
    own_connection,
    process_has_ended,
    text_of,
)
from fastcomm.launching.channels import Channels
from fastcomm.launching.timed_store import Silence

_log = logging.getLogger("fastcomm")
_SILENT_S = 60.0  # until a store that has not answered is asked again
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.02
_GRACE_S = 5.0  # how much longer than the leader the others wait
_GIVEN_UP = "null"  # in place of who takes part
_MOST_TIMES = 3  # how often the timeout may pass, while ranks are lost that meet
_SPLIT = Caller("split()", "has it ended meanwhile?")
_SEND = Caller(
    "send()",
    "every send() to a rank needs a recv() there, and every recv() a send()",
    is_collective=True,
)
_RECV = _SEND._replace(name="recv()")
_CALLER = Caller("rebuild()", "a lost rank may not be noticed at once: call rebuild() again")


class Member(NamedTuple):
    """A process that takes part in a meeting.

    started_as: the rank it was started as, which it keeps.
    before: its rank in the communicator before; None: it was in none.
    """

    started_as: int
    before: int | None
    pid: int
    host: str

    def is_here(self) -> bool:
        """Whether it is this process."""
        return self.pid == os.getpid() and self.host == host_identity()

    def has_ended(self) -> bool:
        """Whether it has ended, as far as this host knows."""
        return has_ended(self.pid, self.host)


class Meeting(NamedTuple):
    """What the leader writes down: all that a process needs to take part.

    prefix: of the keys in the store.
    number: 0 in init(), where nobody leads.
    backend: as init() takes it.
    n_started: how many ranks were started at first.
    n_before: how many ranks the communicator before had.
    """

    prefix: str
    number: int
    backend: str
    n_started: int
    n_before: int
    members: list[Member]

    @staticmethod
    def read(note: str, n_started: int) -> Meeting:
        """Raises FastcommError for one of another number of ranks, or that cannot be read."""
        form = (
            *(str, forms.NUMBER, str, range(n_started, n_started + 1), range(n_started + 1)),
            [_member_of(n_started)],
        )
        meeting = Meeting(*forms.read(note, form, "the note of who takes part in a meeting"))
        return meeting._replace(members=[Member(*member) for member in meeting.members])

    @property
    def own_rank(self) -> int | None:
        """The rank of this process in the new communicator; None: it takes no part."""
        return next((rank for rank, one in enumerate(self.members) if one.is_here()), None)

    def in_words(self) -> str:
        came = [rank for rank, one in enumerate(self.members) if one.before is None]
        stayed = {one.before: rank for rank, one in enumerate(self.members)}
        lost = [rank for rank in range(self.n_before) if rank not in stayed]
        words = [f"{len(self.members)} in place of {self.n_before}"]
        words += [f"rank {rank} was lost" for rank in lost]
        words += [
            f"rank {before} is rank {rank} now"
            for before, rank in stayed.items()
            if before is not None and before != rank
        ]
        words += [f"rank {rank} has come" for rank in came]
        return "; ".join(words)


def _member_of(n_started: int, only: int | None = None) -> forms.Form:
    """The form of a member of a meeting. only: the rank that it was started as."""
    ranks = range(n_started)
    return ranks if only is None else range(only, only + 1), {ranks, None}, *PROCESS


# Makes a communicator over a backend, once ranks have met. Returns the ranks of this host, too.
Connect = Callable[[StoreBootstrap, str], tuple[Transport, Sequence[int]]]


class Fixed:
    """The ranks of a communicator, which cannot meet anew: those of a torch.distributed group, or
    of a split(). They can split into parts, and send each other messages.
    """

    can_meet_anew = is_rebuilt = False

    def __init__(
        self, bootstrap: StoreBootstrap, connect: Connect, backend: str, neighbours: Sequence[int]
    ) -> None:
        """backend: that of the parts. neighbours: the ranks of this host."""
        self._bootstrap, self._connect, self._backend = bootstrap, connect, backend
        self.neighbours = neighbours
        self._pid = os.getpid()
        self._n_splits = 0
        self._channels: Channels | None = None

    @property
    def newest(self) -> Transport | None:
        """The communicator that the ranks have now that have met anew; None: they have not."""
        return None

    def rebuild(self, comm: Transport, timeout: timedelta) -> Transport:
        raise FastcommError(
            "rebuild() takes ranks that fastcomm.init() has brought together by init_method: make "
            "another torch.distributed group of those that are left, and call "
            "fastcomm.init(group=...); or rebuild() the communicator whose split() made this one, "
            "and split() that"
        )

    def split(self, comm: Transport, color: int | None, key: int) -> Transport | None:
        """See Communicator.split."""
        wishes = _wishes_of_all(comm, color, key, self._n_splits)
        self._n_splits = 1 + max(n for _, _, n in wishes)  # a failure may have kept some from one
        own, *_ = wishes[comm.rank]
        ranks = [rank for rank, (theirs, *_) in enumerate(wishes) if theirs == own]
        ranks.sort(key=lambda rank: wishes[rank][1])  # stable: equal keys, as they are here
        name = f"split {self._n_splits} {ranks[0]}"
        try:
            part = None
            if own is not None:
                part = self._make_part(ranks, comm.timeout, name, _SPLIT)
        except BaseException:
            with contextlib.suppress(FastcommError):
                comm.barrier()
            raise
        comm.barrier()  # the store may live in a rank, which must not end before all have met
        return part

    def channels_of(self, comm: Transport) -> Channels:
        """For send() and recv()."""
        if self._channels is None:
            rank, timeout, processes = comm.rank, comm.timeout, comm.processes

            def connect(src: int, dst: int) -> Transport:
                look = partial(self._look_for_peer, processes[dst if rank == src else src])
                name, caller = f"channel {src} {dst}", _SEND if rank == src else _RECV
                return self._make_part([src, dst], timeout, name, caller, look)

            self._channels = Channels(comm, connect)
        return self._channels

    def _look_for_peer(self, peer: Process) -> None:
        """Raises FastcommError if the peer's process or this rank's communicator has ended."""
        if self._channels is not None:
            self._channels.look()
        if peer.rank in self.neighbours and process_has_ended(peer.pid):
            raise PeerLostError(f"{peer.in_words()} {GONE}", [peer.rank])

    def end_channels(self, aborts: bool) -> None:
        if self._channels is not None and os.getpid() == self._pid:  # a forked child's is another
            self._channels.end(aborts)

    def _make_part(
        self,
        ranks: list[int],
        timeout: timedelta,
        name: str,
        caller: Caller,
        look: Callable[[], None] | None = None,
    ) -> Transport:
        """The communicator of these ranks, numbered as in the list."""
        rank, store = self._bootstrap.rank, self._bootstrap.part(name)
        place = ranks.index(rank), len(ranks)
        try:
            bootstrap = StoreBootstrap(store, *place, timeout, caller, ranks, look)
            part, neighbours = self._connect(bootstrap, self._backend)
        except FastcommError:
            raise
        except RuntimeError as error:
            raise self._bootstrap.lost(error) from error
        part.membership = Fixed(bootstrap, self._connect, self._backend, neighbours)
        return part


def _wishes_of_all(
    comm: Transport, color: object, key: object, n_splits: int
) -> list[tuple[int | None, int, int]]:
    """Every rank's color, key and number of splits, by rank. Raises TypeError on all ranks."""
    problem: str | None = None
    numbers: tuple[int | None, int] = None, 0
    try:
        numbers = None if color is None else index(color), index(key)  # type: ignore[arg-type]
    except TypeError:
        problem = f"split() takes integers as color and key; got {color!r} and {key!r}"
    told = gather_objects(comm, (problem, *numbers, n_splits), "split()")
    form = {str, None}, {int, None}, int, forms.NUMBER
    for rank, one in enumerate(told):
        forms.checked(one, form, f"what rank {rank} has sent")
        if one[0] is not None:
            raise TypeError(f"rank {rank}: {one[0]}")
    return [(theirs, their_key, n) for _, theirs, their_key, n in told]


class Membership(Fixed):
    """Which processes the ranks of a communicator are, and how the remaining ones meet anew.

    is_rebuilt: its ranks have met anew.
    is_new: this process has come since the ranks met first, and has not caught up with the others.
    """

    can_meet_anew = True

    def __init__(
        self,
        point: MeetingPoint,
        bootstrap: StoreBootstrap,
        connect: Connect,
        meeting: Meeting,
        *,
        is_new: bool = False,
    ) -> None:
        parts = "auto" if meeting.backend == "hierarchical" else meeting.backend
        here = host_identity()
        neighbours = [rank for rank, one in enumerate(meeting.members) if one.host == here]
        super().__init__(bootstrap, connect, parts, neighbours)
        self._point, self._meeting = point, meeting
        self._newest: Transport | None = None  # once another has followed
        self.is_rebuilt = meeting.number > 0
        self.is_new = is_new
        self._silent_until = 0.0  # the store, for all that is known

    @property
    def newest(self) -> Transport | None:
        if self._newest is not None:  # lets go of those in between
            self._newest = self._newest.membership.newest or self._newest
        return self._newest

    # -- meeting anew ------------------------------------------------------------------------------

    def rebuild(self, comm: Transport, timeout: timedelta) -> Transport:
        """See Communicator.rebuild."""
        newest = self.newest
        if newest is not None:
            membership: Membership = newest.membership
            return newest if newest.failure is None else membership.rebuild(newest, timeout)
        self._newest = self._meet_anew(comm, timeout)
        comm.close()
        return self._newest

    def _meet_anew(self, comm: Transport, timeout: timedelta) -> Transport:
        self._point.patience = timeout
        newest = self._meeting  # of those that this process takes part in
        unreachable = set(getattr(comm.failure, "ranks", ()))
        number = newest.number
        deadline = Deadline(_MOST_TIMES * timeout.total_seconds())
        while True:
            trouble = ""
            try:
                number = self._next_number(number)
                meeting = self._hold(newest, unreachable, number, timeout)
                if meeting is not None:
                    if meeting.own_rank is None:
                        break  # this rank has come too late
                    newest, unreachable = meeting, set()
                    return connect_members(
                        *(self._point, self._connect, meeting, timeout), was_new=self.is_new
                    )
            except FastcommError as error:  # another was lost meanwhile
                trouble = str(error)
                time.sleep(_PAUSE_S)
            except RuntimeError as error:
                if self._point.answers():
                    raise
                trouble = str(error)
                self._point.reopen(timeout)  # all that was written is gone
            if deadline.is_over():
                raise TimeoutError(
                    f"rank {comm.rank}: the remaining ranks have tried to meet anew for "
                    f"{_MOST_TIMES * timeout.total_seconds():g} s, and others were lost meanwhile "
                    f"each time; the last: {trouble or 'the one that led'}"
                )
        own = self._meeting.members[comm.rank].started_as
        bootstrap = self._point.bootstrap(own, newest.n_started, comm.timeout)
        return arrive(bootstrap, self._connect, newest.backend, comm.timeout)

    def _next_number(self, after: int) -> int:
        """The number of the meeting that is held now, or that this rank is the first to come to."""
        store = self._point.timed_store()
        counter = f"{self._meeting.prefix}/n_rebuilt"
        number = int(store.add(counter, 0))
        while number <= after:
            newest = store.compare_set(counter, str(number), str(after + 1))
            number = forms.read(newest, forms.NUMBER, "the number of the newest meeting")
        return number

    def _hold(
        self, before: Meeting, unreachable: set[int], number: int, timeout: timedelta
    ) -> Meeting | None:
        """Takes part in a meeting until it is known who does. None: the next one is held. before:
        the meeting before. unreachable: its ranks of which the communicator said so.
        """
        key = f"{self._meeting.prefix}/decided"
        store = self._point.timed_store()
        if store.check([key]):
            decided = Meeting.read(text_of(store.get(key)), before.n_started)
            if decided.number > before.number and decided.own_rank is None:
                return decided
        rank = before.own_rank
        assert rank is not None  # for the type checker
        me = before.members[rank]._replace(before=rank)
        store = self._point.timed_store(f"{before.prefix}/{number}")
        store.set(f"came/{me.started_as}", json.dumps([me, before.number]))
        leader = text_of(store.compare_set("leader", "", str(me.started_as)))
        others = _Others(before, unreachable)
        deadline = Deadline(timeout.total_seconds())
        of_others = Deadline(timeout.total_seconds() + _GRACE_S)
        pause = _PAUSE_S
        while not store.check(["members"]):
            if self._next_number(number - 1) != number:
                return None
            others.look(store)
            if leader == str(me.started_as):
                if others.are_known or deadline.is_over():
                    self._decide(store, number, before)
                    break
            elif leader in map(str, others.lost) or of_others.is_over():
                store.compare_set("members", "", _GIVEN_UP)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        note = text_of(store.get("members"))
        return None if note == _GIVEN_UP else Meeting.read(note, before.n_started)

    def _decide(self, store: Any, number: int, before: Meeting) -> None:
        """Writes down who takes part: those who came, and who waits for a first meeting."""
        notes = [
            forms.read(
                store.get(f"came/{one}"),
                (_member_of(before.n_started, only=one), forms.NUMBER),
                f"the note by which rank {one} came",
            )
            for one in range(before.n_started)
            if store.check([f"came/{one}"])
        ]
        newest = max(met for _, met in notes)
        members = [
            Member(*one) if met == newest else Member(*one)._replace(before=None)
            for one, met in notes
        ]
        taken = {member.started_as for member in members}
        absent = [rank for rank in range(before.n_started) if rank not in taken]
        waiting = self._point.waiting(absent)
        members += [Member(rank, None, *process) for rank, process in waiting.items()]
        meeting = Meeting(
            *(before.prefix, number, before.backend, before.n_started, len(before.members)),
            sorted(members),
        )
        note = json.dumps(meeting)
        if text_of(store.compare_set("members", "", note)) != note:
            return  # the others have given this rank up
        self._point.timed_store(before.prefix).set("decided", note)
        if waiting:
            self._point.take_in(note)

    def is_awaited(self) -> bool:
        """Whether a process waits to be taken in. A store that is silent is asked again later."""
        present = {member.started_as for member in self._meeting.members}
        others = [rank for rank in range(self._meeting.n_started) if rank not in present]
        try:
            return time.monotonic() >= self._silent_until and bool(
                self._point.waiting(others, patience=timedelta())
            )
        except Silence as silence:
            self._silent_until = time.monotonic() + _SILENT_S
            _log.warning(
                f"{silence}: for {_SILENT_S:g} s nobody looks whether a process waits there to be "
                "taken in"
            )
        except RuntimeError:  # the store is gone
            pass
        return False


class _Others:
    """The other members of the meeting before, as far as this rank knows: those that have come, and
    those that are lost. By the ranks they were started as.
    """

    def __init__(self, before: Meeting, unreachable: set[int]) -> None:
        self._members = {one.started_as: one for one in before.members if not one.is_here()}
        self._unreachable = {before.members[rank].started_as for rank in unreachable}
        self._came: set[int] = set()
        self.lost: set[int] = set()

    def look(self, store: Any) -> None:
        """Notes who has come or is lost meanwhile, and tells the others of the latter."""
        for started_as in self._members.keys() - self.lost:
            has_ended = self._members[started_as].has_ended()
            if not has_ended and store.check([f"lost/{started_as}"]):
                self.lost.add(started_as)
            elif not has_ended and (
                started_as in self._came or store.check([f"came/{started_as}"])
            ):
                self._came.add(started_as)
            elif has_ended or started_as in self._unreachable:
                store.set(f"lost/{started_as}", "")
                self.lost.add(started_as)

    @property
    def are_known(self) -> bool:
        return self._members.keys() == self._came | self.lost


def arrive(
    bootstrap: StoreBootstrap, connect: Connect, backend: str, timeout: timedelta
) -> Transport:
    """Makes the communicator of ranks that meet for the first time; or, if others have met before
    and go on without a lost rank, takes this process's part in theirs. Raises FastcommError.
    """
    started_as, n_started, point = bootstrap.rank, bootstrap.world_size, bootstrap.point
    assert point is not None  # for the type checker
    deadline = Deadline(timeout.total_seconds())
    while True:
        try:
            comm, neighbours = connect(bootstrap, backend)
            break
        except TakenIn as taken:
            meeting = Meeting.read(taken.note, n_started)
        if meeting.own_rank is not None:  # else it has come a moment too late for this one
            try:
                return connect_members(point, connect, meeting, timeout, was_new=True)
            except FastcommError:  # another was lost meanwhile; the rest meet without this one
                if deadline.is_over():
                    raise
        bootstrap = point.bootstrap(started_as, n_started, timeout)
    here = host_identity()
    members = [
        Member(rank, rank, pid, here if rank in neighbours else "another")
        for rank, pid, _ in comm.processes
    ]
    # The remaining ranks may be on fewer hosts, and those that come on more. What a reducer can do
    # does not become less.
    lasting = backend if comm.backend == "shm" else comm.backend
    first = Meeting(point.prefix, 0, lasting, n_started, n_started, members)
    comm.membership = Membership(point, bootstrap, connect, first)
    return comm


def connect_members(
    point: MeetingPoint, connect: Connect, meeting: Meeting, timeout: timedelta, *, was_new: bool
) -> Transport:
    """Makes the communicator of a meeting's members. Collective. Raises FastcommError where one of
    them is lost. was_new: this process has not caught up with the others before.
    """
    rank = meeting.own_rank
    assert rank is not None  # for the type checker
    members = PrefixStore(
        f"{meeting.prefix}/{meeting.number}/members", own_connection(point.store, timeout)
    )
    bootstrap = StoreBootstrap(
        *(members, rank, len(meeting.members), timeout),
        caller=_CALLER,
        look=partial(_look_for, meeting.members),
    )
    comm, _ = connect(bootstrap, meeting.backend)
    is_new = was_new or meeting.members[rank].before is None
    comm.membership = Membership(point, bootstrap, connect, meeting, is_new=is_new)
    stayed = (r for r, member in enumerate(meeting.members) if member.before is not None)
    if rank == next(stayed, None):
        _log.warning(f"the ranks have met anew: {meeting.in_words()}")
    return comm


def _look_for(members: Collection[Member]) -> None:
    for rank, member in enumerate(members):
        if member.has_ended():
            raise PeerLostError(f"{Process(rank, member.pid).in_words()} {GONE}", [rank])
