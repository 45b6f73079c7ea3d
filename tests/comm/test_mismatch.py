"""How the message of a mismatch begins, and what it advises."""

from __future__ import annotations

import pytest
import torch

from fastcomm.comm.collective import bucket_label, fingerprint_of
from fastcomm.comm.words import BACKWARDS, BEGINNINGS, CALLS, RECORDS, STEPS, Called, called
from fastcomm.comm.words import mismatch as mismatch_of

BARRIER = Called("barrier", "barrier")


def bucket(n_steps: int, record: int = 0, op: str = "mean", kind: str = "all_reduce") -> Called:
    fingerprint = fingerprint_of(n_steps, record)
    return called(kind, 34, torch.float32, op=op, label=bucket_label(0, 0), fingerprint=fingerprint)


def test_a_bucket_is_called_by_its_number_and_what_its_rank_has_stepped() -> None:
    words = "all_reduce of 34 float32 elements, op mean (bucket 0 of reducer 0)"
    assert str(bucket(0)) == words
    assert str(bucket(1, 0xBADCAFE)) == f"{words} after 1 step (record 0badcafe)"
    assert bucket(2, 0xBADCAFE).without_record() == f"{words} after 2 steps"


@pytest.mark.parametrize(
    "first, second, differs",
    [
        (bucket(1), bucket(2), STEPS),
        (bucket(0), bucket(1, 0xBADCAFE), STEPS),
        (bucket(1, 0xBADCAFE), bucket(1), RECORDS),
        (bucket(1), bucket(1, op="sum"), CALLS),
        (bucket(1), BARRIER, BACKWARDS),
    ],
)
def test_a_mismatch_begins_with_what_differs(first: Called, second: Called, differs: str) -> None:
    beginning = BEGINNINGS[CALLS if differs == BACKWARDS else differs]
    for calls in ([first, second], [second, first], [first, second, first]):
        error = mismatch_of(7, dict(enumerate(calls)))
        assert str(error).startswith(f"{beginning} (number 7 on this communicator): rank 0")
        assert error.differs == differs
        assert ("(record" in str(error)) == (differs == RECORDS)


def test_a_step_that_one_rank_leaves_out_is_told_from_a_backward() -> None:
    gather = called("all_gather_v", 2, torch.float32)
    for first, second in ((gather, bucket(1)), (bucket(1), gather)):
        message = str(mismatch_of(7, {0: first, 1: second}))
        assert "and others in the step() of a ShardedOptimizer" in message
        assert "past their last backward" not in message
