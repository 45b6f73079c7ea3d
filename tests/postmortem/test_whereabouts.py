"""Where a process says that it stands, and who is told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from fastcomm.comm.who import Process
from fastcomm.postmortem import whereabouts

SLEEPER = """
    import os, sys, time
    from fastcomm.postmortem.whereabouts import answer_questions

    def load_a_batch():
        print("ready", flush=True)
        time.sleep(600)

    answer_questions()
    answer_questions()
    if "--fork" in sys.argv and not os.fork():
        time.sleep(600)
    load_a_batch()
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for an answer as long as a slow core takes."""
    monkeypatch.setattr(whereabouts, "PATIENCE_S", 60)


@contextlib.contextmanager
def sleeping(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that answers, and sleeps."""
    command = [sys.executable, "-c", textwrap.dedent(SLEEPER), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    with sleeping() as process:
        yield process


@pytest.mark.usefixtures("patient")
def test_a_process_says_where_its_main_thread_is(sleeper: subprocess.Popen[str]) -> None:
    for _ in range(2):
        answer = whereabouts.ask(sleeper.pid)
        assert answer.startswith("its main thread stands at\n")
        assert answer.splitlines()[-1].endswith("in load_a_batch")


def test_a_process_that_is_stopped_is_said_to_be(sleeper: subprocess.Popen[str]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert whereabouts.ask(sleeper.pid) == "it is stopped, by SIGSTOP or a debugger"


def test_of_a_process_that_is_gone_nothing_is_said(sleeper: subprocess.Popen[str]) -> None:
    sleeper.kill()
    sleeper.wait()
    assert whereabouts.ask(sleeper.pid) == ""
    assert whereabouts.whereabouts_of([Process(1, sleeper.pid)]) == ""


@pytest.mark.usefixtures("patient")
def test_a_child_that_is_left_does_not_answer_in_its_place() -> None:
    with sleeping("--fork") as process:
        process.kill()
        process.wait()
        assert whereabouts.ask(process.pid) == ""


@pytest.mark.usefixtures("patient")
def test_an_answer_is_bounded_and_may_be_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under its own name this process may answer itself, since another test.
    monkeypatch.setattr(whereabouts, "_address", lambda pid: f"\0fastcomm test {pid}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(whereabouts._address(os.getpid()))
        listener.listen()
        talker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import socket, sys; asker, _ = socket.socket(fileno=int(sys.argv[1])).accept(); "
                "asker.sendall(b'\\xff' * 100_000)",
                str(listener.fileno()),
            ],
            pass_fds=[listener.fileno()],
        )
        answer = whereabouts.ask(os.getpid())
        talker.kill()
        talker.wait()
    assert answer == "\ufffd" * whereabouts.MOST_BYTES


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_not_told(sleeper: subprocess.Popen[str]) -> None:
    child = os.fork()
    if not child:
        os.setuid(65534)
        told = [whereabouts.ask(sleeper.pid)]
        os.geteuid = lambda: 0  # would not be refused by itself
        told.append(whereabouts.ask(sleeper.pid))
        os._exit(told != ["", ""])
    assert os.waitpid(child, 0) == (child, 0)
