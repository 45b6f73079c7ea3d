"""What a step's time goes into, as a table: one row for each rank, medians over the steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import median
from typing import Any

from fastcomm.insight.joined import Joined, last_to_launch, waited_ns
from fastcomm.insight.steps import Step

_WIDTH = 110


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
    """The summary as text."""
    rounds = joined.rounds()
    if not rounds:
        return f"{joined.what}: no step yet that all ranks have recorded"
    text = io.StringIO()
    console = _rich("console").Console(file=text, width=_WIDTH)
    table = _rich("table").Table(title=_title(joined, rounds), title_justify="left")
    names = [name for name, _ in values(rounds[0][0])]
    for name in ("rank", *names, "last"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in range(len(joined.ranks)):
        table.add_row(str(rank), *_row([steps[rank] for steps in rounds]), _last(rounds, rank))
    console.print(table)
    text.write(_slowest(rounds))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _rich(module: str) -> Any:
    try:
        import rich.console
        import rich.table
    except ImportError as error:
        raise ImportError(
            "Timeline.summary() needs rich: pip install 'fastcomm[insight]'"
        ) from error
    return {"console": rich.console, "table": rich.table}[module]


def _title(joined: Joined, rounds: Sequence[Sequence[Step]]) -> str:
    first, last = rounds[0][0].number, rounds[-1][0].number
    by_rank = [[step.kind for step in steps if not step.has_round] for steps in joined.ranks]
    counts = {
        kind: max(kinds.count(kind) for kinds in by_rank) for kind in ("accumulated", "abandoned")
    }
    more = "".join(f"; {count} {kind}, left out" for kind, count in counts.items() if count)
    return f"{joined.what}: rounds {first} to {last}, medians in ms{more}"


def _row(steps: Sequence[Step]) -> list[str]:
    columns = zip(*([value for _, value in values(step)] for step in steps), strict=True)
    *times, overlap = [median(column) for column in columns]
    cells = [f"{time:.3f}" for time in times]
    if not any(step.forward_ns for step in steps):
        cells[0] = "not seen"
    return [*cells, f"{overlap:.0f} %"]


def _last(rounds: Sequence[Sequence[Step]], rank: int) -> str:
    """In how many rounds the rank was last to launch the last bucket."""
    share = sum(last_to_launch(steps, -1) == rank for steps in rounds) / len(rounds)
    return f"{100 * share:.0f} %"


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
