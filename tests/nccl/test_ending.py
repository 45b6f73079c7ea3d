"""close() and abort() where NCCL fails or hangs in them."""

from __future__ import annotations

import time

import pytest
import torch

from fastcomm import (
    FastcommError,
    NcclError,
    TimeoutError,
)
from tests.nccl import SOON, communicator, outcomes_of
from tests.support.bodies import raised
from tests.support.outcomes import values_of
from tests.support.stand_ins import (
    assert_all_ended,
    failing,
    hanging,
)


def _fail_to_end(place, function):
    comm = communicator(place)
    kept = comm.empty(10, dtype=torch.float32)
    with failing(function, 3):
        message, seconds = raised(NcclError, comm.close)
    assert seconds < SOON
    assert_all_ended()
    comm.close()
    kept.zero_()
    return message


@pytest.mark.parametrize("function", ["ncclCommDeregister", "ncclCommFinalize", "ncclCommDestroy"])
def test_a_close_that_fails_says_so_and_ends_the_communicator_all_the_same(function):
    for message in values_of(outcomes_of(2, _fail_to_end, function)):
        assert f"{function} failed with code 3, internal error" in message


def _end_out_of_time(place):
    comm = communicator(place)
    with hanging("ncclCommFinalize"):
        before = time.monotonic()
        with pytest.raises(TimeoutError, match="waited 0.5 s .*it was aborted"):
            comm.close(timeout=0.5)
        assert 0.4 < time.monotonic() - before < SOON
    assert_all_ended()
    with pytest.raises(FastcommError):
        comm.barrier()


def test_a_close_that_takes_too_long_becomes_an_abort():
    values_of(outcomes_of(2, _end_out_of_time))


def _abort_for_ever(place):
    comm = communicator(place)
    with hanging("ncclCommAbort"):
        before = time.monotonic()
        comm.abort()
        assert time.monotonic() - before < 12
    with pytest.raises(FastcommError, match="aborted"):
        comm.barrier()


def test_an_abort_that_hangs_is_left_behind():
    values_of(outcomes_of(1, _abort_for_ever))
