"""The harness itself: what a test is told when ranks fail, die or hang."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.outcomes import RankError
from tests.support.ranks import fresh_ranks, torchrun_env


def _rank(comm):
    return comm.rank


def _raise_on_rank_1(comm):
    if comm.rank == 1:
        raise KeyError("no such thing")
    return "fine"


def _raise(comm):
    raise KeyError(comm.rank)


def _hang_on_rank_1(comm):
    if comm.rank == 1:
        time.sleep(1000)


def _kill_rank_1(place):
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.environ.get("RANK")


def test_a_failure_shows_what_happened_on_every_rank(ranks):
    with pytest.raises(
        RankError,
        match=r"(?s)rank 0 returned 'fine'.*rank 1 raised KeyError: 'no such thing'.*in "
        r"_raise_on_rank_1",
    ):
        ranks(2, _raise_on_rank_1)
    assert ranks(2, _rank) == [0, 1]


def test_an_exception_expected_on_every_rank_must_come_on_every_rank(ranks):
    assert [failure.message for failure in ranks.raises(2, LookupError, _raise, survives=True)] == [
        "0",
        "1",
    ]
    with pytest.raises(RankError):
        ranks.raises(2, LookupError, _raise_on_rank_1)
    with pytest.raises(RankError):
        ranks.raises(2, OSError, _raise)


def test_a_rank_that_hangs_is_killed_and_shown_with_its_stack(ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1 had not answered.*in _hang_on_rank_1"):
        ranks(2, _hang_on_rank_1, timeout=2)
    assert ranks(2, _rank) == [0, 1]


def test_fresh_ranks_say_how_they_ended():
    survivor, victim = fresh_ranks(2, _kill_rank_1, env=torchrun_env(2))
    assert (survivor.kind, survivor.value, survivor.exitcode) == ("returned", "0", 0)
    assert (victim.kind, victim.exitcode) == ("died", -signal.SIGKILL)
