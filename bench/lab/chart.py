"""The pictures of paper.py: fastcomm and DDP side by side. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLORS = {"local": "silver", "fastcomm": "tab:blue", "ddp": "tab:orange", "gloo": "tab:orange"}
LABELS = {"local": "no communication", "fastcomm": "fastcomm", "ddp": "DDP", "gloo": "Gloo"}
PARTS = ("forward", "backward", "exposed communication", "optimizer")
SHADES = dict(zip(PARTS, ("gainsboro", "silver", "tab:red", "dimgray"), strict=True))


def draw(figure: Any, results: Mapping[str, Any]) -> None:
    name = results["figure"]
    wire = "one host" if results["wire"] == "shm" else f"links of {results['rate']}"
    if results.get("delay_ms"):
        wire += f" and {results['delay_ms']:g} ms"
    number = name.removeprefix("fig")
    figure.suptitle(f"Fig. {number}: {results['title']}; {results['ranks']} ranks, {wire}")
    _PICTURES[name](figure, results)


def _panels(figure: Any, count: int) -> tuple[Any, Sequence[Any]]:
    """Axes side by side. The legend keeps off the line below."""
    figure.set_size_inches(9, 3.6)
    part = figure.subfigures()
    return part, part.subplots(1, count, squeeze=False)[0]


def _legend(part: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    part.legend(handles, labels, loc="outside lower center", ncols=6)


def _title(axes: Any, model: Mapping[str, Any]) -> None:
    name, _, batch = model["model"].partition(", ")
    axes.set_title(f"{name}\n{batch}, {model['parameters'] / 1e6:.1f} M parameters", fontsize=7)


def _all_reduce(figure: Any, results: Mapping[str, Any]) -> None:
    part, (axes,) = _panels(figure, 1)
    rows = results["rows"]
    sizes = [row["parameters"] for row in rows]
    for who in rows[0]["ms"]:
        _line(axes, sizes, [row["ms"][who] for row in rows], who)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"parameters per all-reduce, of {results['total'] / 1e6:g} M in all")
    axes.set_ylabel("ms in all")
    axes.grid(alpha=0.3)
    axes.legend()


def _line(
    axes: Any,
    places: Sequence[float],
    spreads: Sequence[Sequence[float]],
    who: str,
    style: str = "-",
) -> None:
    low, middle, high = zip(*spreads, strict=True)
    color = COLORS[who]
    axes.plot(places, middle, style, color=color, label=LABELS[who], marker=".")
    axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)


def _parts(figure: Any, results: Mapping[str, Any]) -> None:
    """Stacked parts, each contender's step without overlap taken as 1; last what overlap saves."""
    models = results["models"]
    part, panels = _panels(figure, len(models) + 1)
    for axes, model in zip(panels, models.values(), strict=False):
        _title(axes, model)
        _stack(axes, model["rows"])
    panels[0].set_ylabel("step, without overlap = 1")
    _legend(part, panels[0])
    axes = panels[-1]
    bars = [
        (f"{name}, {LABELS[row['who']]}", 100 * row["saved"], COLORS[row["who"]])
        for name, model in models.items()
        for row in model["rows"]
        if "saved" in row
    ]
    names, heights, colors = zip(*bars[::-1], strict=True)
    drawn = axes.barh(names, heights, color=colors)
    axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=7)
    axes.set_title("saved by overlap, %", fontsize=7)
    axes.margins(x=0.2)


def _stack(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    local = rows[0]["parts_ms"]
    ways = [row for row in rows if row["who"] != "local"]
    wholes = {row["who"]: sum(row["parts_ms"].values()) for row in ways if not row["overlap"]}
    names = [f"{LABELS[row['who']]}\n{'' if row['overlap'] else 'no '}overlap" for row in ways]
    bottom = [0.0] * len(ways)
    for part in PARTS:
        heights = []
        for row in ways:
            parts = row["parts_ms"]
            backward = min(local["backward"], parts["backward"])
            exposed = {"backward": backward, PARTS[2]: parts["backward"] - backward}
            heights.append((parts | exposed)[part] / wholes[row["who"]])
        axes.bar(names, heights, bottom=bottom, color=SHADES[part], label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.tick_params(axis="x", labelsize=5.5)


def _sizes(figure: Any, results: Mapping[str, Any]) -> None:
    """Latency over bucket size, as boxes would show it: median and quartiles."""
    part, panels = _panels(figure, len(results["models"]))
    for axes, model in zip(panels, results["models"].values(), strict=True):
        _title(axes, model)
        local = next(row for row in model["rows"] if row["who"] == "local")
        axes.axhline(local["ms"][1], color=COLORS["local"], label=LABELS["local"])
        for who in ("fastcomm", "ddp"):
            rows = [row for row in model["rows"] if row["who"] == who]
            places = range(len(rows))
            _line(axes, places, [row["ms"] for row in rows], who)
            axes.set_xticks(places, [f"{row['bucket_mb']:g}" for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("bucket size (MB); 0: a bucket for each gradient")
    panels[0].set_ylabel("ms per step")
    _legend(part, panels[0])


def _every(figure: Any, results: Mapping[str, Any]) -> None:
    part, panels = _panels(figure, len(results["models"]))
    for axes, model in zip(panels, results["models"].values(), strict=True):
        _title(axes, model)
        for who in ("local", "fastcomm", "ddp"):
            rows = [row for row in model["rows"] if row["who"] == who]
            _line(axes, range(len(rows)), [row["ms"] for row in rows], who)
        axes.set_xticks(range(len(rows)), [str(row["every"]) for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("steps between reductions")
    panels[0].set_ylabel("ms per step")
    _legend(part, panels[0])


def _bests(figure: Any, results: Mapping[str, Any]) -> None:
    """What each contender adds at its best bucket size, of what DDP adds."""
    _, panels = _panels(figure, len(results["models"]))
    for axes, model in zip(panels, results["models"].values(), strict=True):
        _title(axes, model)
        for number, (name, best) in enumerate(model["best"].items()):
            color = COLORS[name.partition(",")[0]]
            axes.bar(number, best["of_ddp"], color=color)
        names = [name.replace(", ", "\n") for name in model["best"]]
        axes.set_xticks(range(len(names)), names, fontsize=5.5)
    panels[0].set_ylabel("added to a step, DDP = 1")


def _dtypes(figure: Any, results: Mapping[str, Any]) -> None:
    _, panels = _panels(figure, len(results["models"]))
    for axes, model in zip(panels, results["models"].values(), strict=True):
        _title(axes, model)
        rows = model["rows"]
        names = [LABELS[row["who"]] for row in rows]
        dtypes = ["" if row["who"] == "local" else row["dtype"] or "float32" for row in rows]
        low, middles, high = zip(*(row["ms"] for row in rows), strict=True)
        whiskers = [
            [middle - least for middle, least in zip(middles, low, strict=True)],
            [most - middle for middle, most in zip(middles, high, strict=True)],
        ]
        labels = list(map("\n".join, zip(names, dtypes, strict=True)))
        axes.bar(labels, middles, yerr=whiskers, color=[COLORS[row["who"]] for row in rows])
        axes.tick_params(axis="x", labelsize=6)
    panels[0].set_ylabel("ms per step")


_PICTURES = {
    "fig2": _all_reduce,
    "fig6": _parts,
    "fig7": _sizes,
    "fig10": _every,
    "wires": _dtypes,
    "hosts": _bests,
}
