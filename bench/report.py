"""How the benchmarks report: the spread of times and their ratios, what a way costs over another in
the same rounds, printed tables, bars, and the JSON in bench/results/. Pictures are chart.py's.

A benchmark says what its columns are and which figures it writes. This file measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import chart
import machine

# In the source tree only: an installed benchmark has no such folder.
RESULTS = Path(__file__).resolve().with_name("results")
INDENT = 2  # of every table; the head's lines may have "# " there
WIDE = 0.5  # of the median: a spread above it is marked


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


WIDE_NOTE = (
    f"~ marks times that spread over more than {WIDE:.0%} of their median: run it again when the "
    "machine is quiet"
)


def parse(
    parser: argparse.ArgumentParser, default: str = "in the source tree: bench/results/"
) -> argparse.Namespace:
    """Adds the options by which all benchmarks say where results go, and parses. That they can go
    there is found out before anything is measured. With --from it draws, and ends the process.
    """
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"where to write the results ({default})"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them: .png, .svg or .pdf")
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="with --plot: measure nothing, draw the results in this file",
    )
    options = parser.parse_args()
    problem = _find_problem(options)
    if problem is not None:
        parser.error(problem)
    if options.source is not None:
        _draw(json.loads(options.source.read_text()), options.plot)
        sys.exit()
    return options


def _find_problem(options: argparse.Namespace) -> str | None:
    """Why results cannot be written or drawn as these options say."""
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not os.access(path.parent, os.W_OK):
            return f"{name} {path}: {path.parent} is not a folder this process can write to"
    if options.source is not None and options.plot is None:
        return "--from is for --plot"
    if options.source is not None and not options.source.is_file():
        return f"--from {options.source}: there is no such file"
    if options.plot is None:
        return None
    if options.plot.suffix not in chart.SUFFIXES:
        return f"--plot {options.plot}: the name must end in {', '.join(chart.SUFFIXES)}"
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return None


def write_results(
    benchmark: str,
    figures: Mapping[str, Any],
    options: argparse.Namespace,
    *,
    default: str | None,
    prefix: str = "",
) -> None:
    """Writes the machine and the figures, and draws them with --plot. Without --json they go into
    the file `default` of RESULTS, or nowhere if one of the two does not exist.
    """
    results = {"benchmark": benchmark, "machine": machine.describe(), **figures}
    path = options.json
    if path is None and default is not None and RESULTS.is_dir():
        path = RESULTS / default
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{prefix}Results: {os.path.relpath(path)}")
    if options.plot is not None:
        _draw(results, options.plot, prefix)


def _draw(results: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    chart.draw(results, path)
    print(f"{prefix}Plot: {os.path.relpath(path)}")
