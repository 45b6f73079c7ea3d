"""How ranks meet: at one of torch's stores, or in a torch.distributed group.

A bootstrap exchanges one value per rank, tells all ranks when one has failed, and keeps the notes
that their watchdogs leave each other. What the ranks do once they have met is in rendezvous.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, NamedTuple
from urllib.parse import ParseResult, urlparse

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from fastcomm.comm import forms
from fastcomm.comm.deadline import Deadline
from fastcomm.comm.times import LONG_SLICE_S, SLICE_S
from fastcomm.comm.who import PROCESS
from fastcomm.comm.words import waited
from fastcomm.errors import FastcommError, InitError, PeerLostError, TimeoutError
from fastcomm.launching import launchers
from fastcomm.launching.timed_store import ANSWER_S, Silence, TimedStore, answer_of

_POLL_S, _LONGEST_POLL_S = 0.002, 0.05
_LONGEST_KNOCK_S = 10.0
_LOOK_S = 1.0  # how often a rank looks at those that met here before
_ALONE_S = 20.0  # how long it waits alone once they have ended: they may be started again
_TAKEN_IN = "taken in"
_PROCESS = uuid.uuid4().hex  # with its pid it names a process: a forked child has another one
_file_stores: dict[str, FileStore] = {}  # by path, those that are kept until the process ends


class Caller(NamedTuple):
    """The function that brings the ranks together, for messages.

    advice: when a rank is missing. is_collective: raises TimeoutError and PeerLostError, where
        others raise InitError.
    """

    name: str
    advice: str = "were they started, and can they reach the same init_method?"
    is_collective: bool = False


_INIT = Caller("fastcomm.init")


class TakenIn(BaseException):
    """While this process waited for ranks to meet for the first time, others that have met before
    have taken it in. No Exception: nobody is to be told of a failure.

    note: what they have left for it, to be read by membership.py.
    """

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note


class StoreBootstrap:
    """Ranks that meet at a torch.distributed store, with values as JSON."""

    point: MeetingPoint | None = None  # where ranks can meet anew; see membership.py

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        caller: Caller = _INIT,
        names: Sequence[int] | None = None,
        look: Callable[[], None] | None = None,
        pass_on: Callable[[], None] = lambda: None,
    ) -> None:
        """names: the ranks' numbers, for messages. look: see look(). pass_on: see enter_part()."""
        self.rank = rank
        self.world_size = world_size
        self.caller, self._advice, self._is_collective = caller
        self.names = names or range(world_size)
        self.name = f"rank {self.names[rank]}"
        self._look_at_peers = look
        self._pass_on = pass_on
        self._store, self._timed = store, TimedStore(store, timeout)
        self.timeout = timeout
        self._next_look, self._end = Deadline(_LOOK_S), Deadline(_ALONE_S)
        self._n_exchanges = 0
        self._exchange = ""  # the name of the newest
        try:
            self._enter()
        except BaseException as error:
            self.fail_by(error)
            raise

    def _enter(self) -> None:
        if not self._claim_rank():
            self._refuse(
                f"{self.name} was given to two processes: every process needs a rank of its own, "
                "and every run a port or file of its own (delete a file that an earlier run has "
                "left behind)"
            )
        agreed = text_of(self._timed.compare_set("world_size", "", str(self.world_size)))
        if agreed != str(self.world_size):
            theirs = f"another rank with {agreed}"
            self._refuse(f"{self.name} was started with world_size {self.world_size}, {theirs}")

    def _claim_rank(self) -> bool:
        """Whether no other process has the rank, or one that has ended before the ranks met."""
        key, own = f"claim/{self.rank}", json.dumps([os.getpid(), host_identity()])
        first = text_of(self._timed.compare_set(key, "", own))
        if first == own:
            return True
        what = f"the claim to {self.name} in the store"
        process = forms.read(first, PROCESS, what, InitError)
        if self._timed.check([f"2/{self.rank}"]) or not has_ended(*process):
            return False
        return text_of(self._timed.compare_set(key, first, own)) == own

    def _refuse(self, message: str) -> None:
        self.fail(message)
        raise InitError(message)

    def exchange(
        self,
        value: Any,
        form: forms.Form,
        look: Callable[[], None] | None = None,
        name: str | None = None,
    ) -> list[Any]:
        """Every rank's value, by rank. Raises InitError when a rank is missing after the timeout,
        or has failed, or its value does not have the form: see forms.py.

        look: called while waiting, in place of self.look; raises when a rank will not come. name:
        for an exchange that some ranks may skip; exchanges without a name are numbered.
        """
        self._n_exchanges += name is None
        self._exchange = name or str(self._n_exchanges)
        keys = [f"{self._exchange}/{rank}" for rank in range(self.world_size)]
        self._timed.deadline = Deadline(self.timeout.total_seconds())
        try:
            self._timed.set(keys[self.rank], json.dumps(value))
            sent = self._collected(keys, self._timed.deadline, look or self.look)
            values = [
                forms.read(one, form, self._what_from(rank), InitError)
                for rank, one in enumerate(sent)
            ]
            self._pass_on()
        except FastcommError:
            raise
        except RuntimeError as error:
            raise self.lost(error) from error
        finally:
            self._timed.deadline = None
        return values

    def _collected(
        self, keys: Sequence[str], deadline: Deadline, look: Callable[[], None]
    ) -> list[str]:
        """What stands there. Rank 0 collects it for all: the store gives 2 N values, not N * N."""
        everyones = f"{self._exchange}/all"
        wanted = keys if self.rank == 0 else [everyones]
        pause = _POLL_S
        while not self._timed.check(wanted):
            look()
            if deadline.is_over():
                raise self._missing(keys)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        if self.rank > 0:
            form = (str,) * self.world_size
            sent = self._timed.get(everyones)
            return list(forms.read(sent, form, self._what_from(0), InitError))
        texts = [text_of(one) for one in self._timed.multi_get(keys)]
        self._timed.set(everyones, json.dumps(texts))
        return texts

    def _what_from(self, rank: int) -> str:
        return f"what {self.name} has got from rank {self.names[rank]}"

    def lost(self, error: RuntimeError) -> InitError:
        return InitError(f"{self.name} lost the meeting point (did rank 0 end?): {error}")

    def _missing(self, keys: Sequence[str]) -> FastcommError:
        ranks = zip(self.names, keys, strict=True)
        missing = [name for name, key in ranks if not self._timed.check([key])]
        missing = missing or [self.names[0]]  # has not passed on what it has
        how_long = f"{waited(self.timeout.total_seconds())} in {self.caller}"
        kind = TimeoutError if self._is_collective else InitError
        return kind(
            f"{self.name} {how_long} for {self.world_size} ranks; missing: rank "
            f"{', '.join(map(str, missing))}; {self._advice}"
        )

    def look(self) -> None:
        """Raises InitError if another rank is lost or has failed, or the store is gone; TakenIn in
        the first exchange. What the constructor got as look raises PeerLostError if one is lost.
        """
        try:
            if self._look_at_peers is not None:
                self._look_at_peers()
            if self._exchange == "1":
                if self._timed.check([_TAKEN_IN]):
                    raise TakenIn(text_of(self._timed.get(_TAKEN_IN)))
                self._look_at_those_before()
            if self._timed.check(["failed"]):
                kind = PeerLostError if self._is_collective else InitError
                raise kind(text_of(self._timed.get("failed")))
        except PeerLostError as error:
            if self._is_collective:
                raise
            raise InitError(f"{self.name} waits in {self.caller}: {error}") from error
        except FastcommError:
            raise
        except RuntimeError as error:
            raise self.lost(error) from error

    def _look_at_those_before(self) -> None:
        """Raises InitError if they have ended, and for a while nobody else has come."""
        if self.point is None or not self._next_look.is_over():
            return
        self._next_look = Deadline(_LOOK_S)
        if not self.point.is_left_to(self.rank, self.world_size):
            self._end = Deadline(_ALONE_S)
        elif self._end.is_over():
            raise InitError(
                f"{self.name} waits alone where others have met: their processes have ended, so "
                "nobody takes it in. Start all ranks again, at a port or file of their own"
            )

    def fail(self, message: str) -> None:
        """Ends the exchange on the other ranks, too. They raise the first failure reported."""
        # the store itself may be what failed
        answer_of(partial(self._store.compare_set, "failed", "", message), ANSWER_S)

    def fail_by(self, error: BaseException) -> None:
        """As fail(), for what was raised here: the other ranks are to stop waiting."""
        why = str(error) or type(error).__name__
        with contextlib.suppress(RuntimeError):  # the meeting point may be what failed
            self.fail(f"{self.name} failed in {self.caller}: {why}")

    def finish(self) -> None:
        """All ranks have met."""
        count_as_finished(self._store)

    def part(self, name: str) -> Store:
        """A part of the store for others to use, who do not wait in calls of torch's."""
        return PrefixStore(name, self._store)

    def store(self, name: str) -> Store:
        """A part of the store for others to use, who may wait there."""
        return PrefixStore(name, own_connection(self._store, self.timeout))

    # The notes that ranks leave each other after init; see fastcomm.comm.watchdog.Notes.

    def write(self, key: str, value: str) -> None:
        self._store.set(f"note/{key}", value)

    def write_once(self, key: str, value: str) -> str:
        """Returns the key's value, which another rank may have written first."""
        return text_of(self._store.compare_set(f"note/{key}", "", value))

    def count(self, key: str) -> int:
        return int(self._store.add(f"note/{key}", 1))

    def read(self, key: str) -> str | None:
        is_there = self._store.check([f"note/{key}"])
        return text_of(self._store.get(f"note/{key}")) if is_there else None


