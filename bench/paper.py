"""The experiments of "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li
et al., VLDB 2020) as far as one machine allows: fastcomm and torch DDP side by side, with what the
paper found and what was expected beforehand.

    python -m fastcomm bench paper fig2    all-reduce of a fixed total, by the size of each tensor
    python -m fastcomm bench paper fig6    parts of a step, with and without overlap
    python -m fastcomm bench paper fig7    latency by bucket size; fig8: with twice as many ranks
    python -m fastcomm bench paper fig10   latency with the reduction every 1, 2, 4 and 8 steps
    python -m fastcomm bench paper fig11   loss with the reduction every 1, 2, 4 and 8 steps
    python -m fastcomm bench paper fig12 --device cuda   latency with 1, 3 and 5 communicators
    python -m fastcomm bench paper fig7 --wire network   over links of 1 Gbit/s; needs root
    python -m fastcomm bench paper wires   gradients in 16 and in 8 bits between hosts
    python -m fastcomm bench paper hosts --rate 10gbit --delay-ms 10 --hosts 1,1,1,1   each
                                           contender at its best bucket size
    python -m fastcomm bench paper --from bench/results/paper-fig7-shm.json --plot fig7.png

--wire shm: two ranks of this host (four in Fig. 8), fastcomm over shared memory, DDP over Gloo.
--wire network: two hosts of one rank (Fig. 8: of two), which are network namespaces whose links tc
limits, or with --delay-ms a process that takes a tenth to a fifth of a core; fastcomm over backend
"hierarchical", DDP over Gloo; from the source tree only.

Contenders have models of their own and take turns in every round, in a random order. "local" is the
step without communication. A step takes what it takes the slowest rank; differences are medians
over rounds of what two contenders took in the same round. What stands for the paper's models, its
numbers and our predictions are in bench/lib/paper_figures.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib import cuda_clock, launch, machine, report, turns
from lib.models import CASES
from lib.paper_figures import (
    CONTENDERS,
    DEFAULT_MB,
    EVERY,
    FIGURES,
    PARTS,
    SETTINGS,
    TOTALS,
    Figure,
    Way,
    case_of,
)
from lib.tables import Column, Spread, Table

sys.path.append(str(Path(__file__).resolve().parent.parent))
try:
    from tests.support import namespaces
except ModuleNotFoundError:  # installed: there is no network then
    namespaces = None  # type: ignore[assignment]

PHASES = ("forward", "backward", "optimizer")
WINDOW = 100  # iterations: the losses of Fig. 11 are smoothed over so many
POINTS = 100  # of each of its curves
# [round][way][rank]: what paper_rank.Methods.train returns
Turns = Sequence[Sequence[Sequence[Mapping[str, Any]]]]
LEAST = 20_000  # parameters of an all-reduce in Fig. 2


def main() -> int:
    options = parse_options()
    reason = why_not(options)
    if reason is not None:
        print(f"bench/paper.py {options.figure}: {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    name, figure = options.figure, FIGURES[options.figure]
    print(f"{name}: {figure.title}\n  paper: {figure.found}")
    print(f"  expected here: {figure.expected[options.wire]}")
    with start_ranks(options) as ranks:
        if name == "fig2":
            results = measure_all_reduce(ranks, figure, options)
        elif name == "fig11":
            results = measure_losses(ranks, options)
        else:
            results = measure_steps(ranks, name, options)
    figures = {
        "figure": name,
        "wire": options.wire,
        "rate": options.rate if options.wire == "network" else None,
        "hosts": options.hosts if options.wire == "network" else None,
        "delay_ms": options.delay_ms,
        "ranks": ranks.world_size,
        "title": figure.title,
        "paper": figure.paper(),
        "expected": figure.expected[options.wire],
        **results,
    }
    print(f"\n{machine.summary()}")
    report.write_results("paper", figures, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("figure", nargs="?", choices=tuple(FIGURES), help="of the paper, or wires")
    parser.add_argument(
        "--wire", choices=("shm", "network"), default="shm", help="what ranks talk over (shm)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda for fig12 (cpu)"
    )
    parser.add_argument(
        "--rate", default="1gbit", help="of every link of the network, as tc(8) writes it (1gbit)"
    )
    parser.add_argument(
        "--delay-ms",
        type=float,
        default=0,
        help="from each host of the network to each other one: a round trip takes twice that (0)",
    )
    parser.add_argument(
        "--hosts",
        type=report.hosts,
        metavar="N,N...",
        help="ranks on each host of the network (the figure's own)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help="the figure's own, or of bench/lib/models.py (the figure's own)",
    )
    parser.add_argument(
        "--rounds",
        type=report.several,
        metavar="N",
        help="rounds, in each of which every way has its turn (the figure's own)",
    )
    options = report.parse(parser)
    if options.figure is None:
        parser.error(f"which figure? one of {', '.join(FIGURES)}")
    figure = FIGURES[options.figure]
    options.rounds = figure.rounds if options.rounds is None else options.rounds
    options.models = options.models or list(figure.models)
    unknown = set(options.models) - set(CASES) - set(figure.models)
    if unknown:
        parser.error(f"{options.figure} has no model {', '.join(sorted(unknown))}")
    if options.device == "cuda" and options.figure != "fig12":
        parser.error("--device cuda is for fig12")
    if options.figure == "fig12":
        options.wire = "nccl"
    if options.figure in ("wires", "hosts"):
        options.wire = "network"
    options.hosts = options.hosts or list(figure.hosts)
    return options


def why_not(options: argparse.Namespace) -> str | None:
    """Why the figure cannot be measured here; None if it can."""
    if options.wire == "nccl":
        if options.device != "cuda":
            return "several communicators in turn are NCCL's: it needs a GPU and --device cuda"
        reason = cuda_clock.why_not()
        return reason and f"needs a GPU, and {reason}"
    if options.wire == "network":
        if namespaces is None:
            return "run it in the source tree"
        return namespaces.why_no_delay() if options.delay_ms else namespaces.why_not()
    return None


@contextlib.contextmanager
def start_ranks(options: argparse.Namespace) -> Iterator[launch.Ranks]:
    script = Path(__file__).resolve().with_name("paper_rank.py")
    place: dict[str, Any] = {"wire": options.wire}
    world_size = cuda_clock.device_count() if options.wire == "nccl" else sum(options.hosts)
    with contextlib.ExitStack() as stack:
        if options.wire == "network":
            links = {"rate": options.rate, "delay_s": options.delay_ms / 1e3}
            hosts = stack.enter_context(namespaces.Hosts(options.hosts, **links))
            place["address"] = hosts.address(0)
            place["hosts"] = [
                [hosts.namespace(host), hosts.environment(rank)]
                for rank, host in enumerate(hosts.host_of)
            ]
        yield stack.enter_context(launch.Ranks(script, world_size, arguments=[json.dumps(place)]))


# ---- Fig. 2 --------------------------------------------------------------------------------------


def measure_all_reduce(
    ranks: launch.Ranks, figure: Figure, options: argparse.Namespace
) -> dict[str, Any]:
    total = TOTALS[options.wire]
    parts = [n for n in PARTS if total // n >= LEAST]
    answers = ranks.call("all_reduce", total=total, parts=parts, rounds=options.rounds)
    rounds = turns.slowest(answers)  # the first contenders are fastcomm's
    contenders = [(who, n) for who in CONTENDERS for n in parts]
    seconds = dict(zip(contenders, zip(*rounds, strict=True), strict=True))
    rows = []
    for n in parts:
        ours, theirs = (seconds[who, n] for who in CONTENDERS)
        row = {
            "parameters": total // n,
            "calls": n,
            "ms": {"fastcomm": quartiles_ms(ours), "gloo": quartiles_ms(theirs)},
            "gloo/fastcomm": round(statistics.median(map(ratio, theirs, ours)), 3),
        }
        rows.append(row)
    print(f"\nall-reduce of {total / 1e6:g} M parameters in all, {ranks.world_size} ranks")
    print_all_reduce(rows)
    return {"total": total, "rows": rows}


def print_all_reduce(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(
        [
            Column(width, (title,))
            for title, width in (
                ("parameters", 12),
                ("calls", 8),
                ("fastcomm", 11),
                ("Gloo (ms)", 11),
                ("ratio", 8),
            )
        ]
    )
    table.print_head()
    for row in rows:
        times = [f"{spread.middle:.1f}" for spread in row["ms"].values()]
        cells = [f"{row['parameters']:,}", str(row["calls"]), *times]
        table.print_row([*cells, f"{row['gloo/fastcomm']:.1f}x"])


# ---- Figs. 6, 7, 8, 10 and 12 --------------------------------------------------------------------


def measure_steps(ranks: launch.Ranks, name: str, options: argparse.Namespace) -> dict[str, Any]:
    figure = FIGURES[name]
    results = {}
    for model in options.models:
        answers = ranks.call(
            "train",
            figure=name,
            model=model,
            ways=[way.to_json() for way in figure.ways],
            rounds=options.rounds,
            steps=figure.steps,
            warm_up=figure.warm_up,
        )
        turns = [[*zip(*rows, strict=True)] for rows in zip(*answers, strict=True)]
        results[model] = summarise(name, model, slowest(turns), busiest(turns))
        print_steps(results[model])
    return {"models": results}


def slowest(turns: Turns) -> list[list[list[float]]]:
    """Of each turn, the parts of the rank that took longest."""
    return [[max((turn["parts"] for turn in turn_), key=sum) for turn_ in row] for row in turns]


def busiest(turns: Turns) -> list[list[float]]:
    """Of each turn, the processor's seconds of the rank that took most."""
    return [[max(turn["processor"] for turn in turn_) for turn_ in row] for row in turns]


