"""What bench/paper.py says of its results on a report's page: a table for each figure of the paper,
and the ratios to DDP or Gloo. The pictures are paper_chart.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tables import Column, Ratio, Section, Spread, Table

Results = Mapping[str, Any]
_TIMES = (Column(13, ("median (ms)",)), Column(12, ("quartile 1",)), Column(12, ("quartile 3",)))


def section(results: Results) -> Section:
    found, expected = results["paper"]["found"], results["expected"]
    tables, ratios = _parts(results)
    return Section(
        f"The paper's {results['figure']}: {results['title']}",
        f"The paper found: {found} Expected here: {expected}",
        tables,
        ratios,
        f"python -m fastcomm bench paper {results['figure']} --wire {results['wire']}",
    )


def _parts(results: Results) -> tuple[list[Table], list[Ratio]]:
    if "settings" in results:
        return [_losses(results)], []
    if "models" not in results:
        return [_calls_table(results)], list(_ratios_of_calls(results))
    models = results["models"].values()
    tables = [_steps_table(model) for model in models]
    return tables, [ratio for model in models for ratio in _ratios_of_steps(model)]


def _calls_table(results: Results) -> Table:
    columns = [Column(16, ("elements",)), Column(8, ("calls",)), Column(12, ("by",), "<")]
    table = Table([*columns, *_TIMES])
    for row in results["rows"]:
        for who, times in row["ms"].items():
            cells = [f"{row['parameters']:,}", str(row["calls"]), who]
            table.rows.append([*cells, *_cells(times)])
    return table


def _ratios_of_calls(results: Results) -> Iterator[Ratio]:
    for row in results["rows"]:
        times = {who: Spread(*quartiles) for who, quartiles in row["ms"].items()}
        own = times.pop("fastcomm")
        for who, spread in times.items():
            yield Ratio(f"calls of {row['parameters']:,} elements", who, spread.over(own))


def _steps_table(model: Results) -> Table:
    table = Table([Column(24, ("way",), "<"), *_TIMES], title=model["model"])
    table.rows = [[row["way"], *_cells(row["ms"])] for row in model["rows"]]
    return table


def _ratios_of_steps(model: Results) -> Iterator[Ratio]:
    times = {row["way"]: Spread(*row["ms"]) for row in model["rows"]}
    name = model["model"].split(",")[0]
    for way, spread in times.items():
        if way.startswith("ddp"):
            own = times["fastcomm" + way.removeprefix("ddp")]
            yield Ratio(f"step of {name}{way.removeprefix('ddp')}", "ddp", spread.over(own))


def _losses(results: Results) -> Table:
    columns = [Column(10, ("batch",)), Column(16, ("reduced every",)), Column(12, ("last loss",))]
    rows = [
        [str(setting["batch"]), every, f"{curve[-1][1]:.4f}"]
        for setting in results["settings"]
        for every, curve in setting["curves"].items()
    ]
    return Table(columns, rows=rows)


def _cells(times: list[float]) -> list[str]:
    low, median, high = times
    return [f"{median:.2f}", f"{low:.2f}", f"{high:.2f}"]
