"""The table of training steps that bench/step.py and bench/backend.py print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lib.tables import RATIO, Column, Spread, Table, ratio_cells, time_cell

SHARE_OF_DDP = 0.5  # what fastcomm's overhead is to be at most, on a GPU
INT8_MS = 1.0  # what a wire of int8 is to add at most, for each 100 M parameters, on one card


def steps_table(model: Mapping[str, Any], title: str) -> Table:
    """A row for each way to make a step. Its ratio is to fastcomm's time with the same dtype on the
    wire.
    """
    width = max(10, 1 + max(map(len, model["quartiles_ms"])))
    columns = [Column(width, ("way",), "<"), Column(13, ("median (ms)",))]
    columns += [Column(12, (f"quartile {n}",)) for n in (1, 3)]
    columns += [Column(17, ("over local (ms)",)), *RATIO]
    table = Table(columns, title=title)
    ratios = dict(_ratios(model["quartiles_ms"]))
    for way, quartiles in model["quartiles_ms"].items():
        spread = Spread(*quartiles)
        over = model["overhead_ms"].get(way)
        cells = [way, time_cell(spread, 2), f"{spread.low:.2f}", f"{spread.high:.2f}"]
        cells.append("" if over is None else f"{over:.2f}")
        table.rows.append([*cells, *ratio_cells(ratios.get(way))])
    return table


def _ratios(times: Mapping[str, Any]) -> Iterator[tuple[str, Spread]]:
    for way in times:
        own = "fastcomm_bf16" if way.endswith("_bf16") else "fastcomm"
        if way not in (own, "local"):
            yield way, Spread(*times[way]).over(Spread(*times[own]))
