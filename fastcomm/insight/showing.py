"""What is shown of the ranks' timelines: a table, a trace and a picture."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from fastcomm.insight.joined import Joined, last_to_launch, waited_ns
from fastcomm.insight.steps import BucketTimes, Step

Event = dict[str, Any]

_COMPUTE, _COMMUNICATION = 0, 1  # threads of a trace; those above: more buckets
_WIDTH = 110  # of a table
_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "exposed": "#e45756",
    "optimizer": "#b279a2",
    "waits, or is queued": "#d3d3d3",
    "reduces": "#f58518",
}
_LANE = 0.8  # its height; lanes are 1 apart


def _needed(call: str, module: str) -> Any:
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"Timeline.{call}() needs {package}: pip install {package}") from error


# ---- a table: one row for each rank, medians over the steps --------------------------------------


def values(step: Step) -> list[tuple[str, float]]:
    """The columns of one step: in ms, but for the overlap, which is in percent."""
    return [
        ("forward", step.forward_ns / 1e6),
        ("backward", step.backward_ns / 1e6),
        ("communication", step.communication_ns / 1e6),
        ("exposed", step.exposed_ns / 1e6),
        ("optimizer", step.optimizer_ns / 1e6),
        ("overlap", 100 * step.overlap),
    ]


def table(joined: Joined) -> str:
    rounds = joined.rounds()
    if not rounds:
        return f"{joined.what}: no step yet that all ranks have recorded"
    text = io.StringIO()
    console = _needed("summary", "rich.console").Console(file=text, width=_WIDTH)
    make_table = _needed("summary", "rich.table").Table
    table = make_table(title=_title(joined, rounds), title_justify="left")
    names = [name for name, _ in values(rounds[0][0])]
    for name in ("rank", *names, "last"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in range(len(joined.ranks)):
        last = sum(last_to_launch(steps, -1) == rank for steps in rounds) / len(rounds)
        cells = _cells([steps[rank] for steps in rounds])
        table.add_row(str(rank), *cells, f"{100 * last:.0f} %")
    console.print(table)
    text.write(_slowest(rounds))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _title(joined: Joined, rounds: Sequence[Sequence[Step]]) -> str:
    first, last = rounds[0][0].number, rounds[-1][0].number
    by_rank = [[step.kind for step in steps if not step.has_round] for steps in joined.ranks]
    counts = {
        kind: max(kinds.count(kind) for kinds in by_rank) for kind in ("accumulated", "abandoned")
    }
    more = "".join(f"; {count} {kind}, left out" for kind, count in counts.items() if count)
    return f"{joined.what}: rounds {first} to {last}, medians in ms{more}"


def _cells(steps: Sequence[Step]) -> list[str]:
    columns = zip(*([value for _, value in values(step)] for step in steps), strict=True)
    *times, overlap = [median(column) for column in columns]
    cells = [f"{time:.3f}" for time in times]
    if not any(step.forward_ns for step in steps):
        cells[0] = "not seen"
    return [*cells, f"{overlap:.0f} %"]


def _slowest(rounds: Sequence[Sequence[Step]]) -> str:
    """The rank that was last most often, and what it cost the others then."""
    if len(rounds[0]) == 1:
        return ""
    last = [last_to_launch(steps, -1) for steps in rounds]
    slowest = max(set(last), key=last.count)
    waits = [
        waited_ns(steps, slowest) / 1e6
        for steps, rank in zip(rounds, last, strict=True)
        if rank == slowest
    ]
    return (
        f"Slowest: rank {slowest}, last in {len(waits)} of {len(rounds)} rounds. The others then "
        f"waited {median(waits):.3f} ms for it (median)."
    )


# ---- a trace, in the Trace Event Format of Chrome ------------------------------------------------


def trace(joined: Joined) -> Event:
    """What to write as JSON, for Perfetto and chrome://tracing: a process for each rank, in it a
    thread for what the rank computes, and as many for buckets as travel at once. Times are in µs,
    from the first of all.
    """
    begins = (one.forward_begin or one.backward_begin for steps in joined.ranks for one in steps)
    writer = _Writer(joined, min(filter(None, begins), default=0))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"fastcomm": joined.what},
        "traceEvents": list(writer.events()),
    }


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
        first, *others = plan.names
        name = f"bucket {i}: {first}" + (f" ... {others[-1]}" if others else "")
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


# ---- a picture of one round: for each rank a lane for what it computes, and one for buckets ------


def plot(joined: Joined, steps: Sequence[Step], path: str | os.PathLike[str]) -> None:
    """steps: of one round, by rank."""
    _needed("plot", "matplotlib").use("agg")
    pyplot = _needed("plot", "matplotlib.pyplot")
    size = 10, 1.2 + 1.1 * len(steps)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    origin = min(step.forward_begin or step.backward_begin for step in steps)

    def draw(at: float, height: float, span: tuple[int, int], name: str) -> None:
        begin, end = span
        if begin and end > begin:
            left, width = (begin - origin) / 1e6, (end - begin) / 1e6
            axes.barh(at, width, height, left, color=_COLOURS[name])

    for rank, step in enumerate(steps):
        for name, span in step.spans.items():
            draw(2 * rank, _LANE, span, name)
        height = _LANE / len(step.buckets)
        for i, bucket in enumerate(step.buckets):  # one below the other: they overlap in time
            at = 2 * rank + 1 - _LANE / 2 + (i + 0.5) * height
            start, end = bucket.interval
            draw(at, height, (bucket.launch, start), "waits, or is queued")
            draw(at, height, (start, end), "reduces")
    axes.set_yticks(
        range(2 * len(steps)),
        [f"rank {i // 2}" if i % 2 == 0 else "buckets" for i in range(2 * len(steps))],
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{joined.what}: round {steps[0].number}", loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    figure.legend(handles, _COLOURS, loc="outside lower center", ncols=len(_COLOURS), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