def meet_in_group(group: dist.ProcessGroup, timeout: timedelta) -> StoreBootstrap:
    """Opens the store of a torch.distributed group, for another meeting of its ranks."""
    name = f"group {group.group_name}"
    store = dist.distributed_c10d._get_process_group_store(group)
    with said_of(group.rank(), name):
        store = own_connection(store, timeout)
        prefix, pass_on = enter_part(TimedStore(store, timeout), group.rank(), name)
    part = PrefixStore(prefix, store)
    return StoreBootstrap(part, group.rank(), group.size(), timeout, pass_on=pass_on)


def meet(
    init_method: str, rank: int | None, world_size: int | None, timeout: timedelta
) -> StoreBootstrap:
    place = _parsed(init_method)
    is_alone = place.scheme == "env" and world_size == 1
    is_served = False
    if is_alone:  # there is nobody to meet, so no launcher is needed
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    elif place.scheme == "env":
        # Who gives the rank has not left counting to a launcher: torchrun's variables say the rest.
        started_by = launchers.TORCHRUN if rank is not None else launchers.launcher()
        rank = launchers.number(started_by.rank) if rank is None else rank
        world_size = launchers.number(started_by.world_size) if world_size is None else world_size
        place = urlparse(launchers.meeting_point(started_by, world_size))
        # Not rank 0 serves the store then, but torchrun.
        is_served = started_by is launchers.TORCHRUN and (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )
    if rank is None or world_size is None:
        raise ValueError(f"init_method {init_method!r} needs rank= and world_size=")
    if world_size < 1 or not 0 <= rank < world_size:
        raise InitError(
            f"rank must be from 0 to world_size - 1; got rank {rank} and world_size {world_size}; "
            "leave out both where a launcher sets them"
        )
    # Else the variable is left from another launcher: torchrun's store is there before its ranks.
    is_server = rank == 0 and not (is_served and _listens(place))
    try:
        store: Store = HashStore()
        if not is_alone:
            opened = partial(_open_store, place, world_size, timeout, is_server)
            store = answer_of(opened, timeout.total_seconds() + ANSWER_S)
        return MeetingPoint(place, store, timeout).bootstrap(rank, world_size, timeout)
    except FastcommError:
        raise
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\nException raised from")[0]  # less torch's C++ frames
        where = place.geturl()
        raise InitError(
            f"rank {rank} of {world_size} cannot open the meeting point {where!r}: {reason}"
        ) from error


