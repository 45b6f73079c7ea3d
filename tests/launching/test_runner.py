"""Ranks that fastcomm starts itself: launch() and `python -m fastcomm run`, with real processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import types
from importlib import util

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
from fastcomm.launching import runner
from tests.support.forked_python import fork_python, python
from tests.support.outcomes import Outcome, values_of
from tests.support.ranks import fresh_ranks


def _launch(place, function, args, options):
    """What launch() returns, and whether it has left the process as it was."""
    fork_python()
    environment, handler = os.environ.copy(), signal.getsignal(signal.SIGTERM)
    returned = fastcomm.launch(function, *args, **options)
    is_same = os.environ == environment and signal.getsignal(signal.SIGTERM) is handler
    return returned, is_same


def launch(function, *args, **options) -> list[Outcome]:
    """How launch() ends that forks its ranks, which would take most of their time for importing
    torch.
    """
    env = {"OMP_NUM_THREADS": "2"}
    return fresh_ranks(1, _launch, function, args, {"ranks": 2, **options}, env=env)


def _sum(number):
    with fastcomm.init() as comm:
        tensor = torch.tensor([number + comm.rank])
        comm.all_reduce(tensor)
        return comm.rank, tensor.item(), torch.get_num_threads()


def test_a_function_runs_on_ranks_that_meet():
    assert values_of(launch(_sum, 5, threads=1)) == [([(0, 11, 1), (1, 11, 1)], True)]


def _raise_on_one():
    with fastcomm.init() as comm:
        if comm.rank == 1:
            raise ValueError("out of luck")
        comm.barrier()  # and so loses rank 1


def test_a_rank_that_raises_is_named_and_the_others_are_ended():
    (outcome,) = launch(_raise_on_one)
    assert outcome.is_a(FastcommError)
    message = outcome.failure.message
    assert re.match(r"rank 1 \(pid \d+\) raised ValueError: out of luck\n", message)
    assert "in _raise_on_one" in message


UNGUARDED = """
import fastcomm
def train(): pass
fastcomm.launch(train, ranks=2)
"""


@pytest.mark.thorough
def test_a_script_that_each_rank_would_launch_again_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    done = python(script)
    assert done.returncode == 1
    assert 'call it under if __name__ == "__main__":' in done.stdout + done.stderr


def _end_on_one():
    if os.environ["RANK"] == "1":
        os._exit(0)


def _return_a_lock():
    return threading.Lock()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "function, words",
    [
        (_end_on_one, "rank 1 ended with exit code 0 before the function had returned"),
        (_return_a_lock, "raised FastcommError: what the function returns cannot be sent to"),
    ],
)
def test_a_rank_that_returns_nothing_of_use_is_named(function, words):
    (outcome,) = launch(function)
    assert outcome.is_a(FastcommError) and re.search(words, outcome.failure.message)


SCRIPT = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], sys.argv[1:])
"""


def test_a_script_runs_on_ranks_with_its_own_arguments_and_as_many_threads_as_it_is_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ("-m", "fastcomm", "run", "--ranks", "2", script, "train", "--help", "--ranks=7")
    done = python(*command, env={"OMP_NUM_THREADS": "5"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 2 5 ['train', '--help', '--ranks=7']" for rank in range(2)
    ]


PIECES = """
import multiprocessing, os, sys, time

class Slow:
    def __str__(self):
        time.sleep(0.5)  # the launcher looks for output meanwhile
        return "two"

def squared(x: int):
    return x * x

if __name__ == "__main__":
    print("one", Slow())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(squared, [3]) == [9]
    assert sys.path[0] == os.path.dirname(__file__)
    assert squared.__annotations__["x"] is int  # the launcher's own __future__ imports stay its own
"""


def test_a_line_that_a_script_writes_in_pieces_stays_whole(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PIECES)
    # a Python of its own: a forked one has no buffers as PYTHONUNBUFFERED asks for them
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", "run", "--ranks", "2", script],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] one two", "[rank 1] one two"]


ENDLESS = """
import os, sys
sys.stdout.write(f"no end {os.environ['RANK']}")
sys.stderr.write("nor here")
"""


def test_lines_without_an_end_stay_lines_of_their_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    done = python("-m", "fastcomm", "run", "--ranks", "2", script)
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] no end {rank}" for rank in range(2)]
    assert sorted(done.stderr.splitlines()) == [f"[rank {rank}] nor here" for rank in range(2)]
    assert done.stdout.endswith("\n")


