"""Many ranks meet: what the store is asked, by ranks that are made up."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fastcomm import InitError
from fastcomm.launching.bootstrap import StoreBootstrap

N_RANKS = 256


class Store(dict):
    """torch's, as far as a bootstrap uses it, in this process. Counts the requests."""

    n_requests = 0

    def _count(self):
        self.n_requests += 1

    def set(self, key, value):
        self._count()
        self[key] = value.encode()

    def multi_get(self, keys):
        self._count()
        return [self[key] for key in keys]

    def check(self, keys):
        self._count()
        return all(key in self for key in keys)

    def compare_set(self, key, expected, value):
        self._count()
        return self.setdefault(key, value.encode())


def _bootstrap(store, rank, timeout_s=10.0):
    return StoreBootstrap(store, rank, N_RANKS, timedelta(seconds=timeout_s))


def test_the_store_is_asked_as_often_among_many_ranks_as_among_few():
    store = Store({f"1/{rank}": b'{"rank": %d}' % rank for rank in range(N_RANKS)})
    met = _bootstrap(store, 100)
    before = store.n_requests
    seen = met.exchange({"rank": 100}, {"rank": range(N_RANKS)})
    assert seen == [{"rank": rank} for rank in range(N_RANKS)]
    assert store.n_requests - before == 3


def test_a_rank_that_is_missing_among_many_is_named():
    store = Store({f"1/{rank}": b"0" for rank in range(N_RANKS) if rank not in (7, 200)})
    with pytest.raises(InitError, match="rank 5 waited .* missing: rank 7, 200;"):
        _bootstrap(store, 5, timeout_s=0.1).exchange(0, int)