class MeetingPoint:
    """The store at a place, which is opened anew when the process that has served it is gone.

    prefix: of the keys of what these ranks have met for. patience: how long the store may take to
    answer; rebuild() sets its own timeout.
    """

    def __init__(
        self, place: ParseResult, store: Store, patience: timedelta = timedelta(minutes=5)
    ) -> None:
        self.store = store
        self.prefix = ""
        self.patience = patience
        self._place = place

    def bootstrap(self, rank: int, world_size: int, timeout: timedelta) -> StoreBootstrap:
        """The bootstrap of a rank that comes here for the first time, or anew."""
        self.prefix, pass_on = enter_part(self.timed_store(), rank)
        part = PrefixStore(self.prefix, self.store)
        met = StoreBootstrap(part, rank, world_size, timeout, pass_on=pass_on)
        met.point = self
        return met

    def timed_store(
        self, prefix: str | None = None, patience: timedelta | None = None
    ) -> TimedStore:
        """The store, or the part of it that has the prefix. patience: in place of the point's."""
        store = self.store if prefix is None else PrefixStore(prefix, self.store)
        return TimedStore(store, self.patience if patience is None else patience)

    def waiting(
        self, ranks: Sequence[int], *, patience: timedelta | None = None
    ) -> dict[int, list[Any]]:
        """Which of these ranks wait here for a first meeting, and their processes: pid and host.
        patience: in place of the point's, for a look that need not have an answer.
        """
        store = self.timed_store(patience=patience)
        came = f"{_prefix()}/{store.add(_counter(), 0)}/came"
        processes = {
            rank: forms.read(
                store.get(f"{came}/{rank}"),
                (str, *PROCESS),
                f"the note of rank {rank}, which waits to be taken in,",
            )[1:]
            for rank in ranks
            if store.check([f"{came}/{rank}"])
        }
        return {rank: one for rank, one in processes.items() if not has_ended(*one)}

    def is_left_to(self, rank: int, world_size: int) -> bool:
        """Whether those that have met here before have ended, as far as this host knows, and no
        other rank waits for a first meeting.
        """
        store = self.timed_store(patience=timedelta())
        others = [other for other in range(world_size) if other != rank]
        with contextlib.suppress(RuntimeError):  # the store is silent, or gone
            for number in reversed(range(int(self.prefix.rpartition("/")[2]))):
                part = f"{_prefix()}/{number}"
                if not all(has_ended(*one) for one in _claims(store, part, world_size)):
                    return False
                if store.check([f"{part}/2/all"]):  # else who came there joined those before
                    return not self.waiting(others, patience=timedelta())
        return False

    def take_in(self, note: str) -> None:
        """Tells those who wait. Who comes afterwards waits for another meeting."""
        store = self.timed_store()
        number = store.add(_counter(), 0)
        store.set(f"{_prefix()}/{number}/{_TAKEN_IN}", note)
        _end_part(store, number)

    def answers(self) -> bool:
        """Whether the store does."""
        try:
            answer_of(partial(self.store.check, [_counter()]), ANSWER_S)
        except RuntimeError:
            return False
        return True

    def reopen(self, timeout: timedelta) -> None:
        """Opens the store again, or serves it if its host is this one. Raises InitError."""
        deadline = Deadline(timeout.total_seconds())
        while self._place.scheme == "tcp" and not deadline.is_over():
            is_served = _listens(self._place)
            with contextlib.suppress(RuntimeError, OSError):  # it went, or another was faster
                if is_served or _is_here(self._place):
                    opened = partial(_open_store, self._place, 0, timeout, not is_served)
                    self.store = answer_of(opened, timeout.total_seconds())
                    return
            time.sleep(SLICE_S)
        where = self._place.geturl()
        if self._place.scheme == "tcp" and _listens(self._place):
            raise InitError(
                f"the meeting point {where!r} does not answer: the process that serves it is "
                "stopped"
            )
        raise InitError(
            f"the meeting point {where!r} is gone with the process that has served it, and no rank "
            "of its host is left: start the ranks under a launcher that serves it (torchrun), or "
            "let them meet at a file"
        )


