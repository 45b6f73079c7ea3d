"""Many ranks meet: what the store is asked, by ranks that are made up."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from fastcomm import InitError
from fastcomm.launching.bootstrap import StoreBootstrap

N_RANKS = 256


class Store:
    """torch's, with these values of ranks. Counts the requests."""

    def __init__(self, values):
        self._store, self.n_requests = HashStore(), 0
        for rank, value in values.items():
            self._store.set(f"1/{rank}", json.dumps(value))

    def __getattr__(self, name):
        self.n_requests += 1
        return getattr(self._store, name)


def _bootstrap(store, rank, timeout_s=10.0):
    return StoreBootstrap(store, rank, N_RANKS, timedelta(seconds=timeout_s))


def _requests_of(store, rank):
    met = _bootstrap(store, rank)
    before = store.n_requests
    seen = met.exchange({"rank": rank}, {"rank": range(N_RANKS)})
    assert seen == [{"rank": one} for one in range(N_RANKS)]
    return store.n_requests - before


def test_one_rank_collects_the_values_of_all():
    store = Store({rank: {"rank": rank} for rank in range(1, N_RANKS)})
    assert [_requests_of(store, rank) for rank in (0, 1, 100, 255)] == [4, 3, 3, 3]


def test_a_rank_that_is_missing_among_many_is_named():
    store = Store({rank: 0 for rank in range(N_RANKS) if rank not in (7, 200)})
    with pytest.raises(InitError, match="rank 5 waited .* missing: rank 7, 200;"):
        _bootstrap(store, 5, timeout_s=0.1).exchange(0, int)


def test_a_first_rank_that_passes_nothing_on_is_named():
    store = Store(dict.fromkeys(range(N_RANKS), 0))
    with pytest.raises(InitError, match="rank 5 waited .* missing: rank 0;"):
        _bootstrap(store, 5, timeout_s=0.1).exchange(0, int)