# Rank 1 fails; rank 0, in a barrier, loses it and fails, too. Which of them ends first is given:
# the other one waits for what it has left in the launcher's folder.
FAILING = """
import os, select, signal, sys, tempfile, time
from pathlib import Path
import fastcomm

def has_failed(rank):
    return list(Path(tempfile.gettempdir()).glob(f"fastcomm-launch-*/raised-{rank}"))

first, how = sys.argv[1:]
rank = os.environ["RANK"]
try:
    with fastcomm.init() as comm:
        comm.barrier()
        if rank == "1":
            exec(how)
        comm.barrier()
finally:
    while first in ("0", "1") and rank != first and not has_failed(first):
        time.sleep(0.01)
    if rank == "1" and first == "0":
        if select.select([os.pidfd_open(comm.processes[0].pid)], [], [], 1)[0]:
            time.sleep(100)  # rank 0 has not waited: the launcher ends this rank
"""


def _fail_on_one(tmp_path, first, how):
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    place = tmp_path / "place.py"
    place.write_text(f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}")
    command = ("-m", "fastcomm", "run", "--ranks", "2", script, first, how)
    return python(*command, imports=[place])


@pytest.mark.parametrize(
    "first, how, exit_code, words",
    [
        ("1", "raise ValueError('out of luck')", 1, "raised ValueError: out of luck"),
        ("0", "sys.exit(7)", 7, "ended with exit code 7"),
        ("1", "sys.exit('no data')", 1, "ended with exit code 1"),
    ],
)
def test_the_rank_is_named_that_others_have_lost(tmp_path, first, how, exit_code, words):
    done = _fail_on_one(tmp_path, first, how)
    assert done.returncode == exit_code
    *others, last = done.stderr.splitlines()
    assert re.fullmatch(rf"rank 1 \(pid \d+\) {words}", last)
    lost = [line for line in others if "PeerLostError" in line]
    # one line, unless the launcher has ended rank 0 before it could leave it
    assert len(lost) == 1 or first == "1" and not lost
    assert all(line.startswith("rank 0 (pid") for line in lost)


def test_a_rank_that_ends_in_good_order_is_named_where_another_has_lost_it(tmp_path):
    done = _fail_on_one(tmp_path, "nobody", "sys.exit()")
    assert done.returncode == 1
    first, *stack, likely = done.stderr.splitlines()
    assert re.match(r"rank 0 \(pid \d+\) raised PeerLostError: rank 1 .*closed", first)
    assert [line for line in stack if "train.py" in line], "where rank 0 was"
    assert likely.startswith("rank 1 has ended with exit code 0, which may be why: make the call")


ELASTIC = """
import os, signal, sys, time
import torch, fastcomm
how, rank = sys.argv[1], os.environ["RANK"]
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
reducer = fastcomm.Reducer(fastcomm.init()).attach(model)
has_come = reducer.comm.membership.is_rebuilt
def batches():  # until another process has come, and then three more
    n_more = 3
    while n_more:
        is_complete = reducer.comm.membership.is_rebuilt and reducer.comm.world_size == 2
        n_more -= is_complete
        yield
for _ in batches() if how == "plain" else reducer.elastic(batches(), state=[optimizer]):
    if rank == "1" and (how == "again" or not has_come):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
print(f"{rank} ends among {reducer.comm.world_size}")
"""


