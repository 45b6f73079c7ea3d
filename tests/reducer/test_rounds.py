"""The states of a round: each way from one to the next, and a signal at each statement on the
way.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import AbandonedError
from fastcomm.comm.objects import gather_objects
from fastcomm.reducer import round as round_module
from tests.support.models import SMALL_BUCKETS, assert_gradients, attached, backward, mean_gradients
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("transport")


# Where no callback of autograd is there yet, by which the reducer would hear of an exception.
_BEFORE_THE_CALLBACK = ("__init__", "await_end_of_backward")


class _Signal(Exception):
    """What the handler raises."""


class _SignalAt:
    """Raises at the n-th statement of a round that this thread comes to."""

    def __init__(self, n: int) -> None:
        self._n_left = n
        self.has_come = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        is_ours = code.co_filename == round_module.__file__
        if not is_ours or code.co_name in _BEFORE_THE_CALLBACK:
            return None
        if event == "line" and not self.has_come:
            self._n_left -= 1
            if self._n_left < 0:
                self.has_come = True
                raise _Signal
        return self


def _step(model, comm, signal: _SignalAt) -> bool:
    """Whether the backward has left this rank's gradients reduced."""
    model.zero_grad()
    try:
        if comm.rank == 1:
            sys.settrace(signal)
        backward(model, comm.rank)
    except (_Signal, AbandonedError):
        pass
    finally:
        sys.settrace(None)
    return model[0].weight.grad is not None


@pytest.mark.transports("shm", "group")
@on_ranks(2)
def test_a_signal_between_any_two_statements_leaves_the_ranks_in_step(comm):
    model, reducer, _ = attached(comm, **SMALL_BUCKETS)
    expected = mean_gradients(model, comm.world_size, backward)
    n, goes_on, outcomes = 0, True, set()
    while goes_on:
        signal = _SignalAt(n)
        is_reduced = _step(model, comm, signal)
        assert reducer.core.round is None
        told = gather_objects(comm, (is_reduced, signal.has_come), "the test")
        assert told[0][0] == told[1][0], f"at statement {n} the ranks have parted: {told}"
        if is_reduced:
            assert_gradients(model, expected)
        outcomes.add(is_reduced)
        goes_on, n = told[1][1], n + 1
    assert outcomes == {False, True} and n > 50


# What a plain step runs through


@pytest.mark.transports("shm")
@on_ranks(2)
def test_a_plain_step_runs_through_few_files_and_no_feature(comm):
    """Functions in Python, without comprehensions; what is compiled has no frame. How often a rank
    looks at the clock depends on how late the other one is.
    """
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    reducer = fastcomm.Reducer(comm, bucket_cap_mb=0.02).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    root = Path(fastcomm.__file__).parent
    calls = collections.Counter()

    def count(frame, event, _):
        path = Path(frame.f_code.co_filename)
        is_counted = root in path.parents and path.name != "deadline.py"
        if event == "call" and is_counted and frame.f_code.co_name[0] != "<":
            calls[str(path.relative_to(root))] += 1

    for step in range(3):
        sys.setprofile(count if step == 2 else None)
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        sys.setprofile(None)
    assert len(reducer.core.buckets) == 4
    assert len(calls) <= 8 and calls.total() <= 115, calls
    assert not [path for path in calls if "features" in path]
