"""Many ranks meet: what the store is asked, by ranks that are made up; and real ones."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fastcomm import InitError
from fastcomm.launching import bootstrap
from fastcomm.launching.bootstrap import StoreBootstrap
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks
from tests.support.reference import check_all_reduce

N_RANKS = 256


class Store(dict):
    """torch's, as far as a bootstrap uses it, in this process. Counts the requests."""

    n_requests = 0

    def _count(self):
        self.n_requests += 1

    def set(self, key, value):
        self._count()
        self[key] = value.encode()

    def get(self, key):
        self._count()
        return self[key]

    def check(self, keys):
        self._count()
        return all(key in self for key in keys)

    def add(self, key, number):
        self._count()
        self[key] = self.get(key) + number if key in self else number
        return self[key]

    def compare_set(self, key, expected, value):
        self._count()
        return self.setdefault(key, value.encode())


def _bootstrap(store, rank, timeout_s=10.0):
    return StoreBootstrap(store, rank, N_RANKS, timedelta(seconds=timeout_s))


def _requests_of(store, rank):
    met = _bootstrap(store, rank)
    before = store.n_requests
    assert met.exchange({"rank": rank}, {"rank": range(N_RANKS)}) == [
        {"rank": r} for r in range(N_RANKS)
    ]
    return store.n_requests - before


def test_one_rank_collects_the_values_of_many():
    store = Store({f"1/{rank}": b'{"rank": %d}' % rank for rank in range(1, N_RANKS)})
    assert _requests_of(store, 0) <= 2 * N_RANKS + 2
    assert [_requests_of(store, rank) for rank in (1, 100, 255)] == [3] * 3


def test_a_rank_that_is_missing_among_many_is_named():
    store = Store({f"1/{rank}": b"0" for rank in range(N_RANKS) if rank not in (7, 200)})
    with pytest.raises(InitError, match="rank 5 waited .* missing: rank 7, 200;"):
        _bootstrap(store, 5, timeout_s=0.1).exchange(0, int)


def test_a_first_rank_that_passes_nothing_on_is_named():
    store = Store({f"1/{rank}": b"0" for rank in range(N_RANKS)})
    with pytest.raises(InitError, match="rank 5 waited .* missing: rank 0;"):
        _bootstrap(store, 5, timeout_s=0.1).exchange(0, int)


def _reduce(place):
    bootstrap._FEW = 2
    check_all_reduce(communicator(place))


def test_more_ranks_than_exchange_values_directly_meet():
    values_of(fresh_ranks(3, _reduce))
