"""The harness itself: what a test is told when ranks fail, die or hang."""

from __future__ import annotations

import pytest

from tests.support.outcomes import RankError


def _rank(comm):
    return comm.rank


def _raise_on_rank_1(comm):
    if comm.rank == 1:
        raise KeyError("no such thing")
    return "fine"


def test_a_failure_shows_what_happened_on_every_rank(ranks):
    with pytest.raises(
        RankError,
        match=r"(?s)rank 0 returned 'fine'.*rank 1 raised KeyError: 'no such thing'.*in "
        r"_raise_on_rank_1",
    ):
        ranks(2, _raise_on_rank_1)
    assert ranks(2, _rank) == [0, 1]
