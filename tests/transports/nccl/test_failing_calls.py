"""Calls into NCCL or the driver that fail, and errors that NCCL reports later: every rank gets the
same error, soon, and NCCL's communicators are ended.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
from tests.fakes.stand_ins import assert_all_ended, failing, loaded, log_of
from tests.support.bodies import raised
from tests.support.collective_checks import CALLS
from tests.support.models import SMALL_BUCKETS, assert_gradients, backward, mean_gradients, mlp
from tests.support.outcomes import values_of
from tests.transports.nccl import CODES, ERRORS, LAUNCH_FAILED, SOON, communicator, outcomes_of

# Calls into NCCL that fail. Rank 1's do.

FUNCTIONS = {
    "all_reduce": "ncclAllReduce",
    "all_reduce_coalesced": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "all_gather_single": "ncclAllGather",
    "reduce_scatter_single": "ncclReduceScatter",
    "gather": "ncclSend",
    "scatter": "ncclRecv",
    "all_to_all_single": "ncclSend",
}


def _fail_in(place, function, call, *, code):
    """What every rank hears of it."""
    comm = communicator(place)
    comm.barrier()
    with failing(function, code) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(ERRORS[code], lambda: call(comm))
    assert seconds < SOON
    with pytest.raises(ERRORS[code], match=re.escape(message)):
        comm.barrier()
    comm.close()
    assert_all_ended()
    assert any("ncclCommAbort" in line for line in log_of(loaded("nccl")))
    return message


def _call(name, comm):
    CALLS[name](comm, torch.ones(10 * comm.world_size))
    comm.barrier()  # rank 2's part of a gather or scatter takes nobody but the root


def _fail_with_every_code(place, name):
    call = functools.partial(_call, name)
    return [_fail_in(place, FUNCTIONS[name], call, code=code) for code in CODES]


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_that_fails_on_one_rank_is_the_same_error_on_all(name):
    function = FUNCTIONS[name]
    for messages in values_of(outcomes_of(3, _fail_with_every_code, name)):
        for message, (code, text) in zip(messages, CODES.items(), strict=True):
            assert (
                f"{function} failed with code {code}, {text}: {function} : told to fail (NCCL "
                f"2.29.7)" in message
            )
            assert "rank 1" in message


def _fail_in_all_to_all(place, function):
    return _fail_in(place, function, functools.partial(_call, "all_to_all_single"), code=2)


@pytest.mark.parametrize("function", ["ncclRecv", "ncclGroupStart", "ncclGroupEnd"])
def test_of_a_group_the_call_that_failed_is_named(function):
    for message in values_of(outcomes_of(2, _fail_in_all_to_all, function)):
        assert f"{function} failed with code 2, unhandled system error: {function} : " in message


def _attach(comm):
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(mlp())


def _fail_to_attach_with_every_code(place, function):
    return [_fail_in(place, function, _attach, code=code) for code in CODES]


@pytest.mark.parametrize("function", ["ncclCommWindowRegister", "ncclCommSplit"])
def test_a_window_or_a_lane_that_fails_on_one_rank_ends_attach_on_all(function):
    for messages in values_of(outcomes_of(2, _fail_to_attach_with_every_code, function)):
        for message, (code, text) in zip(messages, CODES.items(), strict=True):
            assert f"{function} failed with code {code}, {text}" in message


def _lack_memory(place):
    comm = communicator(place)
    messages = []
    for code in CODES:
        with failing("ncclMemAlloc", code) if place.rank == 1 else contextlib.nullcontext():
            message, seconds = raised(
                ERRORS[code] if place.rank == 1 else FastcommError, lambda: _attach(comm)
            )
        assert seconds < SOON
        messages.append(message)
    _attach(comm)
    return messages


def test_memory_that_one_rank_does_not_get_costs_no_more_than_that_attach():
    first, second = values_of(outcomes_of(2, _lack_memory))
    assert all("rank 1" in message for message in first)
    for message, (code, text) in zip(second, CODES.items(), strict=True):
        assert (
            f"ncclMemAlloc failed with code {code}, {text}: ncclMemAlloc : told to fail "
            "(NCCL 2.29.7)" in message
        )


# The driver


def _fail_in_the_driver(place, function):
    comm = communicator(place)
    comm.barrier()
    with failing(function, LAUNCH_FAILED) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(FastcommError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < SOON
    assert_all_ended()
    return message


@pytest.mark.parametrize("function", ["cuEventRecord", "cuStreamWaitEvent"])
def test_a_driver_that_fails_on_one_rank_ends_the_collective_on_all(function):
    for message in values_of(outcomes_of(2, _fail_in_the_driver, function)):
        assert (
            f"{function} failed: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)" in message
        )


def _fail_once_in_a_bucket(place, function):
    comm = communicator(place)
    model = mlp()
    expected = mean_gradients(model, place.world_size, backward)
    fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    with failing(function, LAUNCH_FAILED) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(FastcommError, lambda: backward(model, place.rank))
    assert seconds < SOON
    backward(model, place.rank)
    assert_gradients(model, expected)
    assert comm.n_abandoned == 1
    return message


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_driver_that_fails_in_a_bucket_costs_the_step_on_all(function):
    first, second = values_of(outcomes_of(2, _fail_once_in_a_bucket, function))
    assert "rank 1 abandoned" in first
    assert f"{function} failed: CUDA_ERROR_LAUNCH_FAILED" in second


def _fail_while_nobody_looks(place):
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)
    work = comm.all_reduce(torch.ones(10), async_op=True)
    with failing("cuEventQuery", LAUNCH_FAILED):
        deadline = time.monotonic() + SOON
        with pytest.raises(FastcommError, match="cuEventQuery failed: CUDA_ERROR_LAUNCH_FAILED"):
            while time.monotonic() < deadline:
                comm.check()
                time.sleep(0.02)
    with pytest.raises(FastcommError, match="cuEventQuery"):
        work.wait()
    assert_all_ended()


def test_a_kernel_that_has_crashed_is_noticed_without_a_call():
    values_of(outcomes_of(2, _fail_while_nobody_looks))


# Asynchronous errors


def _report_an_asynchronous_error(place, code):
    comm = communicator(place)
    if place.rank == 1:
        time.sleep(0.3)
        loaded("nccl").stand_in_async_error(code)
    message, seconds = raised(
        FastcommError, comm.barrier if place.rank == 0 else lambda: _wait_for_error(comm)
    )
    assert seconds < SOON
    assert_all_ended()
    with pytest.raises(FastcommError) as again:
        comm.check()
    return message, type(again.value).__name__


def _wait_for_error(comm):
    while True:
        comm.check()
        time.sleep(0.01)


@pytest.mark.parametrize("code", [*CODES])
def test_an_asynchronous_error_is_raised_on_all(code):
    for message, kind in values_of(outcomes_of(2, _report_an_asynchronous_error, code)):
        assert kind == ERRORS[code].__name__
        assert f"code {code}, {CODES[code]}" in message
