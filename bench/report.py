"""How the benchmarks report: the spread of times and their ratios, what a way costs over another in
the same rounds, printed tables, bars, and the JSON in bench/results/.

A benchmark says what its columns are and which figures it writes. This file measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import machine

# In the source tree only: an installed benchmark has no such folder.
RESULTS = Path(__file__).resolve().with_name("results")
INDENT = 2  # of every table; the head's lines may have "# " there


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

    def ratio(self, slower: str, faster: str) -> float:
        """How many times the time of `faster` the other one takes."""
        return self.median(slower) / self.median(faster)


def overheads(samples: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """Of every other way, the median over rounds of its time less that of `base`: what slows a
    whole round does not count.
    """
    return {
        way: statistics.median(a - b for a, b in zip(times, samples[base], strict=True))
        for way, times in samples.items()
        if way != base
    }


def rounded(figures: Mapping[str, float], digits: int = 3) -> dict[str, float]:
    return {name: round(value, digits) for name, value in figures.items()}


class Column(NamedTuple):
    """`width` includes the blanks before it; `titles` has one for each line of the head."""

    width: int
    titles: tuple[str, ...]
    align: str = ">"


class Table:
    """Prints a head and rows in the same columns. A title longer than its column reaches to the
    left, over the blanks of columns without one.
    """

    def __init__(self, columns: Sequence[Column], prefix: str = " " * INDENT) -> None:
        self.columns = columns
        self.prefix = prefix

    def print_head(self) -> None:
        for titles in zip(*(column.titles for column in self.columns), strict=True):
            print(self.prefix + self._line(titles)[INDENT:], flush=True)

    def print_row(self, cells: Iterable[str]) -> None:
        print(self._line(cells), flush=True)

    def _line(self, cells: Iterable[str]) -> str:
        line, end = "", INDENT
        for column, cell in zip(self.columns, cells, strict=True):
            start, end = end, end + column.width
            if cell:
                place = start if column.align == "<" else end - len(cell)
                line = line.ljust(max(place, len(line) + 1, INDENT)) + cell
        return line


@dataclass(frozen=True)
class Bar:
    """What a figure is to reach, and whether it does."""

    what: str
    figure: str
    is_met: bool

    def verdict(self) -> str:
        return f"{'met' if self.is_met else 'NOT met':>8}"


def print_bars(bars: Iterable[Bar]) -> None:
    for bar in bars:
        print(f"{bar.verdict()}  {bar.what}: {bar.figure}")


def count_bars(bars: Sequence[Bar]) -> str:
    return f"bars: {sum(bar.is_met for bar in bars)} of {len(bars)} met"


def add_json_option(
    parser: argparse.ArgumentParser, default: str = "in the source tree: bench/results/"
) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"where to write the results ({default})"
    )


def write_results(
    benchmark: str,
    figures: Mapping[str, Any],
    path: Path | None,
    *,
    default: str | None,
    prefix: str = "",
) -> None:
    """Writes the machine and the figures. Without a path they go into the file `default` of
    RESULTS, or nowhere if one of the two does not exist.
    """
    if path is None and default is not None and RESULTS.is_dir():
        path = RESULTS / default
    if path is None:
        return
    # What took minutes to measure is not lost for want of a folder.
    path.parent.mkdir(exist_ok=True)
    results = {"benchmark": benchmark, "machine": machine.describe(), **figures}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{prefix}Results: {os.path.relpath(path)}")
