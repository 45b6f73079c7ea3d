"""What a watchdog takes for a failure and what not: one watchdog with a communicator and notes that
the test makes up.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastcomm import watchdog
from fastcomm.errors import FastcommError, MismatchError, PeerLostError, TimeoutError
from fastcomm.watchdog import Watchdog

PAUSE_S = 0.15  # many ticks


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


class Communicator:
    """Rank 1 of 2. unfinished: what it waits for, as number, seconds and description."""

    rank, world_size, leak = 1, 2, None

    def __init__(self, pid: int = 0) -> None:
        self.pids = (pid, os.getpid())
        self.number, self.epoch = 5, 0
        self.unfinished: tuple[int, float, str] | None = None
        self.trouble: FastcommError | None = None
        self.has_graphs = False
        self.failure: FastcommError | None = None
        self.interruptions: list[tuple[str, int]] = []

    def _oldest_unfinished(self) -> tuple[int, float, str] | None:
        return self.unfinished

    def _asynchronous_error(self) -> FastcommError | None:
        return self.trouble

    def _has_graphs(self) -> bool:
        return self.has_graphs

    def _fail(self, error: FastcommError) -> None:
        self.failure = error

    def _interrupt(self, error: FastcommError, epoch: int) -> None:
        self.interruptions.append((str(error), epoch))

    def _enter_thread(self) -> None:
        pass


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdogs look, compare and ask within a test's time."""
    monkeypatch.setattr(watchdog, "TICK_S", 0.005)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.03)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.1)


@contextlib.contextmanager
def watching(comm: Any, notes: Notes, peers: tuple[int, ...] = ()) -> Iterator[None]:
    one = Watchdog(comm, notes, 60, peers)
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
    comm.unfinished = number, age, "all_reduce of 10"
    return comm


# Peers that have closed


def test_a_peer_that_closed_before_a_collective_is_lost_to_it() -> None:
    failure = failure_of(waiting(0.5), Notes({"closed/0": "[0, 4]"}))
    assert isinstance(failure, PeerLostError) and "rank 0 (pid 0) closed" in str(failure)


def test_a_peer_that_closed_after_it_has_launched_the_same_is_not_lost() -> None:
    assert failure_of(waiting(0.5), Notes({"closed/0": "[0, 5]"}), within=PAUSE_S) is None


def test_a_peer_that_closed_in_an_earlier_epoch_is_lost() -> None:
    comm = waiting(0.5)
    comm.epoch = 1
    assert isinstance(failure_of(comm, Notes({"closed/0": "[0, 9]"})), PeerLostError)


def test_nobody_is_lost_to_a_collective_that_has_only_begun() -> None:
    notes = Notes({"closed/0": "[0, 4]"})
    assert failure_of(waiting(0.1), notes, within=PAUSE_S) is None


# Ranks that call different collectives


def position(number: int, what: str) -> Notes:
    return Notes({"position/0/0": json.dumps([number, what])})


def test_another_collective_under_the_same_number_is_a_mismatch() -> None:
    failure = failure_of(waiting(3), position(5, "barrier"))
    assert isinstance(failure, MismatchError)
    assert "rank 0: barrier; rank 1: all_reduce of 10" in str(failure)


@pytest.mark.parametrize(
    "number, what", [(5, watchdog.NOTHING), (4, "barrier"), (5, "all_reduce of 10")]
)
def test_a_rank_that_is_idle_elsewhere_or_alike_is_no_mismatch(number: int, what: str) -> None:
    assert failure_of(waiting(3), position(number, what), within=PAUSE_S) is None


def test_ranks_compare_only_what_has_taken_long() -> None:
    assert failure_of(waiting(1), position(5, "barrier"), within=PAUSE_S) is None


# Processes


@pytest.mark.parametrize("waits_for", ["a collective", "graphs"])
def test_a_process_that_has_ended_is_found(waits_for: str) -> None:
    with process() as pid:
        comm = Communicator(pid)
        comm.has_graphs = waits_for == "graphs"
        comm.unfinished = None if comm.has_graphs else (5, 0.5, "all_reduce of 10")
        with watching(comm, Notes(), (0, 1)):
            time.sleep(PAUSE_S)
            assert comm.failure is None
            os.kill(pid, 9)
            wait_until(lambda: comm.failure is not None)
    assert isinstance(comm.failure, PeerLostError) and comm.failure.ranks == (0,)
    assert f"rank 0 (pid {pid}) died" in str(comm.failure)


def test_graphs_need_no_rank_that_has_closed_in_good_order() -> None:
    with process() as pid:
        comm = Communicator(pid)
        comm.has_graphs = True
        with watching(comm, Notes({"closed/0": "[0, 5]"}), (0, 1)):
            os.kill(pid, 9)
            time.sleep(PAUSE_S)
    assert comm.failure is None


def test_a_process_that_was_gone_before_is_an_error_at_once() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    with pytest.raises(PeerLostError, match=rf"rank 0 \(pid {child.pid}\) died while the ranks"):
        Watchdog(Communicator(child.pid), Notes(), 60, (0, 1))


def test_a_watchdog_that_was_stopped_keeps_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with watching(Communicator(os.getpid()), Notes(), (0, 1)):
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


# Notes


def test_what_another_rank_has_failed_with_is_raised_here_too() -> None:
    note = watchdog.failure_note(PeerLostError("rank 7 died", [7]))
    failure = failure_of(Communicator(), Notes({"failure": note}))
    assert isinstance(failure, PeerLostError) and failure.ranks == (7,)


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
    with watching(comm, Notes({"abandoned/1": "long ago", "abandoned/2": "rank 0 abandoned"})):
        wait_until(lambda: len(comm.interruptions) > 1)
    assert set(comm.interruptions) == {("rank 0 abandoned", 2)}


def test_a_rank_that_is_asked_says_where_it_stands() -> None:
    notes, comm = Notes({"question": "where are you?"}), Communicator()
    with watching(comm, notes):
        wait_until(lambda: "position/0/1" in notes)
        assert json.loads(notes["position/0/1"]) == [5, watchdog.NOTHING]
        comm.number = 6
        wait_until(lambda: "6" in notes["position/0/1"])
    assert json.loads(notes["position/0/1"]) == [6, watchdog.NOTHING]


def test_a_store_that_is_gone_is_an_error_for_those_who_wait_alone() -> None:
    notes = Notes()
    notes.is_gone = True
    assert failure_of(Communicator(), notes, within=PAUSE_S) is None
    failure = failure_of(waiting(0.5), notes)
    assert isinstance(failure, PeerLostError) and "did rank 0's process end?" in str(failure)


# Deadlines


def test_a_deadline_names_the_ranks_that_are_behind_or_elsewhere() -> None:
    failure = failure_of(waiting(61), position(4, "barrier"))
    assert isinstance(failure, TimeoutError)
    assert "missing: rank 0 (pid 0): is at number 4, barrier" in str(failure)


def test_a_deadline_names_no_rank_that_has_come_as_far() -> None:
    assert "missing: no rank" in str(failure_of(waiting(61), position(5, "all_reduce of 10")))


def test_a_rank_that_does_not_answer_is_named_at_the_deadline() -> None:
    assert "rank 0 (pid 0): does not answer" in str(failure_of(waiting(61), Notes()))
