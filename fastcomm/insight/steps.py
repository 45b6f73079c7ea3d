"""Step: one step of a reducer on one rank, as a Recorder has seen it, and the durations in it.

All times are in ns of time.monotonic_ns(); 0 means unknown. Owns no state, reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from fastcomm.comm.objects import tellable
from fastcomm.insight.recorder import Recorder

Interval = tuple[int, int]


@dataclass(frozen=True)
class BucketPlan:
    """What a bucket holds: the names of its parameters, by slot, and how many bytes its flat buffer
    has. Fewer travel on a narrower wire.
    """

    names: tuple[str, ...]
    nbytes: int


@tellable
@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step. launch, launched: when the caller began and ended to gather and post
    it. gathered: when the device had; known over NCCL only. start: when all ranks were there. end:
    when this rank's part in the reduction was through. wait, waited: when the caller began and
    ended to wait for it.
    """

    launch: int
    launched: int
    gathered: int
    start: int
    end: int
    wait: int
    waited: int

    @property
    def interval(self) -> Interval:
        """When it was being reduced on this rank, as far as is known."""
        return self.start or self.launched, self.end or self.waited


@tellable
@dataclass(frozen=True)
class Step:
    """One backward, the forwards before it and the optimizer's step after it.

    kind: "reduced"; "accumulated", under no_sync(); "by hand", by reduce(); or "abandoned".
    number: of the round, among the reducer's; equal on all ranks. 0 for an accumulated step.
    forward_begin, forward_end: of the first and of the last forward; forward_ns: their sum. 0 where
        no forward is seen.
    backward_begin: when the backward came to the model's output or, where no forward is seen, its
        first gradient. backward_end: when the last gradient was there and the caller began to wait.
    finished: when all gradients were reduced.
    optimizer_begin, optimizer_end, optimizer_ns: as of the forward. 0 if no optimizer has stepped.
    ready: when each gradient was ready, in the order of the buckets and their slots.
    """

    kind: str
    number: int
    forward_begin: int
    forward_end: int
    forward_ns: int
    backward_begin: int
    backward_end: int
    finished: int
    optimizer_begin: int
    optimizer_end: int
    optimizer_ns: int
    ready: tuple[int, ...]
    buckets: tuple[BucketTimes, ...]

    @property
    def has_round(self) -> bool:
        """Whether the ranks have reduced something in it."""
        return self.kind in ("reduced", "by hand")

    @property
    def spans(self) -> dict[str, Interval]:
        """When this rank was in which phase; (0, 0) where it was never."""
        backward = self.backward_begin, self.backward_end or self.finished
        return {
            "forward": (self.forward_begin, self.forward_end),
            "backward": (0, 0) if self.kind == "by hand" else backward,
            "exposed": (self.backward_end, self.finished) if self.has_round else (0, 0),
            "optimizer": (self.optimizer_begin, self.optimizer_end),
        }

    @property
    def backward_ns(self) -> int:
        return 0 if self.kind == "by hand" else self.backward_end - self.backward_begin

    @property
    def communication_ns(self) -> int:
        """How long at least one bucket was being reduced."""
        return length(self._intervals())

    @property
    def exposed_ns(self) -> int:
        """How long the rank waited for communication after its last gradient was there."""
        if not self.has_round:
            return 0
        last = self.buckets[-1]
        if last.gathered:  # the host does not wait, the device does
            return max(0, max(bucket.end for bucket in self.buckets) - last.gathered)
        return self.finished - self.backward_end

    @property
    def overlap(self) -> float:
        """The share of the communication that ran before the last gradient was there."""
        whole = self.communication_ns
        end = self.buckets[-1].gathered or self.backward_end if self.buckets else 0
        before = [(a, min(b, end)) for a, b in self._intervals() if a < end]
        return length(before) / whole if whole else 0.0

    def shifted(self, offset: int) -> Step:
        """The same step on a clock that is so many ns ahead. What is unknown stays so."""

        def moved(times: Any) -> Any:
            if isinstance(times, tuple):
                return tuple(map(moved, times))
            return times + offset if times else 0

        values = {
            field.name: moved(getattr(self, field.name))
            for field in fields(self)
            if field.name.endswith(("_begin", "_end", "finished", "ready"))
        }
        buckets = tuple(BucketTimes(*moved(astuple(one))) for one in self.buckets)
        return replace(self, buckets=buckets, **values)

    def _intervals(self) -> list[Interval]:
        return [bucket.interval for bucket in self.buckets] if self.has_round else []


def length(intervals: Sequence[Interval]) -> int:
    total, reached = 0, 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def read_steps(recorder: Recorder) -> list[Step]:
    """What the recorder holds, the oldest step first."""
    return [
        Step(kind, *fields, tuple(ready), tuple(BucketTimes(*times) for times in buckets))
        for kind, fields, ready, buckets in recorder.read()
    ]
