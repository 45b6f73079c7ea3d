"""What features share that plan a reducer's buckets anew between two rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from fastcomm.comm.abandonment import note_abandoned
from fastcomm.errors import FastcommError
from fastcomm.insight.recorder import Recorder
from fastcomm.insight.steps import Step, read_steps
from fastcomm.reducer.features.defer_signals import defer_signals

if TYPE_CHECKING:
    from fastcomm.reducer.reducer import Reducer


class Trace:
    """Of a reducer's last rounds, as long as a feature wants it. Where somebody else records them
    already, that is read.
    """

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def begin(self, reducer: Reducer, n_rounds: int) -> None:
        """Of so many rounds, with the buckets there are."""
        if reducer.recorder is None:
            sizes = [len(bucket.indices) for bucket in reducer.buckets]
            reducer.recorder = self._recorder = Recorder(n_rounds, sum(sizes), len(sizes))

    def steps(self, reducer: Reducer) -> list[Step]:
        """Those in which gradients were reduced, oldest first."""
        if reducer.recorder is None:
            return []
        return [step for step in read_steps(reducer.recorder) if step.kind == "reduced"]

    def end(self, reducer: Reducer) -> None:
        if self._recorder is not None and reducer.recorder is self._recorder:
            reducer.recorder = None
        self._recorder = None


@contextlib.contextmanager
def all_or_none(reducer: Reducer, stop: Callable[[Reducer], None]) -> Iterator[None]:
    """Around what all ranks do together, or none. stop: called where it cannot be done."""
    with defer_signals():
        try:
            yield
        except BaseException as error:
            # The others are not to wait for this one.
            stop(reducer)
            with contextlib.suppress(FastcommError):
                reducer.comm.abandon()
            note_abandoned(reducer.comm, error)
            raise


def hook_up_anew(reducer: Reducer) -> None:
    """Make the buckets once more, as options and order are now. Collective."""
    model = reducer.attached_model()
    reducer.detach()
    try:
        with torch.inference_mode(False):
            reducer.hook_up(model)
    except BaseException:
        reducer.stand_still(model)
        raise
