"""A timeline as JSON in the Trace Event Format of Chrome, which Perfetto and chrome://tracing open:
a process for each rank, in it a thread for what the rank computes, and as many for buckets as
travel at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastcomm.insight.joined import Joined, last_to_launch
from fastcomm.insight.steps import BucketPlan, BucketTimes, Step

Event = dict[str, Any]

_COMPUTE, _COMMUNICATION = 0, 1  # threads; those above are for more buckets


def trace(joined: Joined) -> Event:
    """What to write as JSON. Times in it are in µs, from the first of all."""
    begins = (one.forward_begin or one.backward_begin for steps in joined.ranks for one in steps)
    writer = _Writer(joined, min(filter(None, begins), default=0))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"fastcomm": joined.what},
        "traceEvents": list(writer.events()),
    }


def bucket_name(i: int, plan: BucketPlan) -> str:
    first, last = plan.names[0], plan.names[-1]
    return f"bucket {i}: {first}" + (f" ... {last}" if len(plan.names) > 1 else "")


class _Writer:
    def __init__(self, joined: Joined, origin: int) -> None:
        self._joined = joined
        self._origin = origin
        self._rounds = {steps[0].number: steps for steps in joined.rounds()}

    def events(self) -> Iterator[Event]:
        for rank, steps in enumerate(self._joined.ranks):
            yield _named("process_name", rank, 0, f"rank {rank}")
            yield _named("thread_name", rank, _COMPUTE, "compute")
            busy_until: list[int] = []  # by thread of communication
            for step in steps:
                yield from self._computing(rank, step)
                if step.has_round:
                    for i, bucket in enumerate(step.buckets):
                        thread = _free_thread(busy_until, bucket)
                        yield from self._travelling(rank, thread, step, i)
            for i in range(len(busy_until)):
                name = f"communication {i + 1}" if i else "communication"
                yield _named("thread_name", rank, _COMMUNICATION + i, name)

    def _computing(self, rank: int, step: Step) -> Iterator[Event]:
        arguments = {"round": step.number, "kind": step.kind}
        suffix = "" if step.kind == "reduced" else f" ({step.kind})"
        for phase, span in step.spans.items():
            name = f"{phase}{suffix}" if phase in ("backward", "exposed") else phase
            yield from self._slice(rank, _COMPUTE, name, span, arguments)

    def _travelling(self, rank: int, thread: int, step: Step, i: int) -> Iterator[Event]:
        """One bucket: its way as a slice, and in it what it waits for."""
        bucket, plan = step.buckets[i], self._joined.plan[i]
        begin, end = bucket.launch, _end(bucket)
        arguments = {"round": step.number, "bytes": plan.nbytes, "parameters": list(plan.names)}
        steps = self._rounds.get(step.number)
        last = rank if steps is None else last_to_launch(steps, i)
        if last != rank:
            arguments["waiting for"] = f"rank {last}"
        name = bucket_name(i, plan)
        yield self._event("B", rank, thread, begin, name=name, args=arguments)
        came = end if steps is None else max(one.buckets[i].launch for one in steps)
        posted, start = min(bucket.launched, end), min(bucket.start or end, end)
        waited = min(max(came, posted), start)
        if last != rank:
            yield from self._slice(rank, thread, f"waits for rank {last}", (posted, waited), {})
        if bucket.start:
            yield from self._slice(rank, thread, "queued", (waited, start), {})
            yield from self._slice(rank, thread, "reduces", (max(start, posted), end), {})
        yield self._event("E", rank, thread, end, name=name)
        yield from self._arrow(rank, thread, step, i)

    def _arrow(self, rank: int, thread: int, step: Step, i: int) -> Iterator[Event]:
        """From the gradient that has filled a bucket to the bucket."""
        first = sum(len(plan.names) for plan in self._joined.plan[:i])
        ready = max(step.ready[first : first + len(self._joined.plan[i].names)])
        if ready:
            shared = {"cat": "ready", "name": "full", "pid": rank}
            shared["id"] = f"{rank}/{step.number}/{i}"
            at, launched = self._time(ready), self._time(step.buckets[i].launch)
            yield {"ph": "s", "tid": _COMPUTE, "ts": at, **shared}
            yield {"ph": "f", "bp": "e", "tid": thread, "ts": launched, **shared}

    def _slice(
        self, rank: int, thread: int, name: str, span: tuple[int, int], arguments: Event
    ) -> Iterator[Event]:
        begin, end = span
        if begin and end > begin:
            yield self._event("B", rank, thread, begin, name=name, args=arguments)
            yield self._event("E", rank, thread, end, name=name)

    def _event(self, phase: str, rank: int, thread: int, at: int, **more: Any) -> Event:
        """Slices are two events: a duration would be rounded, and the next slice begin inside."""
        return {"ph": phase, "pid": rank, "tid": thread, "ts": self._time(at), **more}

    def _time(self, time: int) -> float:
        return (time - self._origin) / 1e3


def _end(bucket: BucketTimes) -> int:
    """When the bucket's slice ends: never before it begins, whatever clocks say."""
    return max(bucket.interval[1], bucket.launch)


def _free_thread(busy_until: list[int], bucket: BucketTimes) -> int:
    """Slices of a thread must not overlap."""
    for i, end in enumerate(busy_until):
        if end <= bucket.launch:
            busy_until[i] = _end(bucket)
            return _COMMUNICATION + i
    busy_until.append(_end(bucket))
    return _COMMUNICATION + len(busy_until) - 1


def _named(what: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
