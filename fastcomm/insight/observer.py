"""RoundObserver: follows one round of a reducer, for a recorder, a profiler, or both. Where there
is neither, there is no observer.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

from fastcomm.comm.communicator import BucketWork
from fastcomm.insight.recorder import Recorder

# Nsight Systems sets it in the processes it starts.
_IS_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ


def observer_of(recorder: Recorder | None, reducer: int, op: str) -> RoundObserver | None:
    """The observer of the round that begins, or None. reducer: its number. Asks once per round
    whether a profiler is on, as launches must cost nothing where none is.
    """
    is_profiled = _profiler_enabled() or _IS_UNDER_NSIGHT
    if recorder is None and not is_profiled:
        return None
    return RoundObserver(recorder, reducer, op, is_profiled)


class RoundObserver:
    """Called when something begins or ends in a round. Raises nothing."""

    def __init__(self, recorder: Recorder | None, reducer: int, op: str, is_profiled: bool) -> None:
        self._recorder = recorder
        self._reducer = reducer
        self._op = op
        self._is_profiled = is_profiled
        self._range: Any = None  # the context manager that is open in the profiler

    def begin(self, number: int) -> None:
        if self._recorder is not None:
            self._recorder.begin_round(number)

    def reduce_by_hand(self) -> None:
        if self._recorder is not None:
            self._recorder.reduce_by_hand()

    def end_backward(self) -> None:
        """The last gradient is there: what comes now is exposed."""
        if self._recorder is not None:
            self._recorder.end_backward()

    def begin_launch(self, bucket: int) -> None:
        if self._recorder is not None:
            self._recorder.begin_launch(bucket)
        if self._is_profiled:
            self._open_range(f"fastcomm::all_reduce {self._name(bucket)}")

    def end_launch(self, bucket: int) -> None:
        self._close_range()
        if self._recorder is not None:
            self._recorder.end_launch(bucket)

    def begin_wait(self, bucket: int) -> None:
        if self._recorder is not None:
            self._recorder.begin_wait(bucket)
        if self._is_profiled:
            self._open_range(f"fastcomm::wait for {self._name(bucket)}")

    def end_wait(self, bucket: int, work: BucketWork) -> None:
        self._close_range()
        if self._recorder is not None:
            self._recorder.end_wait(bucket, work)

    def end(self) -> None:
        """All gradients are reduced."""
        if self._recorder is not None:
            self._recorder.end_round()

    def drop(self) -> None:
        """The round was abandoned, perhaps inside a launch or a wait."""
        self._close_range()
        if self._recorder is not None:
            self._recorder.drop_round()

    def _name(self, bucket: int) -> str:
        return f"bucket {bucket} of reducer {self._reducer}, {self._op}"

    def _open_range(self, name: str) -> None:
        self._close_range()  # a signal handler has ended the wait, which begins again
        # Under emit_nvtx() record_function makes ranges of NVTX; Nsight alone sees only these.
        if _profiler_enabled():
            self._range = torch.profiler.record_function(name)
        elif torch.cuda.is_available():
            self._range = torch.cuda.nvtx.range(name)
        else:
            return
        self._range.__enter__()

    def _close_range(self) -> None:
        if self._range is not None:
            one, self._range = self._range, None
            one.__exit__(None, None, None)
