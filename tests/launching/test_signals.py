"""What each signal to a launcher does to its ranks: the table in docs/launching.md, with real
processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest

import fastcomm
from fastcomm.comm.who import stat_of
from tests.support.forked_python import in_forked_python

pytestmark = pytest.mark.thorough

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
# Says which process it is and, once it has been told its signals' names, which it gets.
RANK = """
import os, signal, sys, time
def say(what):
    os.write(1, f"{what}\\n".encode())  # a handler may not call print() inside another one
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, _: say(signal.Signals(number).name))
say(os.getpid())
while True:
    time.sleep(0.1)
"""


class Launcher:
    """`fastcomm run`, and the pids of its ranks."""

    def __init__(self, run, ranks):
        self.run, self.pids = run, []
        while len(self.pids) < ranks:
            self.pids.append(int(self.line()))

    def line(self):
        """The next one that a rank has printed, less its number."""
        return self.run.stdout.readline().rpartition("] ")[2].rstrip()

    def send(self, number):
        self.run.send_signal(number)


@contextlib.contextmanager
def launcher(tmp_path, *arguments, ranks=1, ignored=()):
    def begin():
        os.setpgid(0, 0)  # as a shell does, so that it can be stopped
        for number in (*ENDING, *ignored):  # whatever ignores some of them for all tests
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    script = tmp_path / "train.py"
    script.write_text(RANK)
    # which would flush what the launcher has to
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", "fastcomm", "run", "--ranks", str(ranks), script] + list(arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=begin,
        env=env,
        text=True,
    ) as run:
        try:
            yield Launcher(run, ranks)
        finally:
            if run.poll() is None:
                run.kill()


@pytest.mark.parametrize("number", ENDING)
@in_forked_python
def test_a_signal_that_ends_the_launcher_reaches_the_ranks_first(tmp_path, number):
    with launcher(tmp_path, "SIGCONT") as ours:
        ours.send(number)
        assert ours.run.wait(60) == 128 + number
    assert not os.path.exists(f"/proc/{ours.pids[0]}")


@in_forked_python
def test_a_second_signal_ends_ranks_that_do_not_obey_the_first(tmp_path):
    with launcher(tmp_path, "SIGTERM") as ours:
        ours.send(signal.SIGTERM)
        assert ours.line() == "SIGTERM"
        ours.send(signal.SIGTERM)
        assert ours.run.wait(20) == 128 + signal.SIGTERM
    assert not os.path.exists(f"/proc/{ours.pids[0]}")


@in_forked_python
def test_signals_before_the_end_of_a_job_are_forwarded_to_every_rank(tmp_path):
    with launcher(tmp_path, "SIGUSR1", "SIGUSR2", ranks=2) as ours:
        for name in ("SIGUSR1", "SIGUSR2"):
            ours.send(getattr(signal, name))
            assert [ours.line(), ours.line()] == [name, name]
        assert ours.run.poll() is None


@in_forked_python
def test_what_was_ignored_at_the_start_stays_ignored(tmp_path):
    ignored = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTSTP
    with launcher(tmp_path, "SIGUSR2", ignored=ignored) as ours:
        for number in ignored:
            os.kill(ours.pids[0], number)
            ours.send(number)
        ours.send(signal.SIGUSR2)
        assert ours.line() == "SIGUSR2"
        ours.send(signal.SIGTERM)
        assert ours.run.wait(60) == 128 + signal.SIGTERM


def _wait_until_stopped(pid):
    until = time.monotonic() + 60
    while stat_of(pid)[0] != "T":
        assert time.monotonic() < until, f"process {pid} runs"
        time.sleep(0.01)


@in_forked_python
def test_ctrl_z_stops_the_ranks_until_the_launcher_goes_on(tmp_path):
    with launcher(tmp_path, "SIGUSR1", ranks=2) as ours:
        ours.send(signal.SIGTSTP)
        _, status = os.waitpid(ours.run.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGTSTP
        for pid in ours.pids:
            _wait_until_stopped(pid)
        ours.send(signal.SIGCONT)
        ours.send(signal.SIGUSR1)
        assert [ours.line(), ours.line()] == ["SIGUSR1", "SIGUSR1"]


@in_forked_python
def test_ranks_are_killed_with_a_launcher_that_another_signal_ends(tmp_path):
    with launcher(tmp_path) as ours:
        rank = os.pidfd_open(ours.pids[0])
        ours.send(signal.SIGKILL)
        assert ours.run.wait(60) == -signal.SIGKILL
        assert select.select([rank], [], [], 60)[0], "the rank goes on without its launcher"
        os.close(rank)


def _signal_the_caller():
    """In a rank of launch(). Returns which signals it got itself, for the first 20 s."""
    got = set()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: got.add(number))
    os.kill(os.getppid(), signal.SIGUSR2)
    until = time.monotonic() + 20
    while signal.SIGUSR1 not in got and time.monotonic() < until:
        # Again and again: launch() may be inside the call that has started this rank.
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(0.01)
    return got


@in_forked_python
def test_a_handler_of_the_process_that_calls_launch_stays_its_own():
    got = []
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
    returned = fastcomm.launch(_signal_the_caller, ranks=1)
    assert (returned, got) == ([{signal.SIGUSR1}], [signal.SIGUSR2])


GOES_ON = """
import os, sys, time
for number in range(3):
    print(number)
    time.sleep(0.3)  # the launcher prints each by itself
open(sys.argv[1], "w").close()
"""


def test_ranks_go_on_when_nobody_reads_what_they_print(tmp_path):
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(GOES_ON)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", "run", "--ranks", "2", script, end],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    os.close(writer)
    assert end.exists()
    assert done.stderr.count("what the ranks print is lost from here on, and they go on: ") == 1


PRINTS_MUCH = """
import sys
for _ in range(1100):  # more than a pipe holds, and less than two of them do
    print(99 * "x", flush=True)
open(sys.argv[1], "w").close()
"""


@in_forked_python
def test_a_slow_reader_gets_all_that_ranks_have_printed(tmp_path):
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(PRINTS_MUCH)
    command = [sys.executable, "-m", "fastcomm", "run", "--ranks", "1", script, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        while not end.exists():
            time.sleep(0.01)
        time.sleep(2)  # longer than the launcher waits for a child that holds a pipe
        lines = run.stdout.read().splitlines()
    assert lines == ["[rank 0] " + 99 * "x"] * 1100
    assert run.returncode == 0
