"""close() and abort() where NCCL fails or hangs in them."""

from __future__ import annotations

import contextlib
import io
import operator
import threading
import time

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, NcclError, TimeoutError
from fastcomm.comm import watchdog
from fastcomm.launching.bootstrap import process_has_ended
from fastcomm.transports.nccl import link as nccl_link
from tests.fakes.stand_ins import assert_all_ended, failing, hanging, loaded, log_of, wait_for_call
from tests.support.bodies import leave, left, note, raised, wait_for_note
from tests.support.models import SMALL_BUCKETS, mlp
from tests.support.outcomes import values_of
from tests.transports.nccl import SOON, communicator, outcomes_of


def _fail_to_end(place, function):
    comm = communicator(place)
    kept = comm.empty(10, dtype=torch.float32)
    comm.bind_bucket(kept, [kept[:9]], [0], wire_dtype=None, label=1)
    with failing(function, 3):
        message, seconds = raised(NcclError, comm.close)
    assert seconds < SOON
    if function == "ncclCommDestroy":  # NCCL may have freed some of it: it is not touched again
        assert _calls("ncclCommAbort") == 0
    else:
        assert_all_ended()
    comm.close()
    kept.zero_()
    return message


@pytest.mark.parametrize(
    "function", ["ncclCommWindowDeregister", "ncclCommFinalize", "ncclCommDestroy"]
)
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
    nccl_link.ABORT_S = 0.5
    comm = communicator(place)
    with hanging("ncclCommAbort"):
        before = time.monotonic()
        comm.abort()
        assert time.monotonic() - before < SOON
    with pytest.raises(FastcommError, match="aborted"):
        comm.barrier()


def test_an_abort_that_hangs_is_left_behind():
    values_of(outcomes_of(1, _abort_for_ever))


def _close_before_the_others(place):
    nccl_link.FREE_S = 0.3
    comm = communicator(place)
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(mlp())
    loaded("nccl").stand_in_end_together(1)
    if place.rank == 1:
        wait_for_note(place, "closed")
    before = time.monotonic()
    comm.close()
    assert time.monotonic() - before < SOON
    if place.rank == 0:
        assert loaded("nccl").stand_in_live_comms() == 2
        note(place, closed=True)
    assert_all_ended()
    return _calls("ncclCommAbort"), loaded("nccl").stand_in_overtaken()


def test_a_close_leaves_what_nccl_frees_when_the_other_ranks_have_closed():
    assert values_of(outcomes_of(2, _close_before_the_others)) == [(0, 0)] * 2


def _close_behind_an_abort(place, how):
    watchdog.LOOK_S = 60  # it does not hear of it before
    comm = communicator(place)
    loaded("nccl").stand_in_end_together(1)
    if place.rank == 1:
        with failing("ncclCommFinalize", 3), contextlib.suppress(NcclError):
            leave(place, comm, how)
        note(place, over=True)
        return None
    wait_for_note(place, "left_at" if how == "killed" else "over")
    while how == "killed" and not process_has_ended(left(place)[0]):
        time.sleep(0.01)
    before = time.monotonic()
    comm.close()
    assert time.monotonic() - before < SOON
    assert_all_ended()
    return _calls("ncclCommDestroy"), _calls("ncclCommAbort")


@pytest.mark.parametrize("how", ["aborts", "closes", "killed"])
def test_a_close_aborts_where_another_rank_destroys_nothing(how):
    """NCCL would wait in its destruction for that rank, whose own close fails, for example."""
    assert values_of(outcomes_of(2, _close_behind_an_abort, how), 1) == [(0, 1)]


# Revocations that do not return at once: NCCL waits in them for its kernels to leave the device,
# which stand behind whatever else was launched. To abort meanwhile would free what they use.

NEVER = 99


def _calls(name):
    return [line.split()[0] for line in log_of(loaded("nccl"))].count(name)


def _abort_lanes_that_wait_for_each_other(place):
    comm = communicator(place)
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(mlp())
    loaded("nccl").stand_in_hold_revocations(2)
    loaded("nccl").stand_in_clear_log()
    before = time.monotonic()
    comm.abort()
    assert time.monotonic() - before < 1.5
    assert_all_ended()
    ends = [line.split()[0] for line in log_of(loaded("nccl")) if "Comm" in line]
    return [name for name in ends if name in ("ncclCommRevoke", "ncclCommAbort")]


def test_all_lanes_are_revoked_before_one_is_aborted():
    expected = ["ncclCommRevoke"] * 2 + ["ncclCommAbort"] * 2
    assert values_of(outcomes_of(1, _abort_lanes_that_wait_for_each_other)) == [expected]


def _leave_lanes_behind(place, end):
    nccl_link.ABORT_S = 0.5
    comm = communicator(place)
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(mlp())
    loaded("nccl").stand_in_hold_revocations(NEVER)
    before = time.monotonic()
    with contextlib.suppress(FastcommError):
        end(comm)
    assert time.monotonic() - before < SOON
    message, _ = raised(FastcommError, comm.barrier)
    assert _calls("ncclCommAbort") == 0
    loaded("nccl").stand_in_hold_revocations(0)
    assert_all_ended()  # their threads are still at it
    assert loaded("nccl").stand_in_overtaken() == 0
    return message


@pytest.mark.parametrize("how", ["abort", "abandon"])
def test_lanes_whose_revocation_does_not_return_in_time_are_left_behind(how):
    (message,) = values_of(outcomes_of(1, _leave_lanes_behind, operator.methodcaller(how)))
    assert how in message
    assert "NCCL has not ended 2 of 2 lanes within 0.5 s: they are left behind" in message


def _stay_inside(place):
    nccl_link.ABORT_S = 0.5
    comm = communicator(place)
    if place.rank == 1:
        wait_for_note(place, "aborted")
        return None
    loaded("nccl").stand_in_stay_inside(1)
    calling = threading.Thread(target=raised, args=(FastcommError, comm.barrier))
    calling.start()
    wait_for_call("ncclAllReduce")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        comm.abort()
    note(place, aborted=True)
    assert calling.is_alive() and _calls("ncclCommAbort") == 0
    loaded("nccl").stand_in_stay_inside(0)
    calling.join(SOON)
    assert_all_ended()
    assert _calls("ncclCommAbort") == 1 and loaded("nccl").stand_in_overtaken() == 0
    return said.getvalue()


def test_a_thread_that_stays_inside_nccl_is_left_behind_and_nothing_is_freed_under_it():
    said, _ = values_of(outcomes_of(2, _stay_inside))
    assert "NCCL has not ended 1 of 1 lanes within 0.5 s: they are left behind" in said


def _close_until_the_device_comes_to_rest(place):
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)
    with pytest.raises(TimeoutError, match="it was aborted"):
        comm.close(timeout=0.3)
    assert_all_ended()
    loaded("cuda").stand_in_hold_events(0)
    time.sleep(0.3)
    return _calls("ncclCommFinalize")


def test_a_close_that_was_given_up_does_not_finalize_what_is_gone():
    assert values_of(outcomes_of(1, _close_until_the_device_comes_to_rest)) == [0]
