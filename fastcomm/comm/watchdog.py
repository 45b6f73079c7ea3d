"""Watchdog: a thread that notices when collectives over NCCL or Gloo will never end, says why, and
ends them.

Both wait for ever for a rank that died, closed its communicator, left a backward with an exception
or calls something else; what is launched on a GPU has no host waiting for it at all. So each rank's
watchdog looks at what is unfinished, at its peers' processes, and at short notes that the ranks
leave each other in the store they met at. It owns no communicator and knows nothing of CUDA.

All ranks ask one store. So each asks for one key a few times a second, the number of notes that
concern all, whatever it waits for and for how long. It reads the notes only when there are new
ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from fastcomm.comm import forms
from fastcomm.comm.deadline import Deadline, running_s
from fastcomm.comm.times import ANSWER_S, COMPARE_S, LOOK_S, STALLED_S, TICK_S, VERDICT_S
from fastcomm.comm.who import Process
from fastcomm.comm.words import (
    ABORTED,
    CALLED,
    CLOSED,
    DIED,
    DIED_MEETING,
    ENDED,
    MOST_ASKED,
    RAISED,
    Called,
    mismatch,
    waited,
    waits,
)
from fastcomm.errors import (
    AbandonedError,
    FastcommError,
    InitError,
    MismatchError,
    NcclError,
    PeerLostError,
    TimeoutError,
)

NOTHING = Called("", "nothing unfinished")

_KINDS = {
    kind.__name__: kind
    for kind in (FastcommError, InitError, MismatchError, NcclError, PeerLostError, TimeoutError)
}


class Notes(Protocol):
    """Messages between the ranks: keys and values in the store they met at. Raises RuntimeError
    when the store is gone.
    """

    def write(self, key: str, value: str) -> None: ...
    def write_once(self, key: str, value: str) -> str: ...
    def read(self, key: str) -> str | None: ...
    def count(self, key: str) -> int:
        """Adds one to the key's number, which begins at 0, and returns it."""


def leave_note(notes: Notes, key: str, value: str) -> str:
    """Writes a note that all watchdogs read soon. Returns the note that was written first."""
    first = notes.write_once(key, value)
    notes.count("news")
    return first


def leave_abort(notes: Notes, process: Process) -> None:
    """Notes that this rank, which is `process`, has aborted the communicator."""
    with contextlib.suppress(RuntimeError):  # the store is gone, so nobody is left to tell
        error = PeerLostError(f"{process.in_words()} {ABORTED}")
        leave_note(notes, "failure", failure_note(error))


def leave_closing(notes: Notes, rank: int, epoch: int, number: int) -> None:
    """Notes that this rank closes in good order, having launched collective `number`."""
    place = notes.count("n_closed") - 1
    leave_note(notes, f"closed/{place}", json.dumps([rank, epoch, number]))


def leave_abandonment(notes: Notes, epoch: int, n_kept: int, why: str) -> None:
    """Notes that this rank has abandoned a round in that epoch, behind `n_kept` collectives."""
    leave_note(notes, f"abandoned/{epoch}", json.dumps([n_kept, why]))


def leave_last_words(notes: Notes, rank: int, has_raised: bool) -> None:
    """Notes that this rank's process comes to its end, for those who will find it gone."""
    with contextlib.suppress(RuntimeError):  # the store is gone: so are those who would read it
        notes.write(f"ended/{rank}", RAISED if has_raised else ENDED)


class Position(NamedTuple):
    """Where a rank says that it stands. where: its script, if another rank has asked; or empty."""

    number: int
    what: Called
    where: str


class Watched(Protocol):
    """The communicator, as its watchdog sees it. `number` counts its collectives, `epoch` how often
    the ranks have met again.
    """

    rank: int
    world_size: int
    processes: tuple[Process, ...]  # by rank
    number: int
    epoch: int = 0
    leak: str | None = None  # the warning if it is dropped without close()

    def _oldest_unfinished(self) -> tuple[int, float, Called] | None:
        """The oldest collective that has not ended: its number, seconds without progress, and what
        it is.
        """

    def _asynchronous_error(self) -> FastcommError | None: ...
    def _has_graphs(self) -> bool:
        """Whether CUDA graphs may replay collectives: nobody sees those begin or end."""
        return False

    def _fail(self, error: FastcommError) -> None: ...
    def _interrupt(self, error: FastcommError, epoch: int, n_kept: int) -> None:
        """The other ranks have abandoned a round in that epoch. n_kept: how many collectives came
        before it, which all ranks have.
        """
        return  # where the ranks announce that themselves


