"""Ctrl-C while a rank waits: the collective is finished first; pressed twice, it ends at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fastcomm import PeerLostError
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.reference import check_all_reduce
from tests.transports.shm import COLLECTIVES


def _press(times):
    """Ctrl-C, so often."""
    for i in range(times):
        threading.Timer(0.2 + 0.2 * i, os.kill, (os.getpid(), signal.SIGINT)).start()


def _interrupt(place, collective, times):
    comm = communicator(place)
    check_all_reduce(comm)
    if place.rank == 1:
        time.sleep(1.5)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _press(times)
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        COLLECTIVES[collective](comm)
    if times == 2:
        assert time.monotonic() - before < 1
    else:  # there was nobody to end it with
        assert isinstance(caught.value.__cause__, PeerLostError)


@pytest.mark.parametrize(
    "collective, times", [("barrier", 1), ("large all_reduce", 2), ("async all_reduce", 2)]
)
def test_ctrl_c_ends_the_waiting_once_the_peer_is_gone_and_twice_at_once(collective, times):
    values_of(fresh_ranks(2, _interrupt, collective, times))
