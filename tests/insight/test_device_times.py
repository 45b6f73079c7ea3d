"""Times of buckets on a device, over the stand-ins: read late, and never waited for."""

from __future__ import annotations

import math
import sys
import time

import pytest
import torch

import fastcomm
from fastcomm.insight import stragglers
from fastcomm.insight.recorder import MOST_MARKS, Phases
from tests.fakes.stand_ins import failing, loaded
from tests.transports.nccl import communicator, stand_in_values
from tests.transports.nccl.test_launches import BEGIN_GLOBAL, END, LEGACY_STREAM


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


class _Steps:
    """Of a model whose rank 1 is late each time, before its forward."""

    def __init__(self, place):
        self.rank, self.model = place.rank, torch.nn.Linear(4, 4)
        self.reducer = fastcomm.Reducer(communicator(place)).attach(self.model)
        self.reducer.comm.cuda.raw_stream = lambda index: LEGACY_STREAM

    def make(self, n):
        for _ in range(n):
            time.sleep(0.005 * self.rank)
            self.model(torch.ones(1, 4)).sum().backward()

    def capture(self):
        loaded("cuda").stand_in_capture(BEGIN_GLOBAL)
        self.make(1)
        assert loaded("cuda").stand_in_capture(END) == 0

    def end(self):
        loaded("cuda").stand_in_destroy_graphs()
        self.reducer.comm.close()


def _capture_a_round(place, n_before):
    steps = _Steps(place)
    steps.make(n_before)
    steps.capture()  # in the last case it is due
    steps.make(1)
    ended = steps.reducer.core.stragglers
    steps.end()
    return ended.newest, ended.due_at, ended.phases.is_measured


@pytest.mark.parametrize("n_more", [0, 1])
def test_nothing_is_told_once_a_graph_was_captured(n_more):
    """Not in the capture, which may not wait, nor later, when ranks count rounds of their own."""
    n_before = 2 * stragglers.FIRST_ROUNDS - 2 + n_more
    assert stand_in_values(2, _capture_a_round, n_before) == 2 * [([], sys.maxsize, False)]


def _measure_with_events_held(place):
    steps = _Steps(place)
    steps.make(2 * stragglers.FIRST_ROUNDS - 1)
    phases = steps.reducer.core.stragglers.phases
    loaded("cuda").stand_in_hold_events(1)
    phases.enter(stragglers.OPTIMIZER)
    spent = phases.take_measured()
    loaded("cuda").stand_in_hold_events(0)
    steps.end()
    return spent


def test_a_mark_that_is_not_reached_yet_makes_no_time():
    for spent in stand_in_values(2, _measure_with_events_held):
        assert any(map(math.isnan, spent)), spent


def test_marks_have_an_end():
    """A join() may be long, in which nobody asks for them."""

    class Mark:
        def ns_since(self, earlier):
            return 1

    phases = Phases()
    phases.measure(Mark)
    for _ in range(MOST_MARKS):
        phases.enter(stragglers.OPTIMIZER)
    assert all(map(math.isnan, phases.take_measured()))
    phases.measure(Mark)
    phases.enter(stragglers.OPTIMIZER)
    phases.enter(stragglers.OTHER)
    assert phases.take_measured() == [0, 0, 0, 0, 2]