def _claims(store: TimedStore, part: str, world_size: int) -> Iterator[list[Any]]:
    """The processes, pid and host, that have claimed ranks in a part of the store."""
    for rank in range(world_size):
        if store.check([f"{part}/claim/{rank}"]):
            what = f"the claim to rank {rank} in the store"
            yield forms.read(store.get(f"{part}/claim/{rank}"), PROCESS, what)


def _prefix(name: str = "ranks") -> str:
    # torchrun restarts all ranks after a failure, on the same store: keep the attempts apart.
    return f"fastcomm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _counter(name: str = "ranks") -> str:
    return f"{_prefix(name)}/n_meetings"


@contextlib.contextmanager
def said_of(rank: int, name: str) -> Iterator[None]:
    """Makes an InitError of a Silence. name: of those whom this rank is to meet."""
    try:
        yield
    except Silence as silence:
        raise InitError(
            f"rank {rank} cannot meet the others of {name}: {silence}; see whether the process "
            "that serves it is stopped, and whether its host can be reached"
        ) from silence


def enter_part(store: TimedStore, rank: int, name: str = "ranks") -> tuple[str, Callable[[], None]]:
    """The prefix of a part of the store that belongs to one meeting alone, and a function to call
    once all ranks are there: who comes afterwards meets in the next part. name: of those who meet.

    The store counts the meetings, not the process: one that has met others before, and one that has
    not, meet as well. A meeting that has failed is left by each rank as it comes again, so that
    those who have not come yet learn of the failure.
    """
    counter, visitor = _counter(name), json.dumps([_PROCESS, os.getpid(), host_identity()])
    number = store.add(counter, 0)
    came = f"{_prefix(name)}/{number}/came/{rank}"
    if store.check([came]) and text_of(store.get(came)) == visitor:
        _end_part(store, number, name)
        number = store.add(counter, 0)
    store.set(f"{_prefix(name)}/{number}/came/{rank}", visitor)
    return f"{_prefix(name)}/{number}", partial(_end_part, store, number, name)


