"""How the backend finds processes that have ended, and names them: no group is needed for it."""

from __future__ import annotations

import os
import subprocess
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from fastcomm.comm.who import Process
from fastcomm.errors import PeerLostError
from fastcomm.torch_backend.gloo_engine import GlooEngine
from fastcomm.torch_backend.gloo_engine import ended as have_ended

# As Gloo says it; the path is that of its sources where torch was built.
BROKEN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.fixture
def running():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def ended():
    """Nobody has asked for its exit status."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process


def test_a_process_has_ended_once_it_was_killed(running, ended):
    processes = Process(1, running.pid), Process(2, ended.pid)
    assert have_ended(processes) == [Process(2, ended.pid)]


def test_lost_ranks_of_a_group_are_named_by_their_numbers_of_all(ended):
    ended.wait()
    engine = GlooEngine(SimpleNamespace(rank=lambda: 0), [Process(1, ended.pid)], [3, 7])
    trouble = RuntimeError("connection closed by peer")
    words = rf"rank 7 \(pid {ended.pid}\) died; rank 3 waits in gather, over Gloo: connection cl"
    with pytest.raises(PeerLostError, match=words) as lost:
        engine.raise_if_lost("gather", trouble)
    assert lost.value.ranks == (7,) and lost.value.__cause__ is trouble


def test_an_error_of_gloo_s_says_nothing_of_ranks_that_live(running):
    engine = GlooEngine(SimpleNamespace(rank=lambda: 0), [Process(1, running.pid)], [0, 1])
    engine.raise_if_lost("gather", RuntimeError(BROKEN))


def test_a_process_whose_connection_broke_is_given_the_time_to_end(running):
    engine = GlooEngine(SimpleNamespace(rank=lambda: 0), [Process(1, running.pid)], [0, 1])
    threading.Timer(0.05, running.kill).start()
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {running.pid}\) died"):
        engine.raise_if_lost("gather", RuntimeError(BROKEN))


def test_a_call_that_gloo_refuses_waits_for_no_process(running):
    engine = GlooEngine(SimpleNamespace(rank=lambda: 0), [Process(1, running.pid)], [0, 1])
    with mock.patch("time.sleep", side_effect=AssertionError):
        engine.raise_if_lost(
            "gather", RuntimeError("ProcessGroupGloo::gather: unsupported device type")
        )
