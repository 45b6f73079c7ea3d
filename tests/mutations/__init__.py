"""Mutations: small defects that are put into the sources one at a time, to see whether the tests
notice. `make mutate` does it; the ordinary suite only checks that the list fits the sources.

One file for each area holds its list.
"""

from __future__ import annotations

from tests.mutations import (
    audit,
    backend,
    compiled,
    complex_and_sparse,
    counts,
    devices,
    going_on,
    group,
    join,
    kernels,
    local_sgd,
    meeting,
    nccl,
    ordering,
    reducer,
    sharded,
    shards,
    shm,
    skips,
    starting_and_showing,
    stragglers,
    weights,
)

AREAS = (
    kernels,
    shm,
    nccl,
    ordering,
    devices,
    group,
    join,
    meeting,
    reducer,
    local_sgd,
    sharded,
    shards,
    backend,
    weights,
    complex_and_sparse,
    compiled,
    skips,
    counts,
    starting_and_showing,
    going_on,
    stragglers,
    audit,
)
MUTATIONS = tuple(mutation for area in AREAS for mutation in area.MUTATIONS)
