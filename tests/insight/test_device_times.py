"""Times of buckets on a device, over the stand-ins: read late, and never waited for."""

from __future__ import annotations

import torch

import fastcomm
from tests.fakes.stand_ins import failing, loaded
from tests.transports.nccl import communicator, stand_in_values


def _reduce_with_events_held(place):
    """The newest step's first bucket, while the device is not known to be through, and after."""
    model = torch.nn.Linear(4, 4)
    reducer = fastcomm.Reducer(communicator(place)).attach(model)
    timeline = reducer.timeline()
    loaded("cuda").stand_in_hold_events(1)
    model(torch.ones(1, 4)).sum().backward()
    before = timeline.steps()[-1].buckets[0]
    loaded("cuda").stand_in_hold_events(0)
    after = timeline.steps()[-1]
    return before, after.buckets[0], after.exposed_ns


def test_times_that_are_not_known_yet_are_read_later():
    ((before, after, exposed_ns),) = stand_in_values(1, _reduce_with_events_held)
    assert (before.gathered, before.start, before.end) == (0, 0, 0)
    assert before.launch < after.gathered <= after.start <= after.end <= after.waited
    assert exposed_ns == after.end - after.gathered


def _reduce_without_a_timeline(place):
    model = torch.nn.Linear(4, 4)
    reducer = fastcomm.Reducer(communicator(place)).attach(model)
    reducer.timeline().stop()
    with failing("cuEventElapsedTime", 719), failing("cuEventCreate", 719):
        model(torch.ones(1, 4)).sum().backward()
    return len(reducer.timeline().steps())


def test_nothing_is_timed_where_a_timeline_is_off():
    assert stand_in_values(1, _reduce_without_a_timeline) == [0]
