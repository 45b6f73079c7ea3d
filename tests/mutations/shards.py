"""A ShardedOptimizer over NCCL: its calls."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CALLS = "fastcomm/transports/nccl/calls.pyx"
BUCKET = "fastcomm/transports/nccl/bucket.pyx"
SHARDED = "fastcomm/optim/sharded.py"

FILE = "tests/transports/nccl/test_shards.py"
EQUAL = f"{FILE}::test_equal_shards_are_reduce_scattered_and_gathered"
WHOLE = f"{FILE}::test_whole_parameters_are_reduced_into_their_owner_and_sent_from_it"
PARAMETERS = f"{FILE}::test_shards_give_the_parameters_of_whole_buckets"
ORDERED = f"{FILE}::test_training_with_shards_is_ordered"

MUTATIONS = (
    Mutation(
        name="shards: all whole parameters are reduced into rank 0, and sent from it",
        file=CALLS,
        within="_move",
        old="Call(each, shard, shard, numel, dtype, 0, r)",
        new="Call(each, shard, shard, numel, dtype, 0, 0)",
        tests=(WHOLE, PARAMETERS),
    ),
    Mutation(
        name="shards: every rank gathers the first shard",
        file=CALLS,
        within="_move",
        old="calls[0].source, calls[0].target = shard, whole",
        new="calls[0].source, calls[0].target = whole, whole",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shards: every rank's shard is scattered to the beginning",
        file=CALLS,
        within="_move",
        old="Call(alike, whole, shard, numel, dtype, 0, 0)",
        new="Call(alike, whole, whole, numel, dtype, 0, 0)",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shards: whole buckets are reduced",
        file=BUCKET,
        within="NcclBucket._fill_in_calls",
        old="if bounds is not None:",
        new="if False:",
        tests=(EQUAL, WHOLE),
    ),
    Mutation(
        name="shards: no rank hears which gradients the others have",
        file=BUCKET,
        within="NcclBucket._fill_in_calls",
        old="self.n_calls = n + 1",
        new="self.n_calls = n or 1",
        tests=(EQUAL, PARAMETERS),
    ),
    Mutation(
        name="shards: the first shard is cast back on every rank",
        file=BUCKET,
        within="NcclBucket._prepare_scattering",
        old="begin, end = bounds[self.link.rank], bounds[self.link.rank + 1]",
        new="begin, end = bounds[0], bounds[1]",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shards: step() does not wait for the gathers",
        file=SHARDED,
        within="ShardedOptimizer._spread",
        old="work.wait()",
        new="pass",
        tests=(ORDERED,),
    ),
)
