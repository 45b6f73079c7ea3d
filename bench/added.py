"""What communication adds to a step, by contender, on one host and between hosts: the picture of
docs/comparison.md, drawn from committed results. Measures nothing, and needs no matplotlib.

    python bench/added.py > docs/added.svg

Each panel shows one run, so compare bars within a panel alone. The picture is dark where the reader
prefers that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
# Of each way: label and color, in the order of the bars.
WAYS = {
    "fastcomm": ("fastcomm", "#2f81d6"),
    "fastcomm, bfloat16": ("fastcomm, bfloat16 wire", "#5cb3d9"),
    "fastcomm, int8": ("fastcomm, int8 wire", "#3da37a"),
    "ddp": ("DDP", "#e07b1f"),
    "ddp_views": ("DDP, bucket views", "#eeb06a"),
    "ddp, float16": ("DDP, float16 hook", "#b0652a"),
}
MODELS = {
    "mlp": "MLP",
    "transformer": "transformer",
    "conv": "conv net",
    "gpt2": "GPT-2 small",
    "resnet": "ResNet",
    "bert": "BERT",
}
TITLE = "What communication adds to a training step"
SUBTITLE = (
    "% of the same step without communication, 2 ranks on 2 cores: medians; thin lines are "
    "quartiles, where the results have them, cut at 0. Less is better."
)
STYLE = """
svg { color: #1f2328; background: #ffffff; font: 11px sans-serif }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }
text { fill: currentColor }
line { stroke: currentColor }
.title { font-size: 15px; font-weight: bold }
.panel { font-size: 12px; font-weight: bold }
.number { font-size: 9px }
.grid { opacity: 0.2 }
"""
# In pixels: a bar, what is between groups, left of a panel's axis, above and below it; the y label.
BAR, GAP, MARGIN, TOP, HEIGHT, BELOW, LEFT = 20, 16, 50, 92, 210, 88, 14
ZERO = TOP + HEIGHT
TICKS = 5  # at most, above 0


@dataclass(frozen=True)
class Bar:
    """Percent of the step without communication."""

    way: str
    middle: float
    quartiles: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    title: str
    subtitle: str
    machine: Mapping[str, Any]
    groups: Mapping[str, Sequence[Bar]]

    @property
    def bars(self) -> list[Bar]:
        return [bar for bars in self.groups.values() for bar in bars]

    @property
    def width(self) -> int:
        return MARGIN + len(self.bars) * BAR + len(self.groups) * GAP

    @property
    def highest(self) -> float:
        return max(max(bar.middle, *(bar.quartiles or (0,))) for bar in self.bars)


def main() -> None:
    print(picture())


def picture() -> str:
    panels = [
        one_host("step-2ranks.json"),
        hosts("paper-wires-network.json", "Two hosts, 1 Gbit/s", "buckets of 5 MB"),
        hosts("paper-hosts-10gbit.json", "Two hosts, 10 Gbit/s", "each at its best bucket size"),
    ]
    width, height = LEFT + sum(panel.width for panel in panels) + GAP, ZERO + BELOW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        text(14, 24, TITLE, 'class="title"'),
        text(14, 42, SUBTITLE),
        text(0, 0, "added to a step (%)", f'transform="translate(22 {ZERO}) rotate(-90)"'),
    ]
    left = LEFT + MARGIN
    for panel in panels:
        lines += drawn(panel, left)
        left += panel.width
    return "\n".join([*lines, *legend(), "</svg>"])


# ---- the figures ---------------------------------------------------------------------------------


def one_host(name: str) -> Panel:
    """Of bench/step.py: medians of what is added, without quartiles."""
    results = json.loads((RESULTS / name).read_text())
    groups = {}
    for model, measured in results["models"].items():
        local, added = measured["quartiles_ms"]["local"][1], measured["overhead_ms"]
        groups[MODELS[model]] = [Bar(way, 100 * added[way] / local) for way in WAYS if way in added]
    return Panel("One host", "shared memory; DDP over Gloo", results["machine"], groups)


def hosts(name: str, title: str, subtitle: str) -> Panel:
    """Of bench/paper.py: of several bucket sizes each contender's best."""
    results = json.loads((RESULTS / name).read_text())
    groups = {}
    for model, measured in results["models"].items():
        local = next(row["ms"][1] for row in measured["rows"] if row["who"] == "local")
        bars = {}
        for row in best_rows(measured):
            low, middle, high = (100 * ms / local for ms in row["over_local_ms"])
            bars[way_of(row)] = Bar(way_of(row), middle, (low, high))
        groups[MODELS[model]] = [bars[way] for way in WAYS if way in bars]
    return Panel(title, f"{subtitle}; Gloo", results["machine"], groups)


def best_rows(measured: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    best = measured.get("best")
    for row in measured["rows"]:
        if row["who"] != "local":
            contender = ", ".join(filter(None, (row["who"], row["dtype"])))
            if best is None or best[contender]["bucket_mb"] == row["bucket_mb"]:
                yield row


def way_of(row: Mapping[str, Any]) -> str:
    if row.get("has_views"):
        return "ddp_views"
    return ", ".join(filter(None, (row["who"], row["dtype"])))


# ---- the picture ---------------------------------------------------------------------------------


def drawn(panel: Panel, left: int) -> Iterator[str]:
    right = left + panel.width - MARGIN
    yield text(left, TOP - 32, panel.title, 'class="panel"')
    yield text(left, TOP - 18, panel.subtitle)
    step = next(n for n in (5, 10, 20, 25, 50, 100) if n * TICKS >= panel.highest)
    scale = HEIGHT / max(panel.highest, step)
    for tick in range(0, int(panel.highest) + 1, step):
        y = ZERO - tick * scale
        kind = "grid" if tick else "axis"
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'
        yield text(left - 5, y + 4, f"{tick}%", 'text-anchor="end"')
    x = left + GAP / 2
    for model, bars in panel.groups.items():
        yield text(x + len(bars) * BAR / 2, ZERO + 30, model, 'text-anchor="middle"')
        for bar in bars:
            yield from drawn_bar(bar, x, scale)
            x += BAR
        x += GAP
    machine = panel.machine
    measured = f"{machine['cpu'].replace('(R)', '')}, {machine['date'][:10]}"
    yield text(left, ZERO + 46, measured, 'class="number"')


def drawn_bar(bar: Bar, x: float, scale: float) -> Iterator[str]:
    height = max(1.0, bar.middle * scale)
    color = WAYS[bar.way][1]
    yield (
        f'<rect x="{x + 1:.1f}" y="{ZERO - height:.1f}" width="{BAR - 2}" height="{height:.1f}" '
        f'fill="{color}"/>'
    )
    if bar.quartiles is not None:
        # cut at the axis, below which the numbers are
        low, high = (ZERO - max(0, value) * scale for value in bar.quartiles)
        middle = x + BAR / 2
        yield f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
    yield text(x + BAR / 2, ZERO + 14, f"{bar.middle:.0f}", 'text-anchor="middle" class="number"')


def legend() -> Iterator[str]:
    x = float(LEFT + MARGIN)
    for label, color in WAYS.values():
        yield f'<rect x="{x:.0f}" y="{ZERO + 62}" width="11" height="11" fill="{color}"/>'
        yield text(x + 16, ZERO + 72, label)
        x += 44 + 6.4 * len(label)


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{words}</text>'


if __name__ == "__main__":
    main()
