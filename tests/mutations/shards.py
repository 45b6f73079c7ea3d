"""A ShardedOptimizer over NCCL: its calls."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CALLS = "fastcomm/transports/nccl/calls.pyx"

FILE = "tests/transports/nccl/test_shards.py"
WHOLE = f"{FILE}::test_whole_parameters_are_reduced_into_their_owner_and_sent_from_it"
PARAMETERS = f"{FILE}::test_shards_give_the_parameters_of_whole_buckets"

MUTATIONS = (
    Mutation(
        name="shards: all whole parameters are reduced into rank 0, and sent from it",
        file=CALLS,
        within="_move",
        old="NcclCall(each, shard, shard, numel, dtype, 0, r)",
        new="NcclCall(each, shard, shard, numel, dtype, 0, 0)",
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
        old="NcclCall(alike, whole, shard, numel, dtype, 0, 0)",
        new="NcclCall(alike, whole, whole, numel, dtype, 0, 0)",
        tests=(PARAMETERS,),
    ),
)
