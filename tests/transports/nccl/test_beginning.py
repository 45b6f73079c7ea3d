"""Ranks that cannot begin over NCCL: each says why, or is missed at the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest

from fastcomm import FastcommError, InitError
from fastcomm.transports.nccl import link as nccl_link
from tests.fakes.stand_ins import assert_all_ended, failing, hanging, wait_for_call
from tests.support.bodies import raised
from tests.support.outcomes import values_of
from tests.support.ranks import torchrun_env
from tests.transports.nccl import CODES, ERRORS, communicator, outcomes_of, stand_in_values


def _fail_to_begin(place, function):
    failing_rank = 0 if function == "ncclGetUniqueId" else 1
    messages = []
    for code in CODES:
        with failing(function, code) if place.rank == failing_rank else contextlib.nullcontext():
            messages.append(
                raised(
                    ERRORS[code] if place.rank == failing_rank else InitError,
                    lambda code=code: communicator(
                        place, init_method=f"{place.init_method}-{code}"
                    ),
                )[0]
            )
    communicator(place).close()
    return messages


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig"])
def test_a_rank_that_cannot_begin_says_why_and_the_others_are_told(function):
    for messages in values_of(outcomes_of(2, _fail_to_begin, function)):
        for message, (code, text) in zip(messages, CODES.items(), strict=True):
            assert (
                f"{function} failed with code {code}, {text}: {function} : told to fail (NCCL "
                f"2.29.7)" in message
            )


def _begin_for_ever(place):
    with hanging("ncclCommInitRankConfig"):
        return raised(InitError, lambda: communicator(place, timeout=timedelta(seconds=2)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_beginning_that_never_ends_is_given_up_at_the_deadline(world_size):
    for message, seconds in values_of(outcomes_of(world_size, _begin_for_ever)):
        assert 1.9 < seconds < 5
        assert "ncclCommInitRankConfig" in message and "2 s" in message


def _die_at_the_beginning(place):
    if place.rank == 1:
        with hanging("ncclCommInitRankConfig"):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            communicator(place)
    return raised(FastcommError, lambda: communicator(place, timeout=timedelta(seconds=3)))


def test_a_rank_that_dies_at_the_beginning_is_missed_at_the_deadline():
    outcomes = outcomes_of(3, _die_at_the_beginning)
    for _, seconds in values_of([outcomes[0], outcomes[2]]):
        assert seconds < 6


def _die_while_nccl_connects():
    wait_for_call("ncclCommInitRankConfig")
    time.sleep(0.2)  # the other rank comes as far, too
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_the_store(place):
    with hanging("ncclCommInitRankConfig"):
        if place.rank == 0:
            threading.Thread(target=_die_while_nccl_connects).start()
        return raised(
            FastcommError, lambda: communicator(place, init_method=os.environ["MEETING_POINT"])
        )


def test_a_store_that_goes_while_nccl_connects_is_fastcomms_error():
    meeting_point = {"MEETING_POINT": f"tcp://127.0.0.1:{torchrun_env(2)[0]['MASTER_PORT']}"}
    ((_, seconds),) = values_of(outcomes_of(2, _lose_the_store, env=[meeting_point] * 2)[1:])
    assert seconds < 3


def _die_before_anybody_watches(place):
    make_watchdog = nccl_link.Watchdog

    def make_watchdog_late(*arguments):
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        return make_watchdog(*arguments)

    nccl_link.Watchdog = make_watchdog_late
    message, _ = raised(FastcommError, lambda: communicator(place))
    assert_all_ended()
    return message


def test_a_rank_that_dies_before_it_is_watched_is_named():
    (message,) = values_of(outcomes_of(2, _die_before_anybody_watches)[:1])
    assert "rank 1" in message and "died" in message


def _registering(place):
    communicator(place)
    names = "NCCL_LOCAL_REGISTER", "NCCL_GRAPH_REGISTER"
    return [os.environ.get(name) for name in names]


@pytest.mark.parametrize(
    "version, user, expected",
    [("22907", {}, ["0", "0"]), ("22707", {}, [None, "0"]), ("22605", {}, ["0", "0"])]
    + [("22907", {"NCCL_GRAPH_REGISTER": "1"}, ["0", "1"])],
)
def test_nccl_registers_windows_only_unless_it_is_told(version, user, expected):
    env = {"FASTCOMM_STAND_IN_NCCL_VERSION": version, **user}
    assert stand_in_values(1, _registering, env=env) == [expected]
