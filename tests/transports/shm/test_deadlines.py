"""Deadlines are for what does not move."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch

from tests.support.bodies import communicator, note, noted
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks

DEADLINE_S = 1.0


def _move_a_little(work, peer):
    """At most as many chunks as there are slots: the peer empties none meanwhile."""
    os.kill(peer, signal.SIGSTOP)
    try:
        return work.is_completed()
    finally:
        os.kill(peer, signal.SIGCONT)


def _reduce_with_one_who_goes_on_now_and_then(place):
    deadline = timedelta(seconds=DEADLINE_S if place.rank == 0 else 20)
    comm = communicator(place, timeout=deadline)
    tensor = torch.ones(16_000_000)  # in 245 chunks
    if place.rank == 0:
        note(place, pid=os.getpid())
    comm.barrier()
    before = time.monotonic()
    work = comm.all_reduce(tensor, async_op=True)
    while place.rank == 1 and time.monotonic() - before < 1.5 * DEADLINE_S:
        assert not _move_a_little(work, int(noted(place, "pid")))
        time.sleep(DEADLINE_S / 10)
    work.wait()
    assert bool((tensor == 2).all())
    return time.monotonic() - before


def test_a_peer_that_goes_on_now_and_then_is_not_late():
    seconds, _ = values_of(fresh_ranks(2, _reduce_with_one_who_goes_on_now_and_then))
    assert seconds > DEADLINE_S, "it was too quick to show anything"
