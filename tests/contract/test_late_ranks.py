"""Ranks that come late, or never."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta

import pytest
import torch

from fastcomm import FastcommError, PeerLostError, TimeoutError
from tests.contract import assert_ended, new_ranks
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")

# The deadline, and within how many seconds a rank that waits must have given up: when it, or its
# watchdog, has asked the others where they stand.
TIMEOUT_S = {"shm": (1, 3), "nccl": (2, 6), "group": (1, 6), "hierarchical": (1, 6)}


def _miss_the_deadline(place, numel):
    timeout, limit = TIMEOUT_S[place.transport]
    comm = communicator(place, timeout=timedelta(seconds=timeout))
    check_all_reduce(comm)
    if place.rank == 1:
        time.sleep(limit)
        with pytest.raises(FastcommError) as heard:
            comm.all_reduce(torch.ones(numel))
        return type(heard.value).__name__, str(heard.value), os.getpid()
    before = time.monotonic()
    with pytest.raises((TimeoutError, PeerLostError)) as late:
        comm.all_reduce(torch.ones(numel))
    waited = time.monotonic() - before
    is_told = f"rank {place.rank} waits" not in str(late.value)  # by one whose clock ran out first
    assert waited < limit and (is_told or waited > 0.9 * timeout), str(late.value)
    with pytest.raises(type(late.value)):
        comm.barrier()
    assert_ended(comm)
    return type(late.value).__name__, str(late.value), os.getpid()


@over(3, shm=(2, 4))
def test_a_rank_that_does_not_come_is_named_after_the_timeout(transport, world_size):
    outcomes = values_of(new_ranks(transport, world_size, _miss_the_deadline, 5000, timeout=20))
    (_, of_the_late_one, pid), others = outcomes[1], [outcomes[0], *outcomes[2:]]
    timeout, _ = TIMEOUT_S[transport]
    # The rank whose clock runs out first tells the others.
    told = [message for error, message, _ in others if error == "TimeoutError"]
    assert told
    for message in told:
        expected = rf"waited {timeout} s.*all_reduce of 5000 float32.*missing: rank 1 \(pid {pid}\)"
        assert re.search(expected, message), message
        missing = message.partition("missing: ")[2]
        assert "rank 0" not in missing and "rank 2" not in missing
        # Where its main thread stands, innermost call last; or it had no core to say so.
        stands = re.search(r"in _miss_the_deadline: time\.sleep\(limit\)$", message)
        assert stands or re.search("no answer|does not answer", missing), message
    assert all(f"rank 1 (pid {pid})" in message for _, message, _ in others)
    if transport == "shm":
        assert "gave up on rank 1" in of_the_late_one


@over(shm=(2, 4))
def test_a_late_rank_gets_no_result_though_all_have_posted_what_it_needs(transport, world_size):
    """A few elements travel with the announcement. The others have gone on without the result."""
    outcomes = values_of(new_ranks(transport, world_size, _miss_the_deadline, 3, timeout=20))
    error, of_the_late_one, _ = outcomes[1]
    assert error == "PeerLostError" and "gave up on rank 1" in of_the_late_one


def _come_within_the_deadline(place):
    # Over NCCL later than it takes until the ranks compare notes.
    late_s = 2.5 if place.transport == "nccl" else 1
    comm = communicator(place, timeout=timedelta(seconds=2 * late_s + 1))
    for late in range(3 if place.transport == "shm" else 1):
        time.sleep(late_s if place.rank == late % 2 else 0)
        check_all_reduce(comm)


@over(2)
def test_a_late_rank_within_the_timeout_is_waited_for(transport, world_size):
    values_of(new_ranks(transport, world_size, _come_within_the_deadline))
