"""RoundObserver: follows one round of a reducer, for a recorder, a profiler, or both. Where there
is neither, there is no observer. Raises nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

from fastcomm.comm.transport import BucketWork
from fastcomm.insight.recorder import Recorder
from fastcomm.reducer.round import Round, State

_IS_UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ  # which Nsight Systems sets

# Whether it or torch's profiler watches this process. Asked in every round: costs no Python frame.
is_profiled: Callable[[], bool] = (
    functools.partial(bool, True) if _IS_UNDER_NSIGHT else _profiler_enabled
)


class RoundObserver:
    """Tells the recorder, and the profiler that is on, when something begins or ends in a round.

    reducer: its number, for the profiler.
    """

    def __init__(self, recorder: Recorder | None, reducer: int, round: Round) -> None:
        self._recorder, self._reducer = recorder, reducer
        self._is_profiled = is_profiled()
        self._range: Any = None  # the context manager that is open in the profiler
        if recorder is not None:
            recorder.begin_round(round.number)

    def end_of_backward(self, round: Round) -> None:
        """What comes from now on is exposed."""
        if self._recorder is not None:
            if round.is_by_hand:
                self._recorder.reduce_by_hand()
            self._recorder.end_backward()

    def before_launch(self, round: Round, number: int) -> None:
        if self._recorder is not None:
            self._recorder.begin_launch(number)
        self._open_range("all_reduce", round, number)

    def after_launch(self, round: Round, number: int) -> None:
        self._close_range()
        if self._recorder is not None:
            self._recorder.end_launch(number)

    def before_wait(self, round: Round, number: int) -> None:
        if self._recorder is not None:
            self._recorder.begin_wait(number)
        self._open_range("wait for", round, number)

    def after_wait(self, round: Round, number: int, work: BucketWork) -> None:
        self._close_range()
        if self._recorder is not None:
            self._recorder.end_wait(number, work)

    def after_round(self, round: Round) -> None:
        """A round that was dropped may have ended inside a launch or a wait."""
        self._close_range()
        if self._recorder is None:
            return
        if round.state is State.ABANDONED:
            self._recorder.drop_round()
        else:
            self._recorder.end_round()

    def _open_range(self, what: str, round: Round, number: int) -> None:
        if not self._is_profiled:
            return
        self._close_range()  # a signal handler has ended the wait, which begins again
        name = f"fastcomm::{what} bucket {number} of reducer {self._reducer}, {round.op}"
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
