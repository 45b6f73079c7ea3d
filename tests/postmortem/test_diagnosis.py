"""What ranks leave behind when a job hangs or fails, and what is read from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

import fastcomm
from fastcomm.comm.who import processes_of
from fastcomm.postmortem import diagnosis, dump
from fastcomm.postmortem.flight_recorder import N_KEPT, FlightRecorder
from tests.support.bodies import Place, communicator, note, noted, wait_for_note
from tests.support.damage import damaged_json
from tests.support.forked_python import in_forked_python
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.transports import EVERY_TRANSPORT, environment_of

LATE = 1


def _environments(backend, n, folder):
    return [environment_of(backend, rank) | {dump.VARIABLE: str(folder)} for rank in range(n)]


def _load_batch(place: Place) -> None:
    """Does not return before the other ranks have failed, and this one has been asked."""
    if place.rank == LATE:
        _await_dump(Path(os.environ[dump.VARIABLE]), os.getpid())
        for rank in range(place.world_size):
            if rank != LATE:
                wait_for_note(place, f"failed_{rank}")


def _await_dump(folder: Path, pid: int) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob(f"fastcomm_rank_*_{pid}.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _train(place: Place) -> str | None:
    comm = communicator(place, timeout=timedelta(seconds=2))
    model = torch.nn.Linear(3, 2)
    reducer = fastcomm.Reducer(comm).attach(model)
    model(torch.ones(1, 3)).sum().backward()
    reducer.synchronize()
    _load_batch(place)
    try:
        for _ in range(100):  # over NCCL the host does not wait
            model(torch.ones(1, 3)).sum().backward()
            reducer.synchronize()
            time.sleep(0.1)
    except fastcomm.FastcommError as error:
        dump.await_dumps()
        note(place, **{f"failed_{place.rank}": True})
        return type(error).__name__
    return None


@pytest.mark.parametrize("backend", EVERY_TRANSPORT)
def test_a_rank_that_does_not_come_is_named_with_the_place_where_it_stands(backend, tmp_path):
    folder = tmp_path / "dumps"
    environments = _environments(backend, 3, folder)
    outcomes = fresh_ranks(3, _train, transport=backend, env=environments)
    raised = values_of(outcomes)
    assert "TimeoutError" in raised and None not in raised
    lines = "\n".join(diagnosis.diagnose(folder))
    assert "3 dumps" in lines
    assert "ranks 0 and 2 wait for collective number" in lines, lines
    assert "of bias ... weight" in lines or "of weight ... bias" in lines, lines
    assert f"rank {LATE} (pid " in lines and "has not come to number" in lines, lines
    assert "in _load_batch" in lines, lines
    assert "reducer 0 was in data, forward and other for" in lines, lines
    assert "no dump" not in lines


def _expect_a_message(place: Place, n_sent: int) -> None:
    comm = communicator(place, timeout=timedelta(seconds=3))
    folder, tensor = Path(os.environ[dump.VARIABLE]), torch.ones(4)
    for _ in range(n_sent if place.rank in (0, LATE) else 0):
        comm.send(tensor, dst=0) if place.rank == LATE else comm.recv(tensor, src=LATE)
    assert tensor.sum() == 4  # over NCCL this waits
    comm.barrier()
    if place.rank == 0:
        with pytest.raises(fastcomm.TimeoutError):
            while True:  # over NCCL the host does not wait
                comm.recv(torch.ones(4), src=LATE)
                time.sleep(0.1)
        dump.await_dumps()
        return
    _await_dump(folder, os.getpid())


@pytest.mark.parametrize("backend, n_sent", [*zip(EVERY_TRANSPORT, (0, 1, 1, 0), strict=True)])
def test_a_message_that_never_comes_is_shown_with_where_its_sender_stands(
    backend, n_sent, tmp_path
):
    folder = tmp_path / "dumps"
    environments = _environments(backend, 3, folder)
    values_of(fresh_ranks(3, _expect_a_message, n_sent, transport=backend, env=environments))
    _, verdict = "\n".join(diagnosis.diagnose(folder)).split("Messages from rank 1 to rank 0:\n")
    assert verdict.startswith("  rank 0 waits for a message of 4 float32 elements\n"), verdict
    assert f"  rank {LATE} (pid " in verdict and "has not come to it\n" in verdict, verdict
    last = "its last was a message of 4 float32 elements" if n_sent else "it has not called send()"
    assert last in verdict and "in _expect_a_message: _await_dump(" in verdict, verdict
    assert "no dump" not in verdict


def _lose_a_rank(place: Place) -> None:
    comm = communicator(place)
    comm.barrier()
    if place.rank == LATE:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fastcomm.PeerLostError):
        comm.all_reduce(torch.ones(4))
    dump.await_dumps()


@pytest.mark.parametrize("backend", ["shm", "group"])
def test_a_rank_that_died_has_left_no_dump(backend, tmp_path):
    folder = tmp_path / "dumps"
    outcomes = fresh_ranks(
        3, _lose_a_rank, transport=backend, env=_environments(backend, 3, folder)
    )
    assert [one.kind for one in outcomes] == ["returned", "died", "returned"], outcomes
    lines = "\n".join(diagnosis.diagnose(folder))
    assert "2 dumps" in lines and "PeerLostError: rank 1 (pid" in lines, lines
    assert "wait for collective number" in lines, lines
    assert f"rank {LATE}: no dump" in lines, lines


def _dump_on_a_signal(place: Place) -> str | None:
    comm = communicator(place)
    if place.rank == 0:
        note(place, pid=os.getpid())
        comm.barrier()
        return None
    wait_for_note(place, "pid")
    os.kill(int(noted(place, "pid")), signal.SIGUSR2)
    folder = Path(os.environ[dump.VARIABLE])
    _await_dump(folder, int(noted(place, "pid")))
    (file,) = diagnosis.read(folder)
    comm.barrier()
    return str(file["why"])


def test_a_rank_that_waits_dumps_on_a_signal(tmp_path):
    env = {dump.VARIABLE: str(tmp_path / "dumps")}
    outcomes = fresh_ranks(2, _dump_on_a_signal, env=env)
    assert values_of(outcomes) == [None, "SIGUSR2"]


def _keep_a_handler(place: Place) -> bool:
    def own(*_: object) -> None:
        pass

    signal.signal(signal.SIGUSR2, own)
    communicator(place).barrier()
    return signal.getsignal(signal.SIGUSR2) is own


def test_a_handler_of_the_users_stays(tmp_path):
    env = {dump.VARIABLE: str(tmp_path / "dumps")}
    assert values_of(fresh_ranks(1, _keep_a_handler, env=env)) == [True]


def _dump_twice(place: Place) -> tuple[str, list[str]]:
    folder = Path(place.directory, "by hand")
    with pytest.raises(RuntimeError, match="no communicator"):
        fastcomm.dump(folder)
    comm = communicator(place)
    comm.all_reduce(torch.ones(2))
    assert fastcomm.dump(folder) == fastcomm.dump(str(folder))
    names = str(sorted(one.name for one in folder.iterdir())).replace(str(os.getpid()), "PID")
    return names, diagnosis.diagnose(folder)


def test_a_dump_on_demand_shows_what_is_over():
    ((names, lines),) = values_of(fresh_ranks(1, _dump_twice))
    assert names == "['fastcomm_rank_0_PID.json']"
    assert lines[1] == "  rank 0: asked for"
    assert lines[-1] == "  no rank that has left a dump waits in a collective"


def _close(place: Place) -> bool:
    comm = communicator(place)
    comm.close()
    dump.await_dumps()
    assert comm.failure is not None
    return Path(os.environ[dump.VARIABLE]).exists()


def test_a_job_that_ends_well_leaves_nothing(tmp_path):
    env = {dump.VARIABLE: str(tmp_path / "dumps")}
    assert values_of(fresh_ranks(2, _close, env=env)) == [False, False]


SCRIPT = """
import time, fastcomm
comm = fastcomm.init()
while comm.rank == 1:
    time.sleep(0.1)
