"""How the benchmarks report: the options that all of them take, where results go, and the bar that
says how far a run has come. This file measures nothing. Figures and tables are tables.py's;
pictures are chart.py's.

With --report the results become a page by page.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lib import chart, machine, page
from lib.page import Results

STDOUT = Path("-")
INSTALL = "pip install -e '.[bench]'"
# Options that count something.
COUNTS = ("ranks", "steps", "rounds", "seeds", "every")
# Of these the results tell how they were measured; the others say where they go.
OUTPUTS = ("--json", "--plot", "--report")

UNITS = {"G": 2**30, "M": 2**20, "K": 2**10}

T = TypeVar("T")


def tracked(items: Sequence[T], what: str, *, shown: bool = True) -> Iterator[T]:
    """The items, while a bar on stderr says how many are through. Only a terminal shows it, and
    where rich is installed. It moves between the items and not during one: a thread that moved it
    would be measured as well.
    """
    if importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        # What is printed meanwhile goes above the bar, unless it goes elsewhere.
        redirect_stdout=sys.stdout.isatty(),
        disable=not (shown and sys.stderr.isatty()),
    ) as bar:
        task = bar.add_task(what, total=len(items))
        bar.refresh()
        for item in items:
            yield item
            bar.update(task, advance=1, refresh=True)


# ---- options -------------------------------------------------------------------------------------


def make_parser(description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Its help shows the lines of a benchmark's docstring as they stand. prog: of a benchmark that
    is called by another name.
    """
    return argparse.ArgumentParser(
        prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_choices(
    parser: argparse.ArgumentParser,
    name: str,
    known: Iterable[str],
    usual: Sequence[str] | None = None,
) -> None:
    """An option that takes several of the known names; without it the usual ones, or all."""
    names = tuple(known)
    parser.add_argument(
        name,
        nargs="+",
        choices=names,
        default=list(names if usual is None else usual),
        metavar=name.strip("-").removesuffix("s").upper(),
        help=f"of {', '.join(names)} ({'all' if usual is None else ' '.join(usual)})",
    )


def add_largest_size(
    parser: argparse.ArgumentParser, sizes: Sequence[int], what: str = "size"
) -> None:
    """-e: which of the sizes, in bytes, is the largest that is measured. what: has that size."""

    def largest(text: str) -> int:
        if (nbytes := parse_size(text)) < sizes[0]:
            raise argparse.ArgumentTypeError(f"it is at least {sizes[0]}, the smallest size")
        return nbytes

    parser.add_argument(
        "-e",
        type=largest,
        default=sizes[-1],
        metavar="SIZE",
        help=f"largest {what}; K, M and G are binary ({short_size(sizes[-1])})",
    )


def parse(parser: argparse.ArgumentParser, *, rounds: int | None = None) -> argparse.Namespace:
    """Adds the options that all benchmarks have, and parses. `rounds` is the default of --rounds,
    where a benchmark has them. That results can go where they are to go is found out before
    anything is measured. With --from it draws, or writes a page, and ends the process.
    """
    if rounds is not None:
        parser.add_argument(
            "--rounds",
            type=several,
            default=rounds,
            metavar="N",
            help=f"rounds, in each of which every contender has its turn ({rounds})",
        )
    _add_options_of_results(parser)
    if parser.prog == Path(sys.argv[0]).name:  # else the script has named its command
        parser.prog = f"python -m fastcomm bench {Path(sys.argv[0]).stem}"
    options = parser.parse_args()
    problem = _find_problem(options)
    if problem is not None:
        parser.error(problem)
    if options.source:
        _show_again(parser, options)
    # Then nothing but the results goes to stdout.
    options.stdout = sys.stdout
    if options.json == STDOUT:
        sys.stdout = sys.stderr
    return options


def parse_size(text: str) -> int:
    """A number of bytes, as argparse converts it."""
    unit = text[-1:].upper()
    number, factor = (text[:-1], UNITS[unit]) if unit in UNITS else (text, 1)
    if not number.isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: a whole number of bytes, or of K, M or G"
        )
    return int(number) * factor


