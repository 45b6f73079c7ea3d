"""The pictures of bench/simulate.py and bench/tune.py; drawn by chart.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GOAL = 0.15  # the band of what is predicted well enough
MARKERS = {"shm": ("o", "tab:blue", "one host"), "network": ("s", "tab:orange", "two hosts")}
ALGORITHMS = {"ring": "-", "tree": "--", "hierarchical": "-.", "sharded": ":"}


def simulate(figure: Any, results: Mapping[str, Any]) -> None:
    """What was predicted over what was measured; and the scaling, beside what was published."""
    rows, scaling = results.get("validation", []), results.get("scaling")
    figure.set_size_inches(4.5 * (bool(rows) + bool(scaling)), 4)
    panels = iter(figure.subplots(1, bool(rows) + bool(scaling), squeeze=False)[0])
    if rows:
        _validation(next(panels), rows, results["errors"]["all"])
    if scaling:
        _scaling(next(panels), scaling)


def _validation(axes: Any, rows: list[Mapping[str, Any]], error: float) -> None:
    for wire, (marker, color, label) in MARKERS.items():
        mine = [row for row in rows if row["wire"] == wire]
        if mine:
            measured, predicted = (
                [r[key] for r in mine] for key in ("measured_ms", "predicted_ms")
            )
            axes.plot(measured, predicted, marker, color=color, alpha=0.6, label=label)
    ends = [min(row["measured_ms"] for row in rows), max(row["measured_ms"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(
        ends,
        [(1 - GOAL) * end for end in ends],
        [(1 + GOAL) * end for end in ends],
        color="gray",
        alpha=0.2,
        linewidth=0,
        label=f"within {GOAL:.0%}",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step (ms)")
    axes.set_ylabel("predicted step (ms)")
    ranks = sorted({row["ranks"] for row in rows})
    axes.set_title(f"{ranks[0]} to {ranks[-1]} ranks: off by {error:.0%} at the median", fontsize=8)
    axes.legend()


def _scaling(axes: Any, scaling: Mapping[str, Any]) -> None:
    rows = scaling["rows"]
    ranks = [row["ranks"] for row in rows]
    for name, style in ALGORITHMS.items():
        axes.plot(ranks, [1e3 * row[name] for row in rows], style, label=name)
    published = [row for row in rows if row["published"]]
    axes.plot(
        [row["ranks"] for row in published],
        [1e3 * row["published"] for row in published],
        "k.",
        label="published, DDP over NCCL",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda ranks, _: f"{ranks:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("step (ms)")
    axes.set_title(f"ResNet-50 on {scaling['machine']}, predicted", fontsize=8)
    axes.legend()


def tune(figure: Any, results: Mapping[str, Any]) -> None:
    """A step over the size of buckets."""
    rows = results["rows"]
    places = range(len(rows))
    axes = figure.subplots()
    axes.plot(places, [row["predicted_ms"] for row in rows], "o-", label="predicted")
    if rows[0]["measured_ms"]:
        axes.plot(places, [row["measured_ms"] for row in rows], "s--", label="measured")
    axes.set_xticks(places, [f"{row['cap_mb']:g}" for row in rows])
    slowest = max(max(row["predicted_ms"], row["measured_ms"] or 0) for row in rows)
    axes.set_ylim(0, 1.15 * slowest)  # a line that is nearly level would lie on the border
    axes.set_xlabel("bucket_cap_mb")
    axes.set_ylabel("step (ms)")
    axes.set_title(f"{results['model']}, {results['ranks']} ranks")
    axes.legend()