def _run_elastic(tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    return python("-m", "fastcomm", "run", "--ranks", "2", "--replace", "1", script, how)


def test_another_process_takes_the_place_of_a_lost_one(tmp_path):
    done = _run_elastic(tmp_path, "once")
    assert done.returncode == 0, done.stderr
    ended = [f"[rank {rank}] {rank} ends among 2" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == ended
    assert re.search(
        r"^rank 1 \(pid \d+\) was ended by SIGKILL; another process takes its place$",
        done.stderr,
        re.MULTILINE,
    )


def test_all_are_ended_when_more_are_lost_than_are_replaced(tmp_path):
    done = _run_elastic(tmp_path, "again")
    assert done.returncode == 128 + signal.SIGKILL
    *_, killed, last = done.stderr.splitlines()
    assert re.fullmatch(r"rank 1 \(pid \d+\) was ended by SIGKILL", killed)
    assert last == "no process takes its place: --replace allows no more"


def test_a_script_that_does_not_go_on_is_named_where_ranks_are_replaced(tmp_path):
    done = _run_elastic(tmp_path, "plain")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "rank 0 does not go on without a lost rank: loop by reducer.elastic()"


AT_END = """
import sys
from multiprocessing.util import Finalize
Finalize(None, lambda: print(repr(sys.last_value), flush=True), exitpriority=0)
raise ValueError("out of luck")
"""


def test_an_error_is_shown_and_known_at_the_end_as_under_python_itself(tmp_path):
    """So that communicators can tell their peers."""
    script = tmp_path / "train.py"
    script.write_text(AT_END)
    done = python("-m", "fastcomm", "run", "--ranks", "1", script)
    assert done.stdout == "[rank 0] ValueError('out of luck')\n", done
    assert re.fullmatch(
        r"\[rank 0\] Traceback \(most recent call last\):\n"
        rf'\[rank 0\]   File "{re.escape(str(script))}", line 5, in <module>\n'
        r"(\[rank 0\]     .*\n)*"
        r"\[rank 0\] ValueError: out of luck\n"
        r"rank 0 \(pid \d+\) raised ValueError: out of luck\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    "how, exit_code, words",
    [
        ("os._exit(7)", 7, "ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was ended by SIGTERM"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named(tmp_path, how, exit_code, words):
    done = _fail_on_one(tmp_path, "nobody", how)
    assert done.returncode == exit_code
    assert re.fullmatch(rf"rank 1 \(pid \d+\) {words}", done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "numbers, error, words",
    [
        ({"ranks": 0}, ValueError, "at least 1; got 0 and 1"),
        ({"ranks": "2"}, TypeError, "ranks must be an int; got '2'"),
        ({"threads": 1.5}, TypeError, "threads must be an int; got 1.5"),
    ],
)
def test_what_is_no_number_of_processes_is_refused(numbers, error, words):
    with pytest.raises(error, match=words):
        fastcomm.launch(_sum, 5, **numbers)


@pytest.mark.parametrize(
    "n_gpus, n_cores, ranks, reason",
    [
        (0, 2, 2, "2 ranks with 1 thread each: one for each physical core"),
        (0, 128, 64, "64 ranks with 2 threads each: of 128 cores, as shared memory takes 64 ranks"),
        (80, 160, 80, "80 ranks with 2 threads each: one for each GPU"),
    ],
)
def test_the_number_of_ranks_is_chosen_by_the_machine_and_explained(
    monkeypatch, capsys, n_gpus, n_cores, ranks, reason
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(runner, "cores", lambda: n_cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert runner._numbers(None, None)[0] == ranks
    assert capsys.readouterr().err == f"fastcomm starts {reason}\n"


def test_a_script_that_is_not_there_starts_no_ranks(monkeypatch):
    monkeypatch.setattr(runner, "_start", pytest.fail)
    with pytest.raises(FastcommError, match=f"there is no script nosuch.py in {os.getcwd()}"):
        runner.run(["nosuch.py"], ranks=2)


def test_what_cannot_be_sent_to_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)  # no cloudpickle
    with pytest.raises(FastcommError, match=r"<lambda> and its arguments cannot be sent to new pr"):
        fastcomm.launch(lambda: 1, ranks=2)
    with pytest.raises(FastcommError, match=r"_sum and its .* cannot pickle '_thread.lock' object"):
        fastcomm.launch(_sum, threading.Lock(), ranks=2)


def test_a_function_of_a_notebook_takes_cloudpickle(monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(_sum, "__module__", "__main__")
    with pytest.raises(FastcommError, match="_sum was defined in a notebook.*cloudpickle"):
        fastcomm.launch(_sum, 5, ranks=2)


def _answer_without_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _launch_without_room(place):
    fork_python()
    with contextlib.redirect_stderr(io.StringIO()) as err:
        with pytest.raises(FastcommError, match=r"rank 0 \(pid \d+\) ended with exit code 1"):
            fastcomm.launch(_answer_without_room, ranks=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with pytest.raises(FastcommError, match="File too large. Set TMPDIR to a folder"):
            fastcomm.launch(_sum, 5, ranks=2)
    return err.getvalue()


def test_a_folder_without_room_is_named_with_the_variable_to_set():
    (printed,) = values_of(fresh_ranks(1, _launch_without_room))
    assert "The launcher is not told: [Errno 27] File too large. Set TMPDIR to a folder" in printed