def short_size(nbytes: int) -> str:
    """1048576 is 1M, as -b takes it."""
    for unit, factor in UNITS.items():
        if nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def several(text: str) -> int:
    """A number of rounds, as argparse converts it."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"quartiles need at least 2; got {number}")
    return number


def hosts(text: str) -> list[int]:
    """How many ranks each host has, as argparse converts it."""
    numbers = [int(n) for n in text.split(",") if n.isdigit()]
    if len(numbers) < 2 or min(numbers) < 1 or len(numbers) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: at least two hosts, each with at least one rank, as in 2,2"
        )
    return numbers


def _add_options_of_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write them (nowhere); - for stdout, and all else to stderr",
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw them: .png, .svg or .pdf")
    group.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="write them as a page: plots, the machine and the command, in one file",
    )
    group.add_argument(
        "--from",
        type=Path,
        nargs="+",
        dest="source",
        metavar="FILE",
        help="measure nothing: draw the results in this file (--plot), or write a page of the "
        "results in one or more (--report)",
    )


def _find_problem(options: argparse.Namespace) -> str | None:
    """Why results cannot be written or shown as these options say."""
    for name in OUTPUTS:
        path = getattr(options, name[2:])
        if path not in (None, STDOUT) and not os.access(path.parent, os.W_OK):
            return f"{name} {path}: {path.parent} is not a folder this process can write to"
        if path not in (None, STDOUT) and path.exists() and not _is_writable_file(path):
            return f"{name} {path} is there, and is not a file this process can write to"
    for name in COUNTS:
        count = getattr(options, name, None)
        if isinstance(count, int) and count < 1:
            return f"--{name} is at least 1"
    if options.source:
        if options.plot is None and options.report is None:
            return "--from is for --plot and --report"
        for path in options.source:
            if not path.is_file():
                return f"--from {path}: there is no such file"
        if options.plot is not None and len(options.source) > 1:
            return f"--plot draws the results of one file, and --from names {len(options.source)}"
    if options.plot is not None and options.plot.suffix not in chart.SUFFIXES:
        return f"--plot {options.plot}: the name must end in {', '.join(chart.SUFFIXES)}"
    if options.report is not None and options.report.suffix != ".html":
        return f"--report {options.report}: the name must end in .html"
    for name, path in (("--plot", options.plot), ("--report", options.report)):
        if path is not None and importlib.util.find_spec("matplotlib") is None:
            return f"{name} needs matplotlib: {INSTALL}"
    return None


def _is_writable_file(path: Path) -> bool:
    return not path.is_dir() and os.access(path, os.W_OK)


def _show_again(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Shows results of before, and ends the process."""
    all_results: list[Results] = []
    for path in options.source:
        try:
            found = json.loads(path.read_text())
        except OSError as error:
            parser.error(f"--from {path}: {error.strerror}")
        except ValueError as error:
            parser.error(f"--from {path}: not JSON: {error}")
        found = found if isinstance(found, list) else [found]
        if not all(isinstance(of, dict) and {"benchmark", "machine"} <= set(of) for of in found):
            parser.error(f"--from {path}: not the results of a benchmark")
        all_results += found
    if options.plot is not None and (len(all_results) > 1 or not chart.can_draw(all_results[0])):
        parser.error(f"--plot cannot draw what is in {path}; --report can show it")
    try:
        if options.plot is not None:
            _draw(all_results[0], options.plot)
        if options.report is not None:
            write_page(all_results, options.report)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        names = ", ".join(map(str, options.source))
        parser.error(
            f"--from {names}: not as this version writes results: {type(error).__name__}: {error}"
        )
    sys.exit()


# ---- results -------------------------------------------------------------------------------------


def write_results(
    benchmark: str,
    figures: Mapping[str, Any],
    options: argparse.Namespace,
    *,
    prefix: str = "",
) -> None:
    """Writes the machine, the command and the figures where --json says, and shows them with --plot
    and --report. Without these nothing is written.
    """
    results = _results_of(benchmark, figures)
    if options.json is not None:
        write_json(results, options.json, options, prefix)
    if options.plot is not None:
        _draw(results, options.plot, prefix)
    if options.report is not None:
        write_page([results], options.report, prefix)


def write_so_far(benchmark: str, figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Writes where --json says, if that is a file, what a run that is cut short is to leave."""
    if options.json not in (None, STDOUT):
        options.json.write_text(_text_of(_results_of(benchmark, figures)))


def _results_of(benchmark: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "machine": machine.describe(),
        "command": _command(benchmark, sys.argv[1:]),
        **figures,
    }


def _command(benchmark: str, arguments: Sequence[str]) -> str:
    """What measures this again, wherever its results went."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name not in OUTPUTS:
            kept.append(argument)
        elif not equals:
            next(rest)
    return f"python -m fastcomm {shlex.join(['bench', benchmark, *kept])}"


def write_json(
    results: Results | Sequence[Results],
    path: Path,
    options: argparse.Namespace,
    prefix: str = "",
) -> None:
    text = _text_of(results)
    if path == STDOUT:
        options.stdout.write(text)
        options.stdout.flush()
    else:
        path.write_text(text)
        print(f"{prefix}Results: {os.path.relpath(path)}")


def _text_of(results: Results | Sequence[Results]) -> str:
    return json.dumps(results, indent=1) + "\n"


def write_page(all_results: Sequence[Results], path: Path, prefix: str = "") -> None:
    path.write_text(page.write(all_results))
    print(f"{prefix}Report: {os.path.relpath(path)}")


def _draw(results: Results, path: Path, prefix: str = "") -> None:
    chart.draw(results, path)
    print(f"{prefix}Plot: {os.path.relpath(path)}")
