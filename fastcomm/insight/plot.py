"""A picture of one round: for each rank a lane for what it computes and one for its buckets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fastcomm.insight.joined import Joined
from fastcomm.insight.steps import BucketTimes, Step

_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "exposed": "#e45756",
    "optimizer": "#b279a2",
    "waits, or is queued": "#d3d3d3",
    "reduces": "#f58518",
}
_LANE = 0.8  # its height; lanes are 1 apart


def plot(joined: Joined, steps: Sequence[Step], path: str | os.PathLike[str]) -> None:
    """steps: of one round, by rank."""
    pyplot = _pyplot()
    height = 1.2 + 1.1 * len(steps)
    figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
    origin = min(step.forward_begin or step.backward_begin for step in steps)
    for rank, step in enumerate(steps):
        for name, span in step.spans.items():
            _bar(axes, 2 * rank, _LANE, span, origin, name)
        _draw_buckets(axes, 2 * rank + 1, step.buckets, origin)
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


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Timeline.plot() needs matplotlib: pip install 'fastcomm[insight]'"
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _draw_buckets(axes: Any, lane: int, buckets: Sequence[BucketTimes], origin: int) -> None:
    """One below the other: they overlap in time."""
    height = _LANE / len(buckets)
    for i, bucket in enumerate(buckets):
        at = lane - _LANE / 2 + (i + 0.5) * height
        start, end = bucket.interval
        _bar(axes, at, height, (bucket.launch, start), origin, "waits, or is queued")
        _bar(axes, at, height, (start, end), origin, "reduces")


def _bar(
    axes: Any, at: float, height: float, span: tuple[int, int], origin: int, name: str
) -> None:
    begin, end = span
    if begin and end > begin:
        left, width = (begin - origin) / 1e6, (end - begin) / 1e6
        axes.barh(at, width, height, left, color=_COLOURS[name])
