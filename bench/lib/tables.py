"""The figures of the benchmarks as values: times with their spread, ratios of them, and tables.
What a benchmark measures and where its results go is not this file's: see report.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

INDENT = 2  # of every table; the head's lines may have "# " there
WIDE = 0.5  # of the median: a spread above it is marked
WIDE_NOTE = (
    f"~ marks times that spread over more than {WIDE:.0%} of their median: run it again when the "
    "machine is quiet"
)
SHARE_OF_DDP = 0.5  # what fastcomm's overhead is to be at most, on a GPU
INT8_MS = 1.0  # what a wire of int8 is to add at most, for each 100 M parameters, on one card
VERDICTS = {True: "met", False: "NOT met", None: "undecided"}


class Spread(NamedTuple):
    """A median and what lies about it: the quartiles, or the fastest and the slowest."""

    low: float
    middle: float
    high: float

    @classmethod
    def quartiles(cls, samples: Sequence[float]) -> Spread:
        return cls(*statistics.quantiles(samples, n=4))

    def rounded(self, digits: int = 3) -> Spread:
        return Spread(*(round(value, digits) for value in self))

    def over(self, other: Spread) -> Spread:
        """The ratio of the medians, between what is least and most while both are within their
        quartiles.
        """
        most = self.high / other.low if other.low > 0 else math.inf
        return Spread(self.low / other.high, self.middle / other.middle, most)

    @property
    def is_wide(self) -> bool:
        return self.high - self.low > WIDE * self.middle

    @property
    def mark(self) -> str:
        """For the row of a table."""
        return "~" if self.is_wide else ""


@dataclass(frozen=True)
class Times:
    """What was measured at one setting: the times of each contender, all in one unit."""

    spreads: Mapping[str, Spread]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[float]]) -> Times:
        return cls({name: Spread.quartiles(times) for name, times in samples.items()})

    def rounded(self) -> dict[str, Spread]:
        return {name: spread.rounded() for name, spread in self.spreads.items()}

    def __contains__(self, contender: str) -> bool:
        return contender in self.spreads

    def median(self, contender: str) -> float:
        return self.spreads[contender].middle

    def wide(self) -> str:
        """A mark for the row of a table: whose times spread too far to say much."""
        names = ", ".join(name for name, spread in self.spreads.items() if spread.is_wide)
        return names and f"~ {names}"

    def ratio(self, slower: str, faster: str) -> float:
        """How many times the time of `faster` the other one takes."""
        return self.median(slower) / self.median(faster)


class Column(NamedTuple):
    """`width` includes the blanks before it, and is exceeded rather than a figure cut; `titles` has
    one for each line of the head.
    """

    width: int
    titles: tuple[str, ...]
    align: str = ">"


# Of the ratio to a peer, in every table that has one.
RATIO = (Column(9, ("ratio",)), Column(9, ("least",)), Column(9, ("most",)))


def time_cell(spread: Spread, decimals: int) -> str:
    """The median, marked where the times spread widely."""
    return f"{spread.mark}{spread.middle:.{decimals}f}"


def ratio_cells(ratio: Spread | None) -> list[str]:
    """For the columns of RATIO."""
    if ratio is None:
        return [""] * len(RATIO)
    return [three_digits(part) for part in (ratio.middle, ratio.low, ratio.high)]


def three_digits(value: float) -> str:
    return f"{value:.{2 - (value >= 10) - (value >= 100)}f}"


class Table:
    """A head and rows in the same columns: printed whole, or row by row while they are measured."""

    def __init__(
        self,
        columns: Sequence[Column],
        prefix: str = " " * INDENT,
        title: str = "",
        rows: Iterable[Sequence[str]] = (),
    ) -> None:
        self.columns = columns
        self.prefix = prefix
        self.title = title
        self.rows = list(rows)

    def print(self) -> None:
        if self.title:
            print(self.title)
        self.print_head()
        for row in self.rows:
            self.print_row(row)

    def print_head(self) -> None:
        for titles in zip(*(column.titles for column in self.columns), strict=True):
            self._print_line(self.prefix, titles)

    def print_row(self, cells: Iterable[str]) -> None:
        self._print_line(" " * INDENT, cells)

    def _print_line(self, indent: str, cells: Iterable[str]) -> None:
        """Line by line, so that each is printed when it is measured."""
        line = indent.ljust(INDENT)
        for number, (column, cell) in enumerate(zip(self.columns, cells, strict=True)):
            text = f" {cell}" if number else cell
            line += f"{text:{column.align}{self._width(column)}}"
        print(line.rstrip(), flush=True)

    @staticmethod
    def _width(column: Column) -> int:
        return max(column.width, 1 + max(map(len, column.titles)))


# ---- training steps ------------------------------------------------------------------------------


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


# ---- bars ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """What a figure is to reach, and whether it does; None: it scatters too much to tell."""

    what: str
    figure: str
    is_met: bool | None

    def verdict(self) -> str:
        return f"{VERDICTS[self.is_met]:>9}"


def print_bars(bars: Iterable[Bar]) -> None:
    for bar in bars:
        print(f"{bar.verdict()}  {bar.what}: {bar.figure}")


def count_bars(bars: Sequence[Bar]) -> str:
    return f"bars: {sum(bar.is_met is True for bar in bars)} of {len(bars)} met"
