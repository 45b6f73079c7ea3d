"""Timeline: what the time of a reducer's steps goes into. Turns the recording on and off, and puts
the ranks' recordings together.

recorder.pyx takes the times, steps.py says what they mean, showing.py shows them.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.communicator import ProcessBound
from fastcomm.comm.objects import gather_objects
from fastcomm.errors import FastcommError
from fastcomm.insight import showing
from fastcomm.insight.forward import watch_forward
from fastcomm.insight.joined import Joined, join
from fastcomm.insight.recorder import Recorder
from fastcomm.insight.steps import BucketPlan, Step, read_steps


class Timeline(ProcessBound):
    """The times of a reducer's newest steps. Reducer.timeline() makes it. As a context manager it
    records within its block.

    steps: how many of the newest steps it keeps.
    """

    def __init__(self, reducer: Any, steps: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._comm = reducer.comm
        self._n_steps = steps
        self._plan: tuple[BucketPlan, ...] = ()
        self._model: weakref.ref[nn.Module] | None = None
        self._recorder = Recorder(steps, 0, 0)
        self._handles: list[RemovableHandle] = []
        self.is_on = False

    def must_keep(self, steps: int | None) -> None:
        """For reducers: raises ValueError if it keeps another number of steps."""
        if steps not in (None, self._n_steps):
            raise ValueError(
                f"this timeline keeps {self._n_steps} steps, as was asked at first; got {steps}"
            )

    def start(self) -> Timeline:
        """Records from the next round on. Returns self."""
        if not self.is_on:
            self.is_on = True
            self._comm.keep_times(True)
            self._record()
        return self

    def stop(self) -> None:
        """Stops recording, which then costs nothing. What was recorded stays."""
        if self.is_on:
            self.is_on = False
            self._comm.keep_times(False)
            self._record()

    def __enter__(self) -> Timeline:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def follow(self, buckets: Sequence[Any], model: object) -> None:
        """For reducers: these are the buckets from now on. What was recorded is of others, and
        dropped. model: the module, whose forward is seen; or anything else, whose is not.
        """
        self._plan = tuple(BucketPlan(tuple(one.names), one.flat.nbytes) for one in buckets)
        n_gradients = sum(len(one.names) for one in self._plan)
        self._recorder = Recorder(self._n_steps, n_gradients, len(self._plan))
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._record()

    def release(self) -> None:
        """For reducers: the model is not attached any more. What was recorded stays."""
        self._model = None
        self._record()

    def _record(self) -> None:
        """Hangs the recorder in, or takes it out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        reducer = self._reducer()
        if reducer is not None:
            reducer.recorder = self._recorder if self.is_on and self._plan else None
        model = None if self._model is None else self._model()
        if self.is_on and model is not None:
            self._handles = watch_forward(model, self._recorder)

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """What each bucket holds. Step.buckets has the same order."""
        return self._plan

    def steps(self) -> list[Step]:
        """This rank's steps that are kept, the oldest first."""
        return read_steps(self._recorder)

    # -- all ranks' --------------------------------------------------------------------------------

    def summary(self) -> str:
        """Returns a table as text, the same on every rank: for each rank the medians of forward,
        backward, communication, exposed time (waiting for it), optimizer and overlap, and how often
        the rank was last. Collective: every rank calls it, outside backward. Needs rich.
        """
        return showing.table(self._join("Timeline.summary()"))

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes all ranks' steps as JSON, which ui.perfetto.dev and chrome://tracing open. Every
        rank calls it; rank 0 writes. If rank 0 cannot write, it raises the cause, and the other
        ranks raise FastcommError.
        """
        call = "Timeline.save_trace()"
        joined = self._join(call)
        self._on_rank_0(
            lambda: Path(path).write_text(json.dumps(showing.trace(joined))), path, call
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the newest round that all ranks have recorded; path: .png, .svg or another format
        of matplotlib. Every rank calls it; rank 0 writes, and raises as save_trace(). Raises
        ValueError, on every rank, if there is no such round. Needs matplotlib.
        """
        call = "Timeline.plot()"
        joined = self._join(call)
        rounds = joined.rounds()
        if not rounds:
            raise ValueError("there is nothing to plot: no step yet that all ranks have recorded")
        self._on_rank_0(lambda: showing.plot(joined, rounds[-1], path), path, call)

    def _on_rank_0(
        self, write: Callable[[], object], path: str | os.PathLike[str], call: str
    ) -> None:
        """Lets the other ranks know whether it has come to an end. Collective."""
        problem: Exception | None = None
        if self._comm.rank == 0:
            try:
                write()
            except Exception as error:
                problem = error
        trouble = problem and f"{type(problem).__name__}: {problem}"
        told = gather_objects(self._comm, trouble, call)[0]
        if problem is not None:
            raise problem
        if told is not None:
            raise FastcommError(f"rank 0 could not write {os.fspath(path)}: {told}")

    def _join(self, call: str) -> Joined:
        """Collective."""
        return join(self._comm, self._describe(), self._plan, self.steps(), call)

    def _describe(self) -> str:
        reducer = self._reducer()
        number = "" if reducer is None else f" {reducer.number}"
        return f"reducer{number} over {self._comm.backend}, {self._comm.world_size} ranks"

    # -- this rank's -------------------------------------------------------------------------------

    def write_scalars(self, writer: Any, step: int) -> None:
        """Writes what this rank's newest step took, in ms, and its overlap in percent, by
        writer.add_scalar (a SummaryWriter of TensorBoard, or what looks like one). Not collective.
        step: the number to write them under.
        """
        newest = next((one for one in reversed(self.steps()) if one.has_round), None)
        for name, value in () if newest is None else showing.values(newest):
            writer.add_scalar(f"fastcomm/{name}", value, step)

    def __repr__(self) -> str:
        recorder = self._recorder
        state = "on" if self.is_on else "off"
        kept, n_buckets = min(recorder.n_begun, recorder.n_steps), len(self._plan)
        return (
            f"<Timeline of {self._describe()}: {state}, {kept} of the newest {recorder.n_steps} "
            f"steps, {n_buckets} bucket{'' if n_buckets == 1 else 's'}; "
            f"{recorder.nbytes / 1e3:,.1f} kB>"
        )
