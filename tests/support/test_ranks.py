"""The harness itself: what a test is told when ranks fail, die or hang."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support import delays
from tests.support.outcomes import RankError, values_of
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


def test_results_come_by_rank(ranks):
    assert ranks(3, _rank) == [0, 1, 2]


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


def _what_is_put_off(place):
    from fastcomm.reducer.bucket import Bucket
    from tests.support import rank_process

    functions = {"body": rank_process.carry_out, "launch": Bucket.launch, "finish": Bucket.finish}
    return [name for name, function in functions.items() if hasattr(function, "__wrapped__")]


@pytest.mark.parametrize(
    "asked, expected",
    [
        ("", [[], []]),
        ("1:5", [[], ["body", "launch", "finish"]]),
        ("0:5:finish", [["finish"], []]),
    ],
)
def test_one_rank_is_late_where_the_environment_asks_for_it(asked, expected):
    outcomes = fresh_ranks(2, _what_is_put_off, env={delays.VARIABLE: asked})
    assert values_of(outcomes) == expected


def test_a_delay_at_no_known_point_is_refused(monkeypatch):
    monkeypatch.setenv(delays.VARIABLE, "1:5:finnish")
    with pytest.raises(ValueError, match="a point is one of"):
        delays.asked_for()
