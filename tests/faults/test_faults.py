"""A few faults of each kind over each transport; `make faults` runs as many as one likes."""

from __future__ import annotations

import pytest

from tests.faults.faults import KINDS, Fault, strike
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
