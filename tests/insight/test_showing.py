"""Summary, trace and plot of two ranks' made-up steps, in which every duration is known."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from fastcomm.insight import showing
from fastcomm.insight.joined import Joined, offset_between
from fastcomm.insight.steps import BucketPlan, BucketTimes, Step, length

MS = 1_000_000
PLAN = (BucketPlan(("last.weight", "last.bias"), 64), BucketPlan(("first.weight",), 32))


def _step(late_ms: int = 0, number: int = 1, kind: str = "reduced") -> Step:
    """Forward from 1 to 3 ms, backward from 3 to 8, everything later by late_ms but for the first
    two; the buckets are reduced from 6 to 7 and from 9 to 10, after the later of two ranks.
    """
    late = late_ms * MS
    return Step(
        kind=kind,
        number=number,
        forward_begin=1 * MS,
        forward_end=3 * MS,
        forward_ns=2 * MS,
        backward_begin=3 * MS,
        backward_end=8 * MS,
        finished=10 * MS,
        optimizer_begin=10 * MS,
        optimizer_end=11 * MS,
        optimizer_ns=1 * MS,
        ready=(4 * MS, 4 * MS + late, 7 * MS),
        buckets=(
            BucketTimes(4 * MS + late, 4 * MS + late, 0, 6 * MS, 7 * MS, 8 * MS, 8 * MS),
            BucketTimes(8 * MS, 8 * MS, 0, 9 * MS, 10 * MS, 8 * MS, 10 * MS),
        ),
    )


def _joined(*steps: Step) -> Joined:
    return Joined("reducer 0 over shm, 2 ranks", PLAN, tuple((step,) for step in steps))


def test_durations_of_a_step():
    step = _step()
    assert (step.backward_ns, step.exposed_ns) == (5 * MS, 2 * MS)
    assert step.communication_ns == 2 * MS and step.overlap == 0.5


def test_intervals_that_overlap_count_once():
    assert length([(5, 9), (0, 2), (1, 3), (6, 7)]) == 7


def test_the_table_has_a_row_for_each_rank():
    text = showing.table(_joined(_step(), _step(late_ms=1)))
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    figures = ["2.000", "5.000", "2.000", "2.000", "1.000", "50 %"]
    assert [row[:-1] for row in cells] == [["0", *figures], ["1", *figures]]


def test_steps_that_are_no_rounds_are_counted_and_left_out():
    steps = (_step(), _step(kind="accumulated", number=0))
    joined = Joined("reducer 0", PLAN, (steps, (*steps, _step(kind="accumulated", number=0))))
    assert len(joined.rounds()) == 1
    assert "2 accumulated, left out" in showing.table(joined)


def test_only_rounds_that_all_ranks_have_recorded_are_compared():
    joined = Joined("", PLAN, ((_step(), _step(number=2)), (_step(number=2), _step(number=3))))
    assert [[step.number for step in steps] for steps in joined.rounds()] == [[2, 2]]


def _slices(events):
    """Of each slice its beginning, and when it ends. Those of one thread must be nested."""
    stacks: dict[tuple[int, int], list] = {}
    for event in events:
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            assert not stack or stack[-1]["ts"] <= event["ts"]
            stack.append(event)
        elif event["ph"] == "E":
            yield stack.pop(), event["ts"]
    assert not any(stacks.values())


def test_the_trace_tells_what_each_bucket_holds_and_whom_it_waits_for():
    events = showing.trace(_joined(_step(), _step(late_ms=1)))["traceEvents"]
    json.dumps(events)
    slices = {(one["pid"], one["name"]): (one, end) for one, end in _slices(events)}
    bucket, end = slices[0, "bucket 0: last.weight ... last.bias"]
    assert (bucket["ts"], end) == (3000, 6000)
    assert bucket["args"] == {
        "round": 1,
        "bytes": 64,
        "parameters": ["last.weight", "last.bias"],
        "waiting for": "rank 1",
    }
    waiting, end = slices[0, "waits for rank 1"]
    assert (waiting["ts"], end) == (3000, 4000)
    assert slices[0, "exposed"][0]["ts"] == slices[0, "backward"][1] == 7000
    assert "waiting for" not in slices[1, "bucket 0: last.weight ... last.bias"][0]["args"]


def test_slices_of_one_thread_of_the_trace_do_not_overlap():
    step = _step()
    buckets = (step.buckets[0], replace(step.buckets[1], launch=5 * MS))
    overlapping = Joined("", PLAN, ((replace(step, buckets=buckets),),))
    events = showing.trace(overlapping)["traceEvents"]
    threads = {one["tid"] for one, _ in _slices(events) if one["name"].startswith("bucket")}
    assert len(threads) == 2


def test_an_arrow_leads_from_the_gradient_that_filled_a_bucket_to_the_bucket():
    events = showing.trace(_joined(_step()))["traceEvents"]
    arrows = [(e["ph"], e["ts"]) for e in events if e["ph"] in "sf" and e["id"] == "0/1/0"]
    assert arrows == [("s", 3000), ("f", 3000)]


@pytest.mark.parametrize("show", ["rich", "matplotlib"])
def test_what_is_missing_is_said_in_one_sentence(show, monkeypatch):
    monkeypatch.setitem(sys.modules, show, None)
    joined = _joined(_step(), _step())
    with pytest.raises(ImportError, match=f"needs {show}: pip install {show}$"):
        showing.table(joined) if show == "rich" else showing.plot(joined, (_step(),), "nowhere.png")


def test_the_difference_of_two_clocks_is_bounded_by_meetings():
    first = [(0, 100), (1000, 1010), (2000, 2300)]
    ahead = 5_000_000
    second = [(50 + ahead, 120 + ahead), (1004 + ahead, 1012 + ahead), (1900 + ahead, 2100 + ahead)]
    assert abs(offset_between(first, second) + ahead) <= 10


def test_a_step_on_another_clock_keeps_its_durations_and_what_is_unknown():
    shifted = _step(late_ms=1).shifted(7)
    assert shifted.forward_begin == MS + 7 and shifted.forward_ns == 2 * MS
    assert shifted.ready[1] == 5 * MS + 7
    assert (shifted.buckets[0].launch, shifted.buckets[0].gathered) == (5 * MS + 7, 0)
    assert (shifted.number, shifted.exposed_ns) == (1, 2 * MS)


def test_the_rank_that_is_last_most_often_is_named_with_what_it_costs():
    late = replace(_step(), buckets=(_step().buckets[0], BucketTimes(9 * MS, *[9 * MS] * 6)))
    text = showing.table(_joined(_step(), late))
    assert text.endswith(
        "Slowest: rank 1, last in 1 of 1 rounds. The others then waited 1.000 ms for it (median)."
    )
