"""What bench/meetings.py says of its results: two tables, and the part of a report's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables import Column, Section, Spread, Table

NAMES = {
    "every_gradient": "every gradient reduced",
    "local_sgd": "LocalSGD",
    "diloco": "DiLoCo",
    "diloco_bf16": "DiLoCo, bfloat16",
    "streaming": "DiLoCo, 4 fragments, bf16",
}


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Of the part that was measured."""
    rows = results["rows"]
    return [_losses(rows) if "losses" in rows["every_gradient"] else _times(rows)]


def _times(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """What a step takes and sends. Ratios are the time with every gradient reduced over the way's,
    and the bytes of the way over those with every gradient reduced.
    """
    columns = [Column(28, ("way",), "<"), Column(12, ("step (s)",)), Column(9, ("ratio",))]
    columns += [Column(9, ("least",)), Column(9, ("most",))]
    table = Table([*columns, Column(13, ("MB per step",)), Column(9, ("share",))])
    reduced = rows["every_gradient"]
    for way, row in rows.items():
        spread = Spread(*row["seconds"])
        ratio = Spread(*reduced["seconds"]).over(spread)
        table.rows.append(
            [
                NAMES[way],
                f"{spread.mark}{spread.middle:.3f}",
                *(f"{value:.2f}" for value in (ratio.middle, ratio.low, ratio.high)),
                f"{row['nbytes'] / 1e6:.2f}",
                f"{row['nbytes'] / reduced['nbytes']:.3f}",
            ]
        )
    return table


def _losses(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The loss of each way over the seeds, and how far it is above that with every gradient
    reduced.
    """
    columns = [Column(28, ("way",), "<"), Column(11, ("mean loss",)), Column(9, ("least",))]
    table = Table([*columns, Column(9, ("most",)), Column(30, ("above every gradient, by seed",))])
    for way, row in rows.items():
        some = row["losses"]
        pairs = zip(some, rows["every_gradient"]["losses"], strict=True)
        apart = [its - theirs for its, theirs in pairs]
        figures = (sum(some) / len(some), min(some), max(some))
        between = f"{min(apart):+.3f} to {max(apart):+.3f}"
        table.rows.append([NAMES[way], *(f"{figure:.3f}" for figure in figures), between])
    return table


def section(results: Mapping[str, Any]) -> Section:
    every = results["every"]
    if "rate" not in results:
        return Section(
            "The loss of ranks that meet seldom",
            f"The demo's GPT, 2 layers of width 128, on two ranks that meet every {every} steps: "
            f"the loss after {results['steps']} steps on unseen batches, over {results['seeds']} "
            "seeds.",
            tables(results),
            [],
            f"python -m fastcomm bench meetings losses --every {every}",
        )
    return Section(
        "Ranks that meet seldom",
        f"The demo's GPT ({results['parameters'] / 1e6:.1f} M parameters) on two hosts of one "
        f"rank, which are network namespaces, over a link of {results['rate']}; ranks meet every "
        f"{every} steps. A time is that of the slowest rank in turns of as many steps; bytes are "
        "those that a host has sent, headers included.",
        tables(results),
        [],
        f"python -m fastcomm bench meetings --rate {results['rate']} --every {every}",
    )
