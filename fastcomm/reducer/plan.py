"""Plan: makes the buckets in which a model's gradients are reduced, as options and features ask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from fastcomm.comm.collective import bucket_label
from fastcomm.comm.transport import BoundBucket, Transport
from fastcomm.reducer.bucket import Binding, Bucket
from fastcomm.reducer.features.shards import BucketShard, Sharding
from fastcomm.reducer.features.sparse_bucket import SparseBucket
from fastcomm.reducer.layout import kind_of, plan_buckets
from fastcomm.reducer.options import Options
from fastcomm.reducer.validation import NamedParameters, grad_dtype


def make_buckets(
    named: NamedParameters,
    sparse: set[str],
    comm: Transport,
    options: Options,
    number: int,
    n_rounds: int,
    sharding: Sharding | None,
    order: Sequence[int] | None = None,
) -> list[Bucket]:
    """Make the buckets for these parameters' gradients, in the order in which they will be full.
    The one of sparse gradients is the last but one, since the launch of the last one must not wait.

    sparse: names of parameters with sparse gradients. number: of the reducer, among those of the
    communicator. n_rounds: see Reducer. order: in which the gradients of dense ones are expected,
    by their indices; None: not known yet.
    """
    dense = [pair for pair in named if pair[0] not in sparse]
    buckets: list[Bucket] = _dense_buckets(dense, comm, options, number, n_rounds, sharding, order)
    if sparse:
        own = [pair for pair in named if pair[0] in sparse]
        label = bucket_label(number, len(buckets))
        one = SparseBucket(label, own, comm, options.wire_dtype, n_rounds)
        comm.flight.names[label] = _in_words(one.names)
        buckets.insert(max(len(buckets) - 1, 0), one)
    for before, bucket in itertools.pairwise(buckets):
        bucket.first = before.first + len(before.names)
    return buckets


def _dense_buckets(
    named: NamedParameters,
    comm: Transport,
    options: Options,
    number: int,
    n_rounds: int,
    sharding: Sharding | None,
    order: Sequence[int] | None,
) -> list[Bucket]:
    layouts = plan_buckets(
        [kind_of(p, grad_dtype(p)) for _, p in named],
        cap_bytes=options.cap_bytes,
        first_cap_bytes=options.first_cap_bytes,
        order=order,
    )
    all_bounds = None if sharding is None else sharding.bounds(layouts, comm.world_size)
    buckets = []
    for i, layout in enumerate(layouts):
        label = bucket_label(number, i)
        bounds = None if all_bounds is None else all_bounds[i]
        needs_all = sharding is None or sharding.keeps_gradients
        bucket = Bucket(
            comm,
            layout,
            named,
            _binding(comm, options, i, label, None if needs_all else bounds),
            numel=layout.numel if bounds is None else bounds[-1],
            is_copied=options.wire_dtype not in (None, layout.dtype),
            n_rounds=n_rounds,
        )
        if options.skip_nonfinite:
            bucket.start_counting()
        if sharding is not None and bounds is not None:
            bucket.shard = BucketShard(comm, sharding, bounds, bucket, label)
        comm.flight.names[label] = _in_words(bucket.names)
        buckets.append(bucket)
    return buckets


def _in_words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def _binding(
    comm: Transport,
    options: Options,
    i: int,
    label: int,
    bounds: tuple[int, ...] | None,
) -> Binding:
    """How the i-th flat buffer is bound to the communicator."""

    def bind(flat: Tensor, views: list[Tensor], offsets: list[int]) -> BoundBucket:
        return comm.bind_bucket(
            flat,
            views,
            offsets,
            wire_dtype=options.wire_dtype,
            label=label,
            lane=i % options.streams,
            bounds=bounds,
            error_feedback=options.error_feedback,
        )

    return bind
