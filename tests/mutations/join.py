"""Ranks without data: join(), and what transports do for it."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

PROGRESS = "fastcomm/reducer/features/progress.py"
TESTS = "tests/reducer/features/test_join.py"


def _test(name: str) -> tuple[str, ...]:
    return (f"{TESTS}::{name}",)


_TRAINING = _test("test_random_plans")

MUTATIONS = (
    Mutation(
        name="join: on shm the shard of a rank without data is left out",
        file="kernels/shm/protocol.c",
        within="conclude",
        old="c->announcement = *v.wanted;",
        new="c->announcement = *v.wanted, c->announcement.numel = 0;",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: over NCCL ranks without data count as such with data",
        file="fastcomm/transports/nccl/rounds.py",
        within="follow",
        old="_part_of_totals(comm, 0.0, 0, 0)",
        new="_part_of_totals(comm, 1.0, 0, 0)",
        tests=_TRAINING,
    ),
    Mutation(
        name="join: over NCCL ranks without data take part for the first reducer alone",
        file="fastcomm/transports/nccl/rounds.py",
        within="follow",
        old="round(sum_of_numbers / n_ranks)",
        new="min(one.label // BUCKETS_PER_REDUCER for one in comm.buckets)",
        tests=_test("test_random_plans"),
    ),
    Mutation(
        name="join: a rank that has made no step has other optimizers",
        file=PROGRESS,
        within="_differ",
        old="return is_behind",
        new="return len(known) != len(most)",
        tests=_TRAINING,
    ),
)
