"""Watchdog: a thread that notices when collectives on a GPU will never end, says why, and ends
them.

NCCL waits for ever for a rank that died, closed its communicator, left a backward with an exception
or calls something else. The host that launched the collective does not wait at all. So each rank's
watchdog looks at what is unfinished, at its peers' processes, and at short notes that the ranks
leave each other in the store they met at. It owns no communicator and knows nothing of CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from fastcomm.errors import (
    CLOSED,
    AbandonedError,
    FastcommError,
    InitError,
    MismatchError,
    NcclError,
    PeerLostError,
    TimeoutError,
)

TICK_S = 0.1
STALLED_S = 0.2  # a collective that takes longer makes the watchdog read the peers' notes
LOOK_S = 1.0  # how often it reads them when nothing is amiss
COMPARE_S = 2.0  # after so long the ranks compare what they are waiting for
ANSWER_S = 2.5  # how long a rank that times out waits for the others' positions: longer than LOOK_S

NOTHING = "nothing unfinished"

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


class Watched(Protocol):
    """The communicator, as its watchdog sees it. `number` counts its collectives, `epoch` how often
    the ranks have met again.
    """

    rank: int
    world_size: int
    leak: str | None  # the warning if it is dropped without close()
    pids: tuple[int, ...]
    number: int
    epoch: int

    def _oldest_unfinished(self) -> tuple[int, float, str] | None:
        """The oldest collective that has not ended: its number, seconds without progress, and its
        description.
        """

    def _asynchronous_error(self) -> FastcommError | None: ...
    def _has_graphs(self) -> bool:
        """Whether CUDA graphs may replay collectives: nobody sees those begin or end."""

    def _fail(self, error: FastcommError) -> None: ...
    def _interrupt(self, error: FastcommError, epoch: int) -> None: ...
    def _enter_thread(self) -> None: ...


class Watchdog:
    """Watches one communicator of one rank until `stop`, or until the communicator is gone."""

    def __init__(self, comm: Watched, notes: Notes, timeout_s: float, peers: Sequence[int]) -> None:
        """peers: the ranks on this host, whose processes can be watched. Raises PeerLostError if
        one of them is gone already.
        """
        self._comm = weakref.ref(comm)
        self._leak = comm.leak
        self._notes = notes
        self._timeout_s = timeout_s
        self._lifelines: dict[int, int] = {}
        for rank in peers:
            if rank != comm.rank:
                self._lifelines[rank] = _open_lifeline(comm, rank)
        self._stopped = threading.Event()
        self._last_look = 0.0
        self._published: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="fastcomm watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the watchdog and waits for its thread."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        is_new = True
        while not self._stopped.wait(TICK_S):
            comm = self._comm()
            if comm is None:
                if self._leak is not None:
                    warnings.warn(self._leak, ResourceWarning, stacklevel=1)
                break
            try:
                if is_new:
                    comm._enter_thread()
                    is_new = False
                self._tick(comm)
            except (InitError, MismatchError, NcclError, PeerLostError, TimeoutError) as error:
                self.give_up(comm, error)
            except Exception as error:  # the device is broken, or we have a bug
                self.give_up(comm, FastcommError(f"rank {comm.rank}: {error}"))
            del comm
        for lifeline in self._lifelines.values():
            os.close(lifeline)

    def _tick(self, comm: Watched) -> None:
        error = comm._asynchronous_error()
        if error is not None:
            self.give_up(comm, error)
            return
        unfinished = comm._oldest_unfinished()
        stalled = unfinished if unfinished is not None and unfinished[1] > STALLED_S else None
        now = time.monotonic()
        if stalled is None and now - self._last_look < LOOK_S:
            return
        self._last_look = now
        try:
            self._read_notes(comm, unfinished)
            if stalled is not None:
                self._judge(comm, *stalled)
            elif comm._has_graphs():
                self._look_at_processes(comm, "what its CUDA graphs replay")
        except FastcommError:
            raise
        except RuntimeError as trouble:  # torch's stores raise nothing more specific
            if stalled is not None:
                self._look_at_processes(comm, stalled[2])
                self.give_up(
                    comm,
                    PeerLostError(
                        f"the store the ranks met at is gone; did rank 0's process end? ({trouble})"
                    ),
                )

    def _read_notes(self, comm: Watched, unfinished: tuple[int, float, str] | None) -> None:
        """Acts on the other ranks' notes: a failure, a question, an abandoned round."""
        failure = self._notes.read("failure")
        if failure is not None:
            self._publish(comm, unfinished)
            comm._fail(_failure_of(failure))
            self._stopped.set()
            return
        if self._notes.read("question") is not None:
            self._publish(comm, unfinished)
        epoch = comm.epoch
        abandoned = self._notes.read(f"abandoned/{epoch}")
        if abandoned is not None:
            comm._interrupt(AbandonedError(abandoned), epoch)

    def _judge(self, comm: Watched, number: int, age: float, what: str) -> None:
        """Finds out whether a collective that has not ended for a while ever will."""
        if self._stopped.is_set():
            return
        self._look_at_processes(comm, what)
        for rank in range(comm.world_size):
            closed = None if rank == comm.rank else self._notes.read(f"closed/{rank}")
            if closed is not None and json.loads(closed) < [comm.epoch, number]:
                self.give_up(
                    comm,
                    PeerLostError(
                        f"{_of(comm, rank)} {CLOSED}; {_position(comm.rank, number, what)}"
                    ),
                )
                return
        if age > COMPARE_S:
            self._publish(comm, (number, age, what))
            self._compare(comm, number, what)
        if age > self._timeout_s:
            self._time_out(comm, number, what)

    def _has_closed(self, rank: int) -> bool:
        """Whether the rank is known to have closed in good order."""
        with contextlib.suppress(RuntimeError):  # the store may be gone
            return self._notes.read(f"closed/{rank}") is not None
        return False

    def _look_at_processes(self, comm: Watched, what: str) -> None:
        ready = select.poll()
        for lifeline in self._lifelines.values():
            ready.register(lifeline, select.POLLIN)
        ended = {fd for fd, _ in ready.poll(0)}
        dead = [
            rank
            for rank, lifeline in self._lifelines.items()
            if lifeline in ended and not self._has_closed(rank)
        ]
        if dead:
            self.give_up(
                comm,
                PeerLostError(
                    f"{', '.join(_of(comm, rank) for rank in dead)} died; rank {comm.rank} waits "
                    f"for {what}",
                    dead,
                ),
            )

    def _publish(self, comm: Watched, unfinished: tuple[int, float, str] | None) -> None:
        """Tells the others where this rank stands, once per position."""
        number, what = (
            (comm.number, NOTHING) if unfinished is None else (unfinished[0], unfinished[2])
        )
        if self._published != (comm.epoch, number):
            self._published = comm.epoch, number
            with contextlib.suppress(RuntimeError):
                self._notes.write(f"position/{comm.epoch}/{comm.rank}", json.dumps([number, what]))

    def _compare(self, comm: Watched, number: int, what: str) -> None:
        """With rank 0 only, so that the store need not answer every rank about every other."""
        first = self._position_of(comm, 0)
        if first is not None and first[0] == number and first[1] not in (what, NOTHING):
            message = (
                f"the ranks call different collectives (number {number} on this communicator): "
                f"rank 0: {first[1]}; rank {comm.rank}: {what}"
            )
            self.give_up(comm, MismatchError(message))

    def _position_of(self, comm: Watched, rank: int) -> list[Any] | None:
        note = self._notes.read(f"position/{comm.epoch}/{rank}")
        return None if note is None else json.loads(note)

    def _time_out(self, comm: Watched, number: int, what: str) -> None:
        self._publish(comm, (number, self._timeout_s, what))  # others time out, too, and ask
        with contextlib.suppress(RuntimeError):
            others = self._ask_around(comm)
            late = [
                rank
                for rank, position in others.items()
                if position is None or position[0] < number or position[1] != what
            ]
            where = "; ".join(f"{_of(comm, rank)}: {_last_words(others[rank])}" for rank in late)
            self.give_up(
                comm,
                TimeoutError(
                    f"waited {self._timeout_s:g} s; {_position(comm.rank, number, what)}; "
                    f"missing: {where or 'no rank'}"
                ),
            )
            return
        self.give_up(
            comm,
            TimeoutError(
                f"waited {self._timeout_s:g} s; {_position(comm.rank, number, what)}; the store "
                "is gone, too"
            ),
        )

    def _ask_around(self, comm: Watched) -> dict[int, list[Any] | None]:
        """Asks where the other ranks stand. A rank that is not stalled itself answers when it next
        reads the notes.
        """
        self._notes.write_once("question", "where are you?")
        deadline = time.monotonic() + ANSWER_S
        others: dict[int, list[Any] | None] = dict.fromkeys(
            rank for rank in range(comm.world_size) if rank != comm.rank
        )
        while None in others.values() and time.monotonic() < deadline:
            time.sleep(TICK_S)
            others = {
                rank: position or self._position_of(comm, rank) for rank, position in others.items()
            }
        return others

    def give_up(self, comm: Watched, error: FastcommError) -> None:
        """Ends the communicator here and tells the others why. All ranks raise the failure that was
        reported first.
        """
        if self._stopped.is_set():
            return
        with contextlib.suppress(RuntimeError):
            error = _failure_of(self._notes.write_once("failure", failure_note(error)))
        self._stopped.set()
        comm._fail(error)


def failure_note(error: FastcommError) -> str:
    """The text of the note "failure": every rank that reads it raises the same error."""
    return json.dumps([type(error).__name__, str(error), getattr(error, "ranks", ())])


def _failure_of(note: str) -> FastcommError:
    kind, message, lost = json.loads(note)
    return PeerLostError(message, lost) if lost else _KINDS[kind](message)


def _open_lifeline(comm: Watched, rank: int) -> int:
    try:
        return os.pidfd_open(comm.pids[rank])
    except ProcessLookupError as error:
        raise PeerLostError(f"{_of(comm, rank)} died while the ranks met", [rank]) from error


def _of(comm: Watched, rank: int) -> str:
    return f"rank {rank} (pid {comm.pids[rank]})"


def _position(rank: int, number: int, what: str) -> str:
    return f"rank {rank} waits for collective number {number}, {what}"


def _last_words(position: list[Any] | None) -> str:
    return "does not answer" if position is None else f"is at number {position[0]}, {position[1]}"
