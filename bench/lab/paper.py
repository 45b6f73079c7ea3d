"""The experiments of "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li
et al., VLDB 2020) as far as one machine allows: fastcomm and torch DDP side by side.

    python -m fastcomm bench paper fig2    all-reduce of a fixed total, by the size of each tensor
    python -m fastcomm bench paper fig6    parts of a step, with and without overlap
    python -m fastcomm bench paper fig7    latency by bucket size
    python -m fastcomm bench paper fig10   latency with the reduction every 1, 2, 4 and 8 steps
    python -m fastcomm bench paper fig7 --wire network   over links of 1 Gbit/s; needs root
    python -m fastcomm bench paper wires   gradients in 16 and in 8 bits between hosts
    python -m fastcomm bench paper hosts --rate 10gbit --delay-ms 10 --hosts 1,1,1,1   each
                                           contender at its best bucket size
    python -m fastcomm bench paper --from bench/results/paper-fig7-shm.json --plot fig7.png

--wire shm: two ranks of this host, fastcomm over shared memory, DDP over Gloo. --wire network: two
hosts of one rank, which are network namespaces whose links tc limits, or with --delay-ms a process
that takes a tenth to a fifth of a core; fastcomm over backend "hierarchical", DDP over Gloo; from
the source tree only.

Contenders have models of their own and take turns in every round, in a random order. "local" is the
step without communication. A step takes what it takes the slowest rank; differences are medians
over rounds of what two contenders took in the same round. What stands for the paper's models is in
bench/lab/figures.py.
"""

# ruff: noqa: E402 (what all benchmarks share lies beside this script's folder)

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fastcomm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lab import figures
from lab.figures import CONTENDERS, DEFAULT_MB, FIGURES, Way, case_of
from lib import harness, launch, machine, report
from lib.models import CASES, WARM_UP_STEPS, Case
from lib.tables import Column, Spread, Table

PHASES = ("forward", "backward", "optimizer")
LEAST = 20_000  # parameters of an all-reduce in Fig. 2
MIB = 2**20
# of DDP, which has one for bfloat16 over NCCL alone
DTYPE_HOOKS = {"float16": default_hooks.fp16_compress_hook}
LEAST_MB = 1e-6  # of a bucket, for both contenders: less than any gradient has
# [round][way][rank]: what Methods.train returns
Turns = Sequence[Sequence[Sequence[Mapping[str, Any]]]]