def summarise(
    name: str,
    model: str,
    rounds: Sequence[Sequence[Sequence[float]]],
    processor: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """rounds: seconds [round][way][part]. processor: its seconds [round][way]."""
    figure = FIGURES[name]
    case = case_of(figure, model)
    numels = [p.numel() for p in case.make_model().parameters()]
    totals = {
        way: [1e3 * sum(row[number]) for row in rounds] for number, way in enumerate(figure.ways)
    }
    rows = []
    for number, way in enumerate(figure.ways):
        base = base_of(name, way)
        row: dict[str, Any] = {
            "way": way.name,
            **way.to_json(),
            "ms": Spread.quartiles(totals[way]).rounded(),
            "parts_ms": {
                part: round(1e3 * statistics.median(row[number][index] for row in rounds), 3)
                for index, part in enumerate(PHASES[: len(rounds[0][number])])
            },
        }
        if way.who != "local":
            differences = [a - b for a, b in zip(totals[way], totals[way.local], strict=True)]
            row["over_local_ms"] = Spread.quartiles(differences).rounded()
            local = figure.ways.index(way.local)
            busy = [1e3 * (row[number] - row[local]) for row in processor]
            row["processor_over_local_ms"] = Spread.quartiles(busy).rounded()
        if base is not None and base != way:
            row["saved"] = round(statistics.median(map(saved, totals[way], totals[base])), 4)
            row["saved_against"] = base.name
        rows.append(row)
    result = {
        "model": case.description,
        "parameters": sum(numels),
        "tensors": len(numels),
        "rows": rows,
    }
    return result | ({"best": best_of(rows)} if name == "hosts" else {})


def best_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By contender and dtype, its best bucket size, and of what DDP adds at its own: what it adds
    to the step, and to the processor's time.
    """
    best: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        key = ", ".join(filter(None, (row["who"], row["dtype"])))
        if row["who"] != "local":
            best[key] = min(best.get(key, row), row, key=lambda one: one["over_local_ms"].middle)
    ddp = best["ddp"]
    return {
        key: {
            "bucket_mb": row["bucket_mb"],
            "of_ddp": round(row["over_local_ms"].middle / ddp["over_local_ms"].middle, 3),
            "processor_of_ddp": round(
                row["processor_over_local_ms"].middle / ddp["processor_over_local_ms"].middle, 3
            ),
        }
        for key, row in best.items()
    }


def base_of(name: str, way: Way) -> Way | None:
    """What the figure compares a way with: the same contender without what the figure is about."""
    if name == "fig6" and way.who != "local":
        return replace(way, overlap=False)
    if name in ("fig7", "fig8") and way.who != "local":
        return Way(way.who, DEFAULT_MB)
    if name == "wires" and way.who != "local":
        return Way("ddp", way.bucket_mb)
    if name == "hosts":
        return None
    if name == "fig10":
        return Way(way.who)
    return Way("fastcomm") if way.who == "fastcomm" else None


def saved(time: float, base: float) -> float:
    return 1 - time / base


def ratio(slower: float, faster: float) -> float:
    return slower / faster


def quartiles_ms(seconds: Sequence[float]) -> Spread:
    return Spread.quartiles([1e3 * time for time in seconds]).rounded()


def print_steps(result: Mapping[str, Any]) -> None:
    print(
        f"\n{result['model']}: {result['parameters'] / 1e6:.1f} M parameters in "
        f"{result['tensors']} tensors, ms per step"
    )
    rows = result["rows"]
    width = max(len(row["way"]) for row in rows)
    columns = [("median", 9), ("quartiles", 19), ("over local", 12), ("saved", 8)]
    table = Table(
        [
            Column(width, ("",), "<"),
            *(Column(width, (title,)) for title, width in columns),
            Column(3, ("",), "<"),  # the mark of a wide spread
        ]
    )
    table.print_head()
    for row in rows:
        low, median, high = row["ms"]
        over = f"{row['over_local_ms'].middle:.1f}" if "over_local_ms" in row else ""
        share = f"{row['saved']:.1%}" if "saved" in row else ""
        spread = f"{low:.1f} ..{high:8.1f}"
        table.print_row([row["way"], f"{median:.1f}", spread, over, share, row["ms"].mark])
    against = {row["saved_against"] for row in rows if "saved_against" in row}
    if against:
        print(f"  saved: against {', '.join(sorted(against))}", flush=True)
    for name, best in result.get("best", {}).items():
        print(
            f"  {name}: best with {best['bucket_mb']:g} MB, adds {best['of_ddp']:.2f} of what DDP "
            f"adds, {best['processor_of_ddp']:.2f} of the processor's time",
            flush=True,
        )


# ---- Fig. 11 -------------------------------------------------------------------------------------


def measure_losses(ranks: launch.Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """By setting and by steps between reductions: the losses of all ranks, smoothed."""
    results = []
    for batch, lr, iterations in SETTINGS:
        curves = {}
        apart = 0.0
        for every in EVERY:
            answers = ranks.call("converge", batch=batch, lr=lr, iterations=iterations, every=every)
            ours, theirs = (
                [statistics.fmean(losses) for losses in zip(*curve, strict=True)]
                for curve in zip(*answers, strict=True)
            )
            apart = max(apart, *(abs(a - b) for a, b in zip(ours, theirs, strict=True)))
            curves[str(every)] = smoothed(ours, WINDOW, POINTS)
        last = {every: curve[-1][1] for every, curve in curves.items()}
        print(f"\nbatch {batch}, rate {lr}: loss after {iterations} iterations")
        print("  " + ", ".join(f"every {every}: {loss:.4f}" for every, loss in last.items()))
        print(f"  largest difference between fastcomm's and DDP's losses: {apart:g}")
        setting = {"batch": batch, "lr": lr, "iterations": iterations}
        results.append(setting | {"curves": curves, "largest_difference_to_ddp": apart})
    return {"window": WINDOW, "settings": results}


def smoothed(losses: Sequence[float], window: int, n_points: int) -> list[tuple[int, float]]:
    """At most `n_points` pairs of an iteration and the mean of the losses about it; less at the
    ends, where there are fewer.
    """
    half = window // 2
    places = range(0, len(losses), max(1, len(losses) // n_points))
    return [
        (place, round(statistics.fmean(losses[max(0, place - half) : place + half + 1]), 5))
        for place in places
    ]


if __name__ == "__main__":
    sys.exit(main())
