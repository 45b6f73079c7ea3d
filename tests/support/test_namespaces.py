"""A network with a delay: packets take as long as they should at least, and arrive unharmed. Upper
bounds are broad, as the machine may be busy.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tests.support import delay_line
from tests.support.namespaces import Hosts, enter, why_no_delay

T = TypeVar("T")
DELAY_S, RATE, BYTES_PER_S = 0.04, "100mbit", 12.5e6
LATEST_S = 10.0
needs_delay = pytest.mark.skipif(why_no_delay() is not None, reason=str(why_no_delay()))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts([1, 1, 1], rate=RATE, delay_s=DELAY_S) as hosts:
        yield hosts


def on(hosts: Hosts, host: int, call: Callable[[], T]) -> T:
    """What the call returns on a thread of the host."""
    results: list[T] = []

    def run() -> None:
        enter(hosts.namespace(host))
        results.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def connection(hosts: Hosts, client: int, server: int) -> tuple[socket.socket, socket.socket]:
    address = hosts.address(server), 0
    with on(hosts, server, lambda: socket.create_server(address)) as listening:
        name = listening.getsockname()
        ours = on(hosts, client, lambda: socket.create_connection(name, timeout=LATEST_S))
        return ours, listening.accept()[0]


def received(end: socket.socket, nbytes: int) -> bytes:
    end.settimeout(LATEST_S)
    data = bytearray()
    while len(data) < nbytes:
        data += end.recv(2**20)
    return bytes(data)


@needs_delay
def test_a_round_trip_takes_twice_the_delay(hosts: Hosts) -> None:
    ours, theirs = connection(hosts, 0, 1)
    times = []
    with ours, theirs:
        for _ in range(3):
            start = time.monotonic()
            ours.sendall(b"?")
            theirs.sendall(received(theirs, 1))
            received(ours, 1)
            times.append(time.monotonic() - start)
    assert 2 * DELAY_S <= min(times) < 2 * DELAY_S + LATEST_S


@needs_delay
@pytest.mark.parametrize("senders", [(1,), (1, 2)])
def test_what_is_sent_to_a_host_shares_its_link(hosts: Hosts, senders: tuple[int, ...]) -> None:
    nbytes = 4_000_000 // len(senders)
    data = os.urandom(nbytes)
    ends = [connection(hosts, sender, 0) for sender in senders]
    start = time.monotonic()
    threads = [threading.Thread(target=ours.sendall, args=(data,)) for ours, _ in ends]
    for thread in threads:
        thread.start()
    assert all(received(theirs, nbytes) == data for _, theirs in ends)
    assert DELAY_S + 4_000_000 / BYTES_PER_S <= time.monotonic() - start < LATEST_S
    for thread, pair in zip(threads, ends, strict=True):
        thread.join()
        for end in pair:
            end.close()


@needs_delay
def test_packets_of_a_host_that_is_cut_off_vanish() -> None:
    with Hosts([1, 1], delay_s=0.001) as hosts:
        ours, theirs = connection(hosts, 0, 1)
        with ours, theirs:
            hosts.cut(1)
            ours.sendall(b"?")
            theirs.settimeout(0.3)
            with pytest.raises(TimeoutError):
                theirs.recv(1)


def test_a_rate_is_read_as_tc_writes_it() -> None:
    assert delay_line.bytes_per_s_of("1gbit") == 125e6
    assert delay_line.bytes_per_s_of("1.5mbit") == 187_500
    with pytest.raises(ValueError, match="100mbit"):
        delay_line.bytes_per_s_of("fast")