def main() -> int:
    options = parse_options()
    if harness.is_rank():
        with harness.joined(group="gloo") as comm:
            launch.serve(comm.rank, Methods(comm, options))
        return 0
    is_network = options.wire == "network"
    reason = harness.why_no_network(options.delay_ms) if is_network else None
    if reason is not None:
        print(f"bench/lab/paper.py {options.figure}: {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    title = FIGURES[options.figure].title
    print(f"{options.figure}: {title}")
    network = {"hosts": options.hosts, "rate": options.rate, "delay_ms": options.delay_ms}
    n_ranks = sum(options.hosts)
    with harness.started(__file__, n_ranks, **(network if is_network else {})) as ranks:
        is_fig2 = options.figure == "fig2"
        results = (measure_all_reduce if is_fig2 else measure_steps)(ranks, options)
    found = {
        "figure": options.figure,
        "wire": options.wire,
        "rate": options.rate if is_network else None,
        "hosts": options.hosts if is_network else None,
        "delay_ms": options.delay_ms,
        "ranks": n_ranks,
        "title": title,
        **results,
    }
    print(f"\n{machine.summary()}")
    report.write_results("paper", found, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("figure", nargs="?", choices=tuple(FIGURES), help="of the paper, or wires")
    parser.add_argument(
        "--wire", choices=("shm", "network"), default="shm", help="what ranks talk over (shm)"
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
        help="ranks on each host of the network (1,1)",
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
    if options.figure in ("wires", "hosts"):
        options.wire = "network"
    options.hosts = options.hosts or [1, 1]
    return options


# ---- Fig. 2 --------------------------------------------------------------------------------------


def parts_of(total: int) -> list[int]:
    """How many tensors the total is cut into."""
    return [n for n in figures.PARTS if total // n >= LEAST]


def measure_all_reduce(ranks: launch.Ranks, options: argparse.Namespace) -> dict[str, Any]:
    total = figures.TOTALS[options.wire]
    seconds = harness.slowest(ranks.call("all_reduce"))
    rows = [
        {
            "parameters": total // n,
            "calls": n,
            "ms": {
                "fastcomm": quartiles_ms(seconds[f"fastcomm {n}"]),
                "gloo": quartiles_ms(seconds[f"ddp {n}"]),
            },
            "gloo/fastcomm": round(
                statistics.median(harness.ratios(seconds, f"fastcomm {n}", f"ddp {n}")), 3
            ),
        }
        for n in parts_of(total)
    ]
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


# ---- the other figures ---------------------------------------------------------------------------


def measure_steps(ranks: launch.Ranks, options: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for model in report.tracked(options.models, "models"):
        answers = ranks.call("train", model=model)
        turns = [
            [
                [answer[way.name][number] for answer in answers]
                for way in FIGURES[options.figure].ways
            ]
            for number in range(options.rounds)
        ]
        results[model] = summarise(options.figure, model, slowest(turns), busiest(turns))
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
    if name == "fig7" and way.who != "local":
        return Way(way.who, DEFAULT_MB)
    if name == "wires" and way.who != "local":
        return Way("ddp", way.bucket_mb)
    return Way(way.who) if name == "fig10" else None


def saved(time: float, base: float) -> float:
    return 1 - time / base


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


# ---- the ranks -----------------------------------------------------------------------------------


@dataclass
class Trainee:
    """A model that is trained in one way."""

    way: Way
    case: Case
    model: nn.Module  # as it is called
    batch: Tensor
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    after_backward: Callable[[], None] = lambda: None
    keep: object = None  # what has to live as long

    def steps(self, n_steps: int) -> list[float]:
        """Seconds of forward, backward and optimizer, each the mean of a step."""
        parts = [0.0, 0.0, 0.0]
        for number in range(1, n_steps + 1):
            is_last = number % self.way.every == 0
            with contextlib.nullcontext() if is_last else self.no_sync():
                stamps = [time.perf_counter()]
                loss = self.case.loss(self.model, self.batch)
                stamps.append(time.perf_counter())
                loss.backward()
                if is_last:
                    self.after_backward()
                stamps.append(time.perf_counter())
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            stamps.append(time.perf_counter())
            for part, (start, end) in enumerate(zip(stamps, stamps[1:], strict=False)):
                parts[part] += (end - start) / n_steps
        return parts


class Methods:
    """What the parent calls, on all ranks at once."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.figure = FIGURES[options.figure]

    def all_reduce(self) -> dict[str, list[float]]:
        """Seconds by contender and round ("fastcomm 10": the total in ten calls)."""
        total = figures.TOTALS[self.options.wire]
        buffers = {
            "fastcomm": self.comm.empty(total, dtype=torch.float32).zero_(),
            "ddp": torch.zeros(total),
        }
        turns = {
            f"{who} {n}": functools.partial(self._reduce_parts, who, buffers[who].chunk(n))
            for who in CONTENDERS
            for n in parts_of(total)
        }
        return self._measure(turns)

    def _reduce_parts(self, who: str, parts: Sequence[Tensor]) -> float:
        """Launches all, then waits for all, as DDP does with its buckets."""
        start = time.perf_counter()
        if who == "fastcomm":
            works = [self.comm.all_reduce(part, async_op=True) for part in parts]
        else:
            works = [dist.all_reduce(part, async_op=True) for part in parts]
        for work in works:
            work.wait()
        return time.perf_counter() - start

    def train(self, model: str) -> dict[str, list[dict[str, Any]]]:
        """By way and round: seconds of the parts of a step, and of the processor in all."""
        case = case_of(self.figure, model)
        original, batch = case.make(self.comm.rank)
        turns: dict[str, Callable[[], dict[str, Any]]] = {}
        for way in self.figure.ways:
            trainee = self._trainee(way, case, original, batch)
            trainee.steps(max(WARM_UP_STEPS, way.every))
            turns[way.name] = functools.partial(self._turn, trainee)
        return self._measure(turns)

    def _measure(self, turns: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
        """The first round is a warm-up: connections open their windows."""
        found = harness.take_turns(turns, 1 + self.options.rounds, self.comm.barrier)
        return {name: measured[1:] for name, measured in found.items()}

    def _turn(self, trainee: Trainee) -> dict[str, Any]:
        if self.figure.warm_up:
            trainee.steps(self.figure.warm_up)
            self.comm.barrier()
        start = time.process_time()
        parts = trainee.steps(self.figure.steps)
        return {"parts": parts, "processor": (time.process_time() - start) / self.figure.steps}

    def _trainee(self, way: Way, case: Case, original: nn.Module, batch: Tensor) -> Trainee:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainee = Trainee(way, case, model, batch, optimizer)
        if way.who == "fastcomm":
            trainee.keep = reducer = self._attach(way, model)
            trainee.no_sync = reducer.no_sync
        elif way.who == "ddp" and way.overlap:
            size = None if way.bucket_mb is None else size_of_buckets(way)
            wrapped = DistributedDataParallel(
                model, bucket_cap_mb=size, gradient_as_bucket_view=way.has_views
            )
            if way.dtype is not None:
                wrapped.register_comm_hook(None, DTYPE_HOOKS[way.dtype])
            trainee.model, trainee.no_sync = wrapped, wrapped.no_sync
        elif way.who == "ddp":
            parameters = list(model.parameters())[::-1]
            trainee.after_backward = functools.partial(
                reduce_gradients, parameters, size_of_buckets(way)
            )
        return trainee

    def _attach(self, way: Way, model: nn.Module) -> fastcomm.Reducer:
        reducer = fastcomm.Reducer(
            self.comm,
            bucket_cap_mb=size_of_buckets(way),
            overlap=way.overlap,
            wire_dtype=None if way.dtype is None else getattr(torch, way.dtype),
        )
        return reducer.attach(model)


def size_of_buckets(way: Way) -> float:
    return DEFAULT_MB if way.bucket_mb is None else max(way.bucket_mb, LEAST_MB)


def reduce_gradients(parameters: Sequence[nn.Parameter], bucket_mb: float) -> None:
    """DDP without overlap, section 3.2.1 of the paper: backward is over, then DDP's buckets are
    filled, reduced together and emptied.
    """
    buckets: list[list[Tensor]] = [[]]
    nbytes = 0
    for gradient in (p.grad for p in parameters if p.grad is not None):
        if buckets[-1] and nbytes >= bucket_mb * MIB:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(gradient)
        nbytes += gradient.nbytes
    flats = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for work, flat, bucket in zip(works, flats, buckets, strict=True):
        work.wait()
        flat.div_(dist.get_world_size())
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, reduced in zip(bucket, flat.split(sizes), strict=True):
            gradient.copy_(reduced.view_as(gradient))


if __name__ == "__main__":
    sys.exit(main())
