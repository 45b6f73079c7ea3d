"""A store that answers no more while the ranks meet: the process that serves it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlparse

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

import fastcomm
from fastcomm.launching import bootstrap, timed_store
from fastcomm.launching.bootstrap import MeetingPoint, host_identity
from fastcomm.launching.membership import Meeting, Member, Membership
from fastcomm.launching.timed_store import Silence, TimedStore
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, own_port

TIMEOUT = timedelta(seconds=0.5)
ANSWER_S = 0.5  # in place of fastcomm's
SOON_S = 0.3  # until the rank waits for the others
LATEST_S = 20.0
HOST = "127.0.0.1"


@contextlib.contextmanager
def _server(port: int) -> Iterator[int]:
    """A process that serves a store; its pid. From now on an answer is not awaited for long."""
    for module in (timed_store, bootstrap):
        module.ANSWER_S = ANSWER_S
    pid = os.fork()
    if pid == 0:
        store = TCPStore(HOST, port, is_master=True, wait_for_workers=False)
        while store:
            signal.pause()
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
                break
            time.sleep(0.01)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _stop(pid):
    """Returns once the process, a child of this one, is stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def _meet_at_a_silent_store(place, port, delay_s):
    """Rank 1's error, and after how long. Rank 0 never comes."""
    with _server(port) as pid:
        if delay_s == 0:
            _stop(pid)
        else:
            threading.Timer(delay_s, _stop, [pid]).start()
        start = time.monotonic()
        with pytest.raises(fastcomm.InitError) as raised:
            fastcomm.init(init_method=f"tcp://{HOST}:{port}", rank=1, world_size=2, timeout=TIMEOUT)
        return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("delay_s", [0, SOON_S], ids=["opened", "asked"])
def test_a_rank_waits_for_a_silent_store_no_longer_than_for_ranks(delay_s):
    outcomes = fresh_ranks(1, _meet_at_a_silent_store, own_port(), delay_s, timeout=LATEST_S)
    [(message, took_s)] = values_of(outcomes)
    assert "the store has not answered for" in message
    assert took_s < TIMEOUT.total_seconds() + 2 * ANSWER_S + 2


def _meet_anew_at_a_silent_store(place, port):
    """What is said to ranks that meet anew there."""
    with _server(port) as pid:
        url = urlparse(f"tcp://{HOST}:{port}")
        store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        point = MeetingPoint(url, store, TIMEOUT)
        assert point.answers()
        _stop(pid)
        with pytest.raises(Silence):
            point.timed_store("a part").check(["key"])
        assert not point.answers()
        with pytest.raises(fastcomm.InitError) as raised:
            point.reopen(TIMEOUT)
        return str(raised.value)


def test_ranks_that_meet_anew_give_a_silent_store_up():
    outcomes = fresh_ranks(1, _meet_anew_at_a_silent_store, own_port(), timeout=LATEST_S)
    [message] = values_of(outcomes)
    assert message.startswith(f"the meeting point 'tcp://{HOST}")
    assert "does not answer" in message


def _open_with_a_silent_group(place, port, makes):
    """What `makes` raises, of a group whose store is silent, and after how long."""
    with _server(port) as pid:
        store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        _stop(pid)
        start = time.monotonic()
        with pytest.raises(fastcomm.InitError) as raised:
            makes()
        return str(raised.value), time.monotonic() - start


def _in_a_group():
    fastcomm.init(group=dist.group.WORLD, timeout=TIMEOUT)


def _as_a_backend():
    dist.new_group(backend="fastcomm", timeout=TIMEOUT)


@pytest.mark.parametrize("makes", [_in_a_group, _as_a_backend])
def test_a_group_whose_store_is_silent_is_given_up(makes):
    outcomes = fresh_ranks(1, _open_with_a_silent_group, own_port(), makes, timeout=LATEST_S)
    [(message, took_s)] = values_of(outcomes)
    assert message.startswith("rank 0 cannot meet the others of")
    assert "the store has not answered for" in message
    assert took_s < TIMEOUT.total_seconds() + 2 * ANSWER_S


def _look_at_a_silent_store(place, port):
    """How long two looks take, for somebody who waits to be taken in."""
    with _server(port) as pid:
        store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
        point = MeetingPoint(urlparse(f"tcp://{HOST}:{port}"), store, timedelta(minutes=5))
        me = Member(0, 0, os.getpid(), host_identity())
        meeting = Meeting("first", 0, "shm", 2, 2, [me])
        ours = Membership(point, None, None, meeting)
        assert not ours.is_awaited()
        _stop(pid)
        times = []
        for _ in range(2):
            start = time.monotonic()
            assert not ours.is_awaited()
            times.append(time.monotonic() - start)
        return times


def test_a_look_at_a_silent_store_is_short_and_the_last_for_a_while():
    outcomes = fresh_ranks(1, _look_at_a_silent_store, own_port(), timeout=LATEST_S)
    [(first, second)] = values_of(outcomes)
    assert first < ANSWER_S + 2
    assert second < ANSWER_S / 2


def test_what_a_store_raises_is_raised():
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    timed = TimedStore(store, timedelta(seconds=10))
    timed.set("key", "value")
    assert timed.get("key") == b"value"
    with pytest.raises(RuntimeError) as raised:
        timed.get("none")
    assert not isinstance(raised.value, Silence)
