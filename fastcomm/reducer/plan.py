"""Plan: makes the buckets in which a model's gradients are reduced, as its options ask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.nn import Parameter

from fastcomm.comm.collective import bucket_label
from fastcomm.comm.communicator import Communicator
from fastcomm.reducer.agreement import grad_dtype
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.geometry import kind_of
from fastcomm.reducer.hooked_bucket import BucketHooks
from fastcomm.reducer.layout import plan_buckets
from fastcomm.reducer.options import Options
from fastcomm.reducer.shares import Sharding


def make_buckets(
    named: Sequence[tuple[str, Parameter]],
    comm: Communicator,
    options: Options,
    number: int,
    n_rounds: int,
    sharding: Sharding | None,
) -> list[Bucket]:
    """Makes the buckets for these parameters' gradients, in the order in which they will be full.
    number: of the reducer, among those of the communicator. n_rounds: see Reducer.
    """
    names, parameters = [name for name, _ in named], [p for _, p in named]
    layouts = plan_buckets(
        [kind_of(p, grad_dtype(p)) for p in parameters],
        cap_bytes=options.cap_bytes,
        first_cap_bytes=options.first_cap_bytes,
    )
    shares: list[tuple[Sharding, tuple[int, ...]] | None] = [None] * len(layouts)
    if sharding is not None:
        shares = [(sharding, bounds) for bounds in sharding.bounds(layouts, comm.world_size)]
    last = len(layouts) - 1
    options.hook_calls.begin(comm)
    buckets = [
        Bucket(
            bucket_label(number, i),
            layout,
            parameters,
            names,
            comm,
            wire_dtype=options.wire_dtype,
            error_feedback=options.error_feedback,
            lane=i % options.streams,
            hooks=BucketHooks(options.hooks, options.hook_calls, i, i == last)
            if options.hooks
            else None,
            n_rounds=n_rounds,
            sharding=shares[i],
            skip_nonfinite=options.skip_nonfinite,
        )
        for i, layout in enumerate(layouts)
    ]
    number_gradients(buckets)
    return buckets


def number_gradients(buckets: Sequence[Bucket]) -> None:
    """In the order of the buckets, for those who note what happens to each gradient."""
    for before, bucket in itertools.pairwise(buckets):
        bucket.first = before.first + len(before.names)
