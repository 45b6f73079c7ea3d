"""A few faults of each kind over each transport; `make faults` runs as many as one likes."""

from __future__ import annotations

import pytest

from tests.faults.faults import KINDS, Fault, Verdict, judged, strike
from tests.support.outcomes import Outcome
from tests.support.transports import EVERY_TRANSPORT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", EVERY_TRANSPORT)
def test_the_others_hear_of_a_rank_that_is_lost_and_wait_for_one_that_stops(backend, kind):
    verdict = strike(Fault.drawn(1, backend, kind))
    assert verdict.trouble is None, f"{verdict.fault}\n{verdict.trouble}"


@pytest.mark.parametrize("backend", EVERY_TRANSPORT)
def test_the_others_go_on_without_a_rank_that_dies_at_any_moment(backend):
    verdict = strike(Fault.drawn(1, backend, "killed", goes_on=True))
    assert verdict.trouble is None, f"{verdict.fault}\n{verdict.trouble}"


def _seen(**others):
    seen = {"error": "PeerLostError", "message": "rank 1 (pid 7) died", "latency_s": 0.1}
    return {"steps": 3, "n_leaked": 0} | seen | others


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (_seen(), None),
        (_seen(error="TimeoutError"), "raised TimeoutError"),
        (_seen(message="rank 2 (pid 7) died"), "does not name rank 1"),
        (_seen(n_leaked=2), "2 descriptors were left open"),
    ],
)
def test_what_survivors_must_not_see_is_trouble(seen, words):
    fault = Fault("shm", 2, "killed", 1, 0.0, 0.0)
    verdict = judged(fault, [Outcome(0, "returned", seen), Outcome(1, "died", exitcode=-9)])
    assert (verdict.trouble is None) is (words is None)
    assert words is None or (verdict.trouble is not None and words in verdict.trouble)


def test_a_rank_that_hangs_is_trouble():
    fault = Fault("shm", 2, "stops", 1, 0.0, 0.1)
    verdict: Verdict = judged(fault, [Outcome(0, "hung", stacks="here"), Outcome(1, "hung")])
    assert verdict.trouble == "rank 0: rank 0 hung\nhere"
