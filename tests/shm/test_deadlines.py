"""Deadlines are for what does not move."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks

DEADLINE_S = 0.6


def _reduce_with_one_who_goes_on_now_and_then(place):
    deadline = timedelta(seconds=DEADLINE_S if place.rank == 0 else 20)
    comm = communicator(place, timeout=deadline)
    tensor = torch.ones(16_000_000)  # in 245 chunks, of which each call moves a few
    before = time.monotonic()
    work = comm.all_reduce(tensor, async_op=True)
    while place.rank == 1 and time.monotonic() - before < 2 * DEADLINE_S:
        work.is_completed()
        time.sleep(0.1)
    work.wait()
    assert bool((tensor == 2).all())


def test_a_peer_that_goes_on_now_and_then_is_not_late():
    # Mostly longer than the deadline; how much a call moves depends on how busy the machine is.
    values_of(fresh_ranks(2, _reduce_with_one_who_goes_on_now_and_then))