class Watchdog:
    """Watches one communicator of one rank until `stop`, or until the communicator is gone."""

    def __init__(
        self,
        comm: Watched,
        notes: Notes,
        timeout_s: float,
        peers: Sequence[int],
        whereabouts: Callable[[], str],
        compares: bool = True,
    ) -> None:
        """peers: the ranks on this host, whose processes can be watched. whereabouts: says where
        this process stands. compares: finds ranks that call different collectives. Raises
        PeerLostError if one of the peers is gone already.
        """
        self._comm = weakref.ref(comm)
        self._leak = comm.leak
        self._notes = notes
        self._timeout_s = timeout_s
        self._whereabouts, self._compares = whereabouts, compares
        self._lifelines: dict[int, int] = {}
        for rank in peers:
            if rank != comm.rank:
                self._lifelines[rank] = _open_lifeline(comm.processes[rank])
        self._stopped = threading.Event()
        self._last_look = 0.0
        self._published: tuple[int, int, bool] | None = None
        self._read_at: tuple[str | None, int] | None = None  # the news and the epoch then
        self._is_asked = False
        self._abandoned: str | None = None  # the note about this epoch
        # where the ranks stood that have closed, as far as their notes were read: epoch, number
        self._closed: dict[int, list[int]] = {}
        self._n_closings = 0  # how many of those notes were read
        self._thread = threading.Thread(target=self._run, name="fastcomm watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the watchdog and waits for its thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            comm = self._comm()
            if comm is None:
                if self._leak is not None:
                    warnings.warn(self._leak, ResourceWarning, stacklevel=1)
                break
            try:
                self._tick(comm)
            except (InitError, MismatchError, NcclError, PeerLostError, TimeoutError) as error:
                self.give_up(comm, error)
            except Exception as error:  # the device is broken, or we have a bug
                self.give_up(comm, FastcommError(f"rank {comm.rank}: {error}"))
            del comm
        while self._lifelines:
            os.close(self._lifelines.popitem()[1])

    def _tick(self, comm: Watched) -> None:
        error = comm._asynchronous_error()
        if error is not None:
            self.give_up(comm, self.named(comm, error))
            return
        unfinished = comm._oldest_unfinished()
        stalled = unfinished if unfinished is not None and unfinished[1] > STALLED_S else None
        is_urgent = stalled is not None and (stalled[1] > self._timeout_s or self._dead() != [])
        now = running_s()
        if not is_urgent and now - self._last_look < LOOK_S:
            return
        self._last_look = now
        try:
            self._hear(comm, unfinished)
            if stalled is not None:
                self._judge(comm, *stalled)
            elif comm._has_graphs():
                self._judge_graphs(comm)
        except FastcommError:
            raise
        except RuntimeError as trouble:  # torch's stores raise nothing more specific
            if stalled is not None:
                self._give_up_dead(comm, self._dead(), stalled[2])
                self.give_up(
                    comm,
                    PeerLostError(
                        f"the store the ranks met at is gone; did rank 0's process end? ({trouble})"
                    ),
                )

    def _hear(self, comm: Watched, unfinished: tuple[int, float, Called] | None) -> None:
        """Acts on the other ranks' notes: a failure, a question, an abandoned round."""
        newest = self._notes.read("news"), comm.epoch
        if newest != self._read_at:
            failure = self._notes.read("failure")
            if failure is not None:
                self._publish(comm, unfinished)
                self._fail(comm, failure)
                return
            was_asked, self._is_asked = self._is_asked, self._notes.read("question") is not None
            if self._is_asked and not was_asked:
                self._notes.write(f"here/{comm.rank}", "yes")
            self._abandoned = self._notes.read(f"abandoned/{newest[1]}")
            if not self._closed:
                self._read_closing(comm)
            self._read_at = newest
        if self._is_asked:
            self._publish(comm, unfinished)
        if self._abandoned is not None and newest[1] == comm.epoch:
            n_kept, why = forms.read(
                self._abandoned, (forms.NUMBER, str), "the note of an abandoned round"
            )
            comm._interrupt(AbandonedError(why), newest[1], n_kept)

    def _read_closing(self, comm: Watched) -> bool:
        """Reads the next note of a rank that has closed. Whether there is one."""
        note = self._notes.read(f"closed/{self._n_closings}")
        if note is not None:
            form = range(comm.world_size), forms.NUMBER, forms.NUMBER
            rank, *where = forms.read(note, form, "the note of a rank that has closed")
            self._closed[rank] = where
            self._n_closings += 1
        return note is not None

    def _read_closings(self, comm: Watched) -> None:
        while self._read_closing(comm):
            pass

    def closed(self, comm: Watched) -> list[int]:
        """The ranks that have closed in good order, as far as the store tells."""
        with contextlib.suppress(RuntimeError):
            self._read_closings(comm)
        return sorted(self._closed)

    def misses_a_rank(self, comm: Watched) -> bool:
        """Whether another rank is gone, or goes, otherwise than by closing in good order."""
        with contextlib.suppress(RuntimeError):
            has_failed = self._notes.read("failure") is not None
            return has_failed or not set(self._dead()) <= set(self.closed(comm))
        return False

    def _judge(self, comm: Watched, number: int, age: float, what: Called) -> None:
        """Finds out whether a collective that has not ended for a while ever will."""
        if self._stopped.is_set():
            return
        dead = self._dead()
        if dead or age > COMPARE_S:
            self._read_closings(comm)
        for rank, where in self._closed.items():
            if where < [comm.epoch, number]:
                message = (
                    f"{comm.processes[rank].in_words()} {CLOSED}; {waits(comm.rank, number, what)}"
                )
                self.give_up(comm, PeerLostError(message))
                return
        self._give_up_dead(comm, dead, what)
        if age > COMPARE_S:
            self._publish(comm, (number, age, what))
            if self._compares:
                self._compare(comm, number, what)
        if age > self._timeout_s:
            self._time_out(comm, number, what)

    def _judge_graphs(self, comm: Watched) -> None:
        dead = self._dead()
        if dead:
            self._read_closings(comm)
        self._give_up_dead(comm, dead, "what its CUDA graphs replay")

    def _dead(self, patience_s: float = 0) -> list[int]:
        """The ranks of this host whose processes have ended. Asks nobody."""
        ready = select.poll()
        for lifeline in self._lifelines.values():
            ready.register(lifeline, select.POLLIN)
        ended = {fd for fd, _ in ready.poll(1e3 * patience_s)}
        return [rank for rank, lifeline in self._lifelines.items() if lifeline in ended]

    def _give_up_dead(self, comm: Watched, ended: list[int], what: object) -> None:
        """Gives up if a rank in `ended` has died, and had not closed in good order."""
        dead = [rank for rank in ended if rank not in self._closed]
        if dead:
            message = f"{self._gone(comm, dead)}; rank {comm.rank} waits for {what}"
            self.give_up(comm, PeerLostError(message, dead))

    def named(self, comm: Watched, error: FastcommError) -> FastcommError:
        """NCCL's error. If NCCL has lost a rank of this host, names it: a process closes its
        connections a moment before it ends.
        """
        is_nameless = isinstance(error, PeerLostError) and not error.ranks
        ended = self._dead(LOOK_S) if is_nameless else []
        dead = [rank for rank in ended if rank not in self._closed]
        return PeerLostError(f"{self._gone(comm, dead)}; {error}", dead) if dead else error

    def _gone(self, comm: Watched, dead: list[int]) -> str:
        return ", ".join(
            f"{comm.processes[rank].in_words()} {self._last_words_of(rank)}" for rank in dead
        )

    def _last_words_of(self, rank: int) -> str:
        """How its process has ended."""
        with contextlib.suppress(RuntimeError):
            return self._notes.read(f"ended/{rank}") or DIED
        return DIED

    def _publish(self, comm: Watched, unfinished: tuple[int, float, Called] | None) -> None:
        """Tells the others where this rank stands, once per position; when they have asked, also
        where its script does.
        """
        number, what = (
            (comm.number, NOTHING) if unfinished is None else (unfinished[0], unfinished[2])
        )
        if self._published != (comm.epoch, number, self._is_asked):
            self._published = comm.epoch, number, self._is_asked
            where = self._whereabouts() if self._is_asked else ""
            position = json.dumps(Position(number, what, where))
            with contextlib.suppress(RuntimeError):
                self._notes.write(f"position/{comm.epoch}/{comm.rank}", position)

    def _compare(self, comm: Watched, number: int, what: Called) -> None:
        """With rank 0 only, so that the store need not answer every rank about every other."""
        first = self._position_of(comm, 0)
        if first is not None and first.number == number and first.what not in (what, NOTHING):
            self.give_up(comm, mismatch(number, {0: first.what, comm.rank: what}))

    def _position_of(self, comm: Watched, rank: int) -> Position | None:
        """Where the rank says it stands: only advice, so one that cannot be read is none."""
        note = self._notes.read(f"position/{comm.epoch}/{rank}")
        if note is None:
            return None
        try:
            form = forms.NUMBER, CALLED, str
            number, what, where = forms.read(note, form, f"position/{rank}")
        except FastcommError:
            return None
        return Position(number, Called(*what), where)

    def _time_out(self, comm: Watched, number: int, what: Called) -> None:
        self._publish(comm, (number, self._timeout_s, what))  # the rank that asks reads it
        try:
            is_asker = self._notes.write_once("asker", str(comm.rank)) == str(comm.rank)
            if not is_asker and self._await_verdict(comm):
                return
            found = self._missing(comm, number, what, ANSWER_S if is_asker else 0)
        except RuntimeError:
            found = "the store is gone, too"
        message = f"{waited(self._timeout_s)}; {waits(comm.rank, number, what)}; {found}"
        self.give_up(comm, TimeoutError(message))

    def _missing(self, comm: Watched, number: int, what: Called, patience_s: float) -> str:
        """In words, which ranks have not come to the collective, and where they stand."""
        late = {
            rank: position
            for rank, position in self._ask_around(comm, patience_s).items()
            if position is None or position.number < number or position.what != what
        }
        missing = "; ".join(
            f"{comm.processes[rank].in_words()}: {_standing(position)}"
            for rank, position in late.items()
        )
        where = [
            f"\nrank {rank}: {position.where}"
            for rank, position in itertools.islice(late.items(), MOST_ASKED)
            if position is not None and position.where
        ]
        return f"missing: {missing or 'no rank'}{''.join(where)}"

    def _await_verdict(self, comm: Watched) -> bool:
        """One rank asks around, or the store had to answer every rank about every other. Whether
        that rank has come to an end.
        """
        deadline = Deadline(ANSWER_S + VERDICT_S)
        while not deadline.is_over():
            failure = self._notes.read("failure")
            if failure is not None:
                self._fail(comm, failure)
                return True
            time.sleep(TICK_S)
        return False

    def _ask_around(self, comm: Watched, patience_s: float) -> dict[int, Position | None]:
        """Asks where the other ranks stand: each answers when it next reads the notes. Of one that
        does not, the position that it has told before, if any.
        """
        leave_note(self._notes, "question", "where are you?")
        deadline = Deadline(patience_s)
        others: dict[int, Position | None] = dict.fromkeys(
            rank for rank in range(comm.world_size) if rank != comm.rank
        )
        while True:
            time.sleep(TICK_S)
            others = {
                rank: position if _is_answer(position) else self._position_of(comm, rank)
                for rank, position in others.items()
            }
            if all(map(_is_answer, others.values())) or deadline.is_over():
                return others

    def give_up(self, comm: Watched, error: FastcommError) -> None:
        """Ends the communicator here and tells the others why. All ranks raise the failure that was
        reported first.
        """
        if self._stopped.is_set():
            return
        with contextlib.suppress(RuntimeError):
            first = leave_note(self._notes, "failure", failure_note(error))
            error = _failure_of(first, comm.world_size)
        self._stopped.set()
        comm._fail(error)

    def _fail(self, comm: Watched, failure: str) -> None:
        """Ends the communicator with what another rank has noted."""
        comm._fail(_failure_of(failure, comm.world_size))
        self._stopped.set()


def failure_note(error: FastcommError) -> str:
    """The text of the note "failure": every rank that reads it raises the same error."""
    ranks, differs = getattr(error, "ranks", ()), getattr(error, "differs", "")
    return json.dumps([type(error).__name__, str(error), ranks, differs])


def _failure_of(note: str, world_size: int) -> FastcommError:
    """The error in a note. One that cannot be read is a failure all the same."""
    try:
        form = str, str, [range(world_size)], str
        kind, message, lost, differs = forms.read(note, form, "the note of a failure")
    except FastcommError as unreadable:
        return unreadable
    error = PeerLostError(message, lost) if lost else _KINDS.get(kind, FastcommError)(message)
    if isinstance(error, MismatchError):
        error.differs = differs
    return error


def _open_lifeline(peer: Process) -> int:
    try:
        return os.pidfd_open(peer.pid)
    except ProcessLookupError as error:
        raise PeerLostError(f"{peer.in_words()} {DIED_MEETING}", [peer.rank]) from error


def _is_answer(position: Position | None) -> bool:
    return position is not None and bool(position.where)


def _standing(position: Position | None) -> str:
    if position is None:
        return "does not answer"
    return f"is at number {position.number}, {position.what}"