def _end_part(store: TimedStore, number: int, name: str = "ranks") -> None:
    """The first rank ends it; for the others it is over already."""
    store.compare_set(_counter(name), str(number), str(number + 1))


def text_of(stored: bytes) -> str:
    """What a store holds under a key, as text, whatever that is."""
    return bytes(stored).decode(errors="replace")


def has_ended(pid: int, host: str) -> bool:
    """Whether a process has ended, as far as this host knows."""
    return host == host_identity() and process_has_ended(pid)


def process_has_ended(pid: int) -> bool:
    """Also true for a process whose parent has not collected its exit status yet."""
    try:
        lifeline = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready = select.poll()
        ready.register(lifeline, select.POLLIN)
        return bool(ready.poll(0))
    finally:
        os.close(lifeline)


def host_identity() -> str:
    """A string that is equal for two processes exactly if they can map each other's memory: the
    same kernel and the same pid namespace. FASTCOMM_HOST_ID overrides it.
    """
    override = os.environ.get("FASTCOMM_HOST_ID")
    if override is not None:
        return override
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def own_connection(store: Store, timeout: timedelta) -> Store:
    """The same store over a connection of its own, where torch can make one: over a shared one, a
    wait of torch's would hold up the watchdog. Raises Silence.
    """
    if not hasattr(store, "clone"):
        return store
    own: Store = answer_of(store.clone, timeout.total_seconds() + ANSWER_S)
    return own


def _parsed(init_method: str) -> ParseResult:
    """Raises ValueError, also for what leads elsewhere than it seems to: file://folder/file."""
    reason = ""
    try:
        place = urlparse(init_method)
        is_file = place.scheme == "file" and place.path.strip("/") and not place.netloc
        is_tcp = place.scheme == "tcp" and place.hostname and place.port
        if place.scheme == "env" or is_file or is_tcp:
            return place
    except ValueError as error:
        reason = f" ({error})"
    raise ValueError(
        f"init_method must be env://, tcp://host:port or file:///path; got {init_method!r}{reason}"
    )


def _open_store(place: ParseResult, world_size: int, timeout: timedelta, is_server: bool) -> Store:
    if place.scheme == "file":
        if os.path.isdir(place.path):
            raise IsADirectoryError(f"{place.path} is a folder: name a file in it")
        if not os.access(os.path.dirname(place.path), os.W_OK):  # the store would wait for ever
            raise FileNotFoundError(
                f"{os.path.dirname(place.path)} is not a folder this process can write to"
            )
        return FileStore(place.path, world_size)
    assert place.hostname is not None and place.port is not None  # for the type checker
    if not is_server:
        _await_server(place.hostname, place.port, timeout.total_seconds())
    return TCPStore(
        place.hostname,
        place.port,
        is_master=is_server,
        timeout=timeout,
        wait_for_workers=False,  # it could not say which one is missing
        multi_tenant=True,
    )


def _is_here(place: ParseResult) -> bool:
    """Whether the place is one of this host's addresses."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(place.hostname, 0)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _listens(place: ParseResult) -> bool:
    """Whether somebody does at this host and port."""
    address = place.hostname, place.port or 0
    try:
        answer_of(partial(socket.create_connection, address, _LONGEST_KNOCK_S), math.inf).close()
    except OSError:
        return False
    return True


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Raises OSError if nobody listens there. A TCPStore would print pages of C++ frames."""
    deadline = Deadline(timeout_s)
    while True:
        try:
            socket.create_connection((host, port), LONG_SLICE_S).close()
            return
        except OSError as error:
            if deadline.is_over():
                raise OSError(
                    f"nobody answered at {host}:{port} for {timeout_s:g} s ({error}); was rank 0 "
                    "started there, and may this host connect to it?"
                ) from error
        time.sleep(SLICE_S)


def count_as_finished(store: Store) -> None:
    """Makes sure that the last rank to drop a FileStore removes its file.

    All ranks call this once they have met, before any of them drops the store. Torch removes the
    file when all ranks have finished and none uses it. But a rank is counted in two steps. Of two
    ranks that drop the store at the same time, the first may see that the second still uses it, and
    the second may have seen too few finished ranks. So each rank counts as finished from here on.
    And it uses the file until its process ends: else the last one might remove it while another
    opens it again, for their next meeting.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore):
        path: str = store.path  # type: ignore[attr-defined]
        FileStore(path)  # counts as finished, removes nothing
        if path not in _file_stores:
            _file_stores[path] = store
            Finalize(None, _file_stores.pop, [path], exitpriority=0)
