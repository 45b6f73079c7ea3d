"""How the message of a mismatch begins, and what it advises: from the calls in words alone."""

from __future__ import annotations

import pytest

from fastcomm.comm.collective import RECORDS_DIFFER, STEPS_DIFFER, mismatch, without_record

BUCKET = "all_reduce of 34 float32 elements, op mean (bucket 0 of reducer 0)"
OTHER_CALLS = "the ranks call different collectives"


@pytest.mark.parametrize(
    "first, second, beginning",
    [
        (f"{BUCKET} after 1 step", f"{BUCKET} after 2 steps", STEPS_DIFFER),
        (BUCKET, f"{BUCKET} after 1 step (record 0badcafe)", STEPS_DIFFER),
        (f"{BUCKET} after 1 step (record 0badcafe)", f"{BUCKET} after 1 step", RECORDS_DIFFER),
        (f"{BUCKET} after 1 step", f"{BUCKET.replace('mean', 'sum')} after 1 step", OTHER_CALLS),
        (f"{BUCKET} after 1 step", "barrier", OTHER_CALLS),
    ],
)
def test_a_mismatch_begins_with_what_differs(first: str, second: str, beginning: str) -> None:
    for calls in ([first, second], [second, first], [first, second, first]):
        assert mismatch(7, calls).startswith(f"{beginning} (number 7 on this communicator): rank 0")


def test_a_step_that_one_rank_leaves_out_is_told_from_a_backward() -> None:
    calls = ["all_gather_v of 2 float32 elements", "reduce_scatter_v of 34 (bucket 0 of reducer 1)"]
    for words in (calls, calls[::-1]):
        message = mismatch(7, words)
        assert "and others in the step() of a ShardedOptimizer" in message
        assert "past their last backward" not in message


def test_a_record_is_left_out_where_nobody_compares_it() -> None:
    assert without_record(f"{BUCKET} after 1 step (record 0badcafe)") == f"{BUCKET} after 1 step"
