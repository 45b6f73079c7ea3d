"""A ShardedOptimizer over NCCL: its calls, and who waits for them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

CALLS = "fastcomm/nccl/calls.pyx"
BUCKET = "fastcomm/nccl/bucket.pyx"
SHARDED = "fastcomm/reducer/sharded.py"

FILE = "tests/nccl/test_shares.py"
EQUAL = f"{FILE}::test_equal_shares_are_reduce_scattered_and_gathered"
WHOLE = f"{FILE}::test_whole_parameters_are_reduced_into_their_owner_and_sent_from_it"
PARAMETERS = f"{FILE}::test_shares_give_the_parameters_of_whole_buckets"
ORDERED = f"{FILE}::test_training_with_shares_is_ordered"

MUTATIONS = (
    Mutation(
        name="shares: all whole parameters are reduced into rank 0, and sent from it",
        file=CALLS,
        old="Call(each, share, share, numel, dtype, 0, r)",
        new="Call(each, share, share, numel, dtype, 0, 0)",
        tests=(WHOLE, PARAMETERS),
    ),
    Mutation(
        name="shares: every rank gathers the first share",
        file=CALLS,
        old="calls[0].source, calls[0].target = share, whole",
        new="calls[0].source, calls[0].target = whole, whole",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shares: every rank's share is scattered to the beginning",
        file=CALLS,
        old="Call(alike, whole, share, numel, dtype, 0, 0)",
        new="Call(alike, whole, whole, numel, dtype, 0, 0)",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shares: whole buckets are reduced",
        file=BUCKET,
        old="        if bounds is not None:\n            first = bounds[len(bounds) - 1]\n",
        new="        if False:\n            first = bounds[len(bounds) - 1]\n",
        tests=(EQUAL, WHOLE),
    ),
    Mutation(
        name="shares: no rank hears which gradients the others have",
        file=BUCKET,
        old="        self.n_calls = n + 1\n",
        new="        self.n_calls = n or 1\n",
        tests=(EQUAL, PARAMETERS),
    ),
    Mutation(
        name="shares: the first share is cast back on every rank",
        file=BUCKET,
        old="begin, end = bounds[self.link.rank], bounds[self.link.rank + 1]",
        new="begin, end = bounds[0], bounds[1]",
        tests=(PARAMETERS,),
    ),
    Mutation(
        name="shares: gathers begin with what the next forward uses last",
        file=SHARDED,
        old="in reversed(list(enumerate(self._buckets))):",
        new="in list(enumerate(self._buckets)):",
        tests=(WHOLE,),
    ),
    Mutation(
        name="shares: step() does not wait for the gathers",
        file=SHARDED,
        old="        for work in under_way.values():\n            work.wait()\n",
        new="",
        tests=(ORDERED,),
    ),
)
