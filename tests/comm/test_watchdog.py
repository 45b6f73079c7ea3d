"""What a watchdog takes for a failure and what not: one watchdog with a communicator and notes that
the test makes up.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcomm.comm import deadline, watchdog
from fastcomm.comm.watchdog import Watchdog, failure_note, leave_note
from fastcomm.comm.who import processes_of
from fastcomm.comm.words import CALLS, Called, mismatch
from fastcomm.errors import FastcommError, MismatchError, PeerLostError, TimeoutError
from fastcomm.postmortem.whereabouts import whereabouts
from tests.support.damage import damaged_json

PAUSE_S = 0.15  # many ticks
ALL_REDUCE, BARRIER = Called("all_reduce", "all_reduce of 10"), Called("barrier", "barrier")


class Notes(dict):
    """The store the ranks met at."""

    is_gone = False

    def write(self, key: str, value: str) -> None:
        self[key] = value

    def write_once(self, key: str, value: str) -> str:
        return self.setdefault(key, value)

    def read(self, key: str) -> str | None:
        if self.is_gone:
            raise RuntimeError("connection reset")
        return self.get(key)

    def count(self, key: str) -> int:
        self[key] = str(int(self.get(key, "0")) + 1)
        return int(self[key])


class Communicator:
    """Rank 1 of 2. unfinished: what it waits for, as number, seconds and description."""

    rank, world_size, leak = 1, 2, None

    def __init__(self, pid: int = 0) -> None:
        self.processes = processes_of((pid, os.getpid()))
        self.number, self.epoch = 5, 0
        self.unfinished: tuple[int, float, Called] | None = None
        self.trouble: FastcommError | None = None
        self.has_graphs = False
        self.failure: FastcommError | None = None
        self.interruptions: list[tuple[str, int, int]] = []

    def _oldest_unfinished(self) -> tuple[int, float, Called] | None:
        return self.unfinished

    def _asynchronous_error(self) -> FastcommError | None:
        return self.trouble

    def _has_graphs(self) -> bool:
        return self.has_graphs

    def _fail(self, error: FastcommError) -> None:
        self.failure = error

    def _interrupt(self, error: FastcommError, epoch: int, n_kept: int) -> None:
        self.interruptions.append((str(error), epoch, n_kept))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdogs look, compare and ask within a test's time."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.005)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.03)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.1)


@contextlib.contextmanager
def watching(comm: Any, notes: Notes, peers: tuple[int, ...] = ()) -> Iterator[None]:
    one = Watchdog(comm, notes, 60, peers, whereabouts)
    try:
        yield
    finally:
        one.stop()


def failure_of(
    comm: Communicator, notes: Notes, peers: tuple[int, ...] = (), within: float = 10
) -> FastcommError | None:
    """What the watchdog has ended the communicator with, if it does so in time."""
    with watching(comm, notes, peers):
        wait_until(lambda: comm.failure is not None, within)
    return comm.failure


def wait_until(is_so: Callable[[], bool], within: float = 10) -> None:
    """Or until the time is up."""
    deadline = time.monotonic() + within
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)


@contextlib.contextmanager
def process() -> Iterator[int]:
    """The pid of one that runs until somebody kills it."""
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child.pid
        child.kill()


def waiting(age: float, number: int = 5) -> Communicator:
    comm = Communicator()
    comm.unfinished = number, age, ALL_REDUCE
    return comm


# Peers that have closed


@pytest.mark.parametrize(
    "age, epoch, closing, is_lost",
    [
        (0.5, 0, "[0, 0, 4]", True),
        (0.5, 0, "[0, 0, 5]", False),  # it has launched the same
        (0.5, 1, "[0, 0, 9]", True),  # in an earlier epoch
        (0.1, 0, "[0, 0, 4]", False),  # the collective has only begun
    ],
)
def test_a_peer_that_closed_is_lost_to_what_it_has_not_launched(
    age: float, epoch: int, closing: str, is_lost: bool
) -> None:
    comm = waiting(age)
    comm.epoch = epoch
    failure = failure_of(comm, Notes({"closed/0": closing}), within=10 if is_lost else PAUSE_S)
    assert isinstance(failure, PeerLostError) == is_lost
    assert not is_lost or "rank 0 (pid 0) closed" in str(failure)


def test_a_peer_that_closed_after_another_had_is_found_when_ranks_compare() -> None:
    notes = Notes({"closed/0": "[0, 0, 5]", "closed/1": "[2, 0, 4]"})
    comm = waiting(3)
    comm.world_size, comm.processes = 3, processes_of((0, os.getpid(), 22))
    assert "rank 2 (pid 22) closed" in str(failure_of(comm, notes))


def test_a_peer_whose_process_has_ended_after_it_had_closed_has_closed() -> None:
    with process() as pid:
        comm = waiting(0.5)
        comm.processes = processes_of((pid, os.getpid()))
        notes = Notes()
        with watching(comm, notes, (0, 1)):
            time.sleep(PAUSE_S)
            watchdog.leave_closing(notes, 0, 0, 4)
            os.kill(pid, 9)
            wait_until(lambda: comm.failure is not None)
    assert f"rank 0 (pid {pid}) closed" in str(comm.failure)


# Ranks that call different collectives


def position(number: int, what: Called) -> Notes:
    return Notes({"position/0/0": json.dumps([number, what, "its main thread stands at"])})


def test_another_collective_under_the_same_number_is_a_mismatch() -> None:
    failure = failure_of(waiting(3), position(5, BARRIER))
    assert isinstance(failure, MismatchError)
    assert "rank 0: barrier; rank 1: all_reduce of 10" in str(failure)


@pytest.mark.parametrize(
    "age, number, what",
    [(3, 5, watchdog.NOTHING), (3, 4, BARRIER), (3, 5, ALL_REDUCE), (1, 5, BARRIER)],
)
def test_a_rank_that_is_idle_elsewhere_alike_or_soon_here_is_no_mismatch(
    age: float, number: int, what: Called
) -> None:
    assert failure_of(waiting(age), position(number, what), within=PAUSE_S) is None


# Processes


@pytest.mark.parametrize("waits_for", ["a collective", "graphs"])
def test_a_process_that_has_ended_is_found(waits_for: str) -> None:
    with process() as pid:
        comm = Communicator(pid)
        comm.has_graphs = waits_for == "graphs"
        comm.unfinished = None if comm.has_graphs else (5, 0.5, ALL_REDUCE)
        with watching(comm, Notes(), (0, 1)):
            time.sleep(PAUSE_S)
            assert comm.failure is None
            os.kill(pid, 9)
            wait_until(lambda: comm.failure is not None)
    assert isinstance(comm.failure, PeerLostError) and comm.failure.ranks == (0,)
    assert f"rank 0 (pid {pid}) died" in str(comm.failure)


@pytest.mark.parametrize(
    "has_raised, words", [(True, "ended by an exception, which"), (False, "ended without close()")]
)
def test_a_process_that_has_ended_may_have_said_how(has_raised: bool, words: str) -> None:
    notes = Notes()
    with process() as pid:
        comm = waiting(0.5)
        comm.processes = processes_of((pid, os.getpid()))
        with watching(comm, notes, (0, 1)):
            watchdog.leave_last_words(notes, 0, has_raised)
            os.kill(pid, 9)
            wait_until(lambda: comm.failure is not None)
    assert isinstance(comm.failure, PeerLostError) and comm.failure.ranks == (0,)
    assert f"rank 0 (pid {pid}) {words}" in str(comm.failure)


def test_graphs_need_no_rank_that_has_closed_in_good_order() -> None:
    with process() as pid:
        comm = Communicator(pid)
        comm.has_graphs = True
        with watching(comm, Notes({"closed/0": "[0, 0, 5]"}), (0, 1)):
            os.kill(pid, 9)
            time.sleep(PAUSE_S)
    assert comm.failure is None


def test_a_process_that_was_gone_before_is_an_error_at_once() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    with pytest.raises(PeerLostError, match=rf"rank 0 \(pid {child.pid}\) died while the ranks"):
        Watchdog(Communicator(child.pid), Notes(), 60, (0, 1), whereabouts)


# Notes


def test_what_another_rank_has_failed_with_is_raised_here_too() -> None:
    note = watchdog.failure_note(PeerLostError("rank 0 died", [0]))
    failure = failure_of(Communicator(), Notes({"failure": note}))
    assert isinstance(failure, PeerLostError) and failure.ranks == (0,)
    note = watchdog.failure_note(mismatch(5, {0: BARRIER, 1: BARRIER._replace(words="step")}))
    failure = failure_of(Communicator(), Notes({"failure": note}))
    assert isinstance(failure, MismatchError) and failure.differs == CALLS


def test_the_first_failure_that_was_noted_is_what_all_raise() -> None:
    notes = Notes()
    notes["failure"] = watchdog.failure_note(TimeoutError("rank 0 was first"))
    comm = Communicator()
    comm.trouble = FastcommError("of this rank")
    assert str(failure_of(comm, notes)) == "rank 0 was first"


def test_an_error_of_the_device_ends_the_communicator_and_is_noted() -> None:
    notes, comm = Notes(), Communicator()
    comm.trouble = PeerLostError("remote error")
    assert "remote error" in str(failure_of(comm, notes))
    assert "remote error" in notes["failure"]


def test_an_abandonment_is_heard_in_its_epoch_alone() -> None:
    comm = Communicator()
    comm.epoch = 2
    notes = Notes({"abandoned/1": '[3, "long ago"]', "abandoned/2": '[7, "rank 0 abandoned"]'})
    with watching(comm, notes):
        wait_until(lambda: len(comm.interruptions) > 1)
    assert set(comm.interruptions) == {("rank 0 abandoned", 2, 7)}


def test_a_rank_that_is_asked_says_where_it_stands() -> None:
    notes, comm = Notes({"question": "where are you?"}), Communicator()
    with watching(comm, notes):
        wait_until(lambda: "position/0/1" in notes)
        assert json.loads(notes["position/0/1"])[:2] == [5, list(watchdog.NOTHING)]
        comm.number = 6
        wait_until(lambda: json.loads(notes["position/0/1"])[0] == 6)
    number, what, where = json.loads(notes["position/0/1"])
    assert (number, what) == (6, list(watchdog.NOTHING))
    assert "test_a_rank_that_is_asked_says_where_it_stands" in where


def test_a_store_that_is_gone_is_an_error_for_those_who_wait_alone() -> None:
    notes = Notes()
    notes.is_gone = True
    assert failure_of(Communicator(), notes, within=PAUSE_S) is None
    failure = failure_of(waiting(0.5), notes)
    assert isinstance(failure, PeerLostError) and "did rank 0's process end?" in str(failure)


# Deadlines


def test_a_deadline_names_the_ranks_that_are_behind_or_elsewhere() -> None:
    failure = failure_of(waiting(61), position(4, BARRIER))
    assert isinstance(failure, TimeoutError)
    assert "missing: rank 0 (pid 0): is at number 4, barrier" in str(failure)
    assert str(failure).endswith("\nrank 0: its main thread stands at")


@pytest.mark.parametrize(
    "notes, says",
    [
        (position(5, ALL_REDUCE), "missing: no rank"),  # it has come as far
        (Notes(), "rank 0 (pid 0): does not answer"),
    ],
)
def test_a_deadline_names_who_does_not_answer_and_nobody_else(notes: Notes, says: str) -> None:
    assert says in str(failure_of(waiting(61), notes))


def test_one_rank_asks_around_for_all() -> None:
    notes = Requests({"asker": "0"})
    comm = waiting(61)
    comm.world_size, comm.processes = 8, processes_of(range(8))
    verdict = watchdog.failure_note(TimeoutError("missing: rank 7"))
    with watching(comm, notes):
        wait_until(lambda: notes.n_of["failure"] > 3)
        watchdog.leave_note(notes, "failure", verdict)
        wait_until(lambda: comm.failure is not None)
    assert str(comm.failure) == "missing: rank 7"
    assert notes.n_of["position/0/7"] == 0


def test_a_rank_asks_itself_when_the_one_that_asks_does_not_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "VERDICT_S", 0.05)
    failure = failure_of(waiting(61), Notes({"asker": "0", **position(4, BARRIER)}))
    assert isinstance(failure, TimeoutError) and "is at number 4, barrier" in str(failure)


# What all ranks together ask of the store. One tick of each rank after the other, by a clock of the
# test's own.

WORLD_SIZE = 256


class Requests(Notes):
    """Counts what the store has to answer, by key: one request to ask for a note, and another to
    fetch it.
    """

    def __init__(self, *notes: dict[str, str]) -> None:
        super().__init__(*notes)
        self.n_of: collections.Counter[str] = collections.Counter()

    @property
    def n(self) -> int:
        return self.n_of.total()

    def write(self, key: str, value: str) -> None:
        self.n_of[key] += 1
        super().write(key, value)

    def write_once(self, key: str, value: str) -> str:
        self.n_of[key] += 1
        return super().write_once(key, value)

    def read(self, key: str) -> str | None:
        self.n_of[key] += 1 + (key in self)
        return super().read(key)

    def count(self, key: str) -> int:
        self.n_of[key] += 1
        return super().count(key)


class Clock:
    """In place of the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class World:
    """All ranks, and the store they met at. Nothing ends what they wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(watchdog, "TICK_S", 0.1)
        monkeypatch.setattr(watchdog, "LOOK_S", 0.2)
        monkeypatch.setattr(watchdog, "time", self.clock)
        monkeypatch.setattr(deadline, "time", self.clock)
        monkeypatch.setattr(deadline, "_looked", (self.clock.now, 0.0))
        monkeypatch.setattr(Watchdog, "_run", lambda self: None)  # the test calls _tick
        self.notes = Requests()
        self.comms: list[Any] = []
        for rank in range(WORLD_SIZE):
            comm: Any = Communicator()
            comm.rank, comm.world_size = rank, WORLD_SIZE
            comm.processes = processes_of(range(WORLD_SIZE))
            self.comms.append(comm)
        self.watchdogs = [Watchdog(comm, self.notes, 60, (), whereabouts) for comm in self.comms]

    def requests_in(
        self, seconds: float, age: float | None = None, ranks: Sequence[int] = range(WORLD_SIZE)
    ) -> int:
        """How many while these ranks wait for collectives that are so old, and launch more."""
        before = self.notes.n
        for _ in range(round(seconds / 0.1)):
            for rank in ranks:
                comm = self.comms[rank]
                comm.number += 1
                comm.unfinished = None if age is None else (comm.number - 4, age, ALL_REDUCE)
                if not self.watchdogs[rank]._stopped.is_set():
                    self.watchdogs[rank]._tick(comm)
            self.clock.now += 0.1
        return self.notes.n - before


def test_256_ranks_ask_as_little_when_their_hosts_run_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.requests_in(1)
    idle = world.requests_in(2)
    assert idle <= 2 * 5 * WORLD_SIZE
    for age in (0.3, 1.0, 1.9):
        assert world.requests_in(2, age) == idle
    # From then on they say where they stand, compare it with rank 0 alone, and look who has closed.
    for age in (2.5, 30.0):
        assert world.requests_in(2, age) <= 5 * idle
    assert all(comm.failure is None for comm in world.comms)


def test_256_ranks_that_time_out_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.requests_in(1, 3.0)
    world.notes.n_of.clear()
    world.requests_in(0.2, 61.0)
    assert all(isinstance(comm.failure, TimeoutError) for comm in world.comms)
    assert world.notes.n <= 16 * WORLD_SIZE


# ---- notes that are damaged ----------------------------------------------------------------------

REAL_NOTES: dict[str, Any] = {
    "failure": ["PeerLostError", "rank 0 (pid 7) died", [0], ""],
    "abandoned/0": [3, "rank 0 abandoned what was under way"],
    "closed/0": [0, 0, 4],
    "position/0/0": [5, ALL_REDUCE, ""],
}


@pytest.mark.parametrize("key", REAL_NOTES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_note_is_a_failure_or_is_ignored(key, data):
    """In no case does the watchdog end without a word: then the rank would wait for ever."""
    note = data.draw(damaged_json(REAL_NOTES[key])).decode(errors="replace")
    comm = waiting(age=3)
    notes = Notes({key: note, "news": "1"})
    with watching(comm, notes):
        wait_until(lambda: comm.failure is not None, within=0.05)
        leave_note(notes, "failure", failure_note(MismatchError("of another rank")))
        wait_until(lambda: comm.failure is not None)
    assert isinstance(comm.failure, FastcommError)
    says = str(comm.failure)
    is_named = " cannot be read: " in says
    assert is_named or "of another rank" in says or key != "abandoned/0", says


def test_ranks_that_have_closed_twice_do_not_hold_up_the_watchdog():
    notes = Notes({"closed/0": "[0, 0, 9]", "closed/1": "[0, 0, 9]", "news": "1"})
    comm = waiting(age=3)
    with watching(comm, notes):
        wait_until(lambda: comm.failure is not None, within=0.1)
        leave_note(notes, "failure", failure_note(MismatchError("of another rank")))
        wait_until(lambda: comm.failure is not None)
    assert "of another rank" in str(comm.failure)