comm.barrier()
"""


@in_forked_python
def test_living_ranks_answer_where_somebody_asks(tmp_path):
    (tmp_path / "hangs.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fastcomm", "run", "--ranks", "2", "hangs.py"]
    root = str(Path(fastcomm.__file__).parent.parent)
    environment = os.environ | {dump.VARIABLE: "dumps", "PYTHONPATH": root}
    job = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        deadline = time.monotonic() + 100
        lines = ""
        # rank 0 may not have come to the barrier yet, rank 1 not have answered
        while "rank 0 waits" not in lines or "no dump" in lines:
            assert time.monotonic() < deadline and job.poll() is None, lines
            dump.ask(tmp_path / "dumps")
            time.sleep(0.2)
            with contextlib.suppress(FileNotFoundError):
                lines = "\n".join(diagnosis.diagnose(tmp_path / "dumps"))
    finally:
        job.terminate()
        job.wait()
    assert "rank 0 waits for collective number" in lines, lines
    assert "has not come to number" in lines and 'hangs.py", line 5, in <module>' in lines, lines


def test_a_folder_without_dumps_says_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"set FASTCOMM_DUMP="):
        diagnosis.diagnose(tmp_path)


# ---- without ranks -------------------------------------------------------------------------------


def _recorder() -> FlightRecorder:
    return FlightRecorder("shm", 0, processes_of((1, 2)))


def test_the_newest_are_kept_in_order():
    recorder = _recorder()
    for number in range(1, N_KEPT + 1001):
        recorder.note("barrier", None, 0, number)
    numbers = [entry.number for entry in recorder.entries()]
    assert numbers == list(range(1001, N_KEPT + 1001))


@pytest.mark.parametrize("kind", [fastcomm.TimeoutError, fastcomm.PeerLostError])
def test_what_a_failure_has_cut_short_is_not_over(kind):
    recorder = _recorder()
    recorder.note("barrier", None, 0, 1).end(kind("lost"))
    assert dump.over_of(recorder.entries(), 0) == [False]


def test_what_an_earlier_job_has_left_is_not_read(tmp_path):
    for rank, age_s in enumerate((5, 7200)):
        age = {"time_ns": time.time_ns() - int(age_s * 1e9)}
        file = {**_dump(), "rank": rank, "communicators": []} | age
        (tmp_path / f"fastcomm_rank_{rank}.json").write_text(json.dumps(file))
    assert [file["rank"] for file in diagnosis.read(tmp_path)] == [0]


def _dump() -> dict[str, object]:
    """As a rank writes one that waits for another."""
    recorder = FlightRecorder("shm", 0, processes_of((1, 2)))
    recorder.names[65537] = "weight ... bias"
    recorder.note("barrier", None, 0, 1).end()
    recorder.note("all_reduce", torch.float32, 5, 2, "sum", -1, 65537)
    head = {"version": 1, "rank": 0, "pid": 1, "host": "h", "time_ns": 2 * 10**9, "why": "asked"}
    threads = {"MainThread": ["in f"], "another": []}
    return head | {"threads": threads, "communicators": [dump._as_dict(recorder)]}


@settings(max_examples=150, deadline=None)
@given(damaged_json(_dump()))
def test_a_damaged_dump_has_a_verdict_or_is_named(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "fastcomm_rank_0_1.json").write_bytes(text)
    (folder / "fastcomm_rank_1_2.json").write_text(json.dumps({**_dump(), "rank": 1}))
    try:
        assert diagnosis.diagnose(folder)
    except ValueError as error:
        assert type(error) is ValueError and "fastcomm_rank_0_1.json cannot be read: " in str(error)


def test_different_calls_under_one_number_are_shown_side_by_side():
    def rank(number: int, what: str) -> diagnosis.Rank:
        entry = {"epoch": 0, "number": 7, "what": what, "label": 0, "is_over": False, "kind": what}
        return diagnosis.Rank(number, {"pid": 1, "host": "h"}, [entry], {})

    group = diagnosis.Group("nccl", 2, [rank(0, "barrier"), rank(1, "all_reduce of 3")])
    assert list(diagnosis.verdict(group)) == [
        "Communicator 'nccl' of 2 ranks:",
        "  rank 0 waits for collective number 7, barrier",
        "  rank 1 waits for collective number 7, all_reduce of 3",
        "  the ranks have called different collectives",
    ]
