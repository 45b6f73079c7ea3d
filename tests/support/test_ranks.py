"""The harness itself: what a test is told when ranks fail, die or hang."""

from __future__ import annotations

import time

import pytest

from tests.support.outcomes import RankError


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
    assert ranks(2, _rank) == [0, 1]  # they have started, which takes longer on a busy machine
    with pytest.raises(RankError, match=r"(?s)rank 1 had not answered.*in _hang_on_rank_1"):
        ranks(2, _hang_on_rank_1, timeout=3)
    assert ranks(2, _rank) == [0, 1]
