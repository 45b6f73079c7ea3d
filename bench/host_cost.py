"""What communication on a GPU costs the host, as Python sees it: gather and launch of one bucket,
and a whole step, beside DDP over Gloo on the CPU.

    python -m fastcomm bench host_cost
    python -m fastcomm bench host_cost --rounds 60 --json bench/results/host_cost.json

No GPU takes part: the driver and NCCL are the tests' stand-ins, and the kernels do nothing. Most
of a launch is the stand-ins' own time: they note each call in a log, look whether it is to fail,
and NCCL's finds the driver's by name. So a launch is timed twice: with the stand-ins as tests use
them, and with null calls, which return success and do nothing else. What the real driver and NCCL
take comes on top of the latter, and only a GPU can tell. One rank, so nobody waits for a peer.

A step is zero_grad, forward and backward of parameters with hardly any work; its cost is the median
over rounds of the CPU time of Python's thread less that of a step without communication. So what
DDP waits for Gloo's threads does not count. Contenders take turns in every round, in random order.
A turn makes several calls and keeps the fastest, so that other load on the machine counts little.
Beside each figure stands what was predicted before the first run. Runs from the source tree only.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import bucket_clock, machine, report, tables
from lib.models import TinyParameters
from lib.tables import Bar, Column, Spread, Table, time_cell
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))
try:
    from tests.fakes import stand_ins
except ModuleNotFoundError:  # installed: --help is all there is
    stand_ins = None  # type: ignore[assignment]

GATHER_US, LAUNCH_US = 0.5, 4.0  # what a parameter's gather and a bucket's launch are to take
N_PARAMETERS = 100  # of the bucket
STEP_PARAMETERS = (100, 1000)  # of the models, which are one bucket each, for DDP, too
NUMEL = 8  # of a parameter
CALLS, STEPS = 40, 10  # of a turn, the fastest of which counts
WARM_UP_STEPS = 5  # after which DDP has made its buckets anew
# Written down before the first run. Of a bucket: what was measured by hand. Of null calls: 1 us for
# Python's objects and the GIL, as a stand-in takes 0.5 us or more for each of its calls. Of a step:
# fastcomm's hook 0.6 us, gather 0.2, and launch and wait spread over the parameters; DDP's copy to
# its bucket and back 1 us each, its hook 0.5, and 100 us for Gloo's thread, spread as well.
PREDICTED_US = {
    "gather, gradients of their own": 0.19,
    "gather, views": 0.1,
    "gather, bfloat16 wire": 0.19,
    "launch, gradients of their own": 3.9,
    "launch, views": 3.4,
    "launch, bfloat16 wire": 4.6,
    "null calls, gradients of their own": 1.0,
    "null calls, views": 1.0,
    "null calls, bfloat16 wire": 1.0,
    "fastcomm, step of 100": 1.2,
    "fastcomm, step of 1000": 0.9,
    "ddp, step of 100": 4.0,
    "ddp, step of 1000": 2.6,
    "ddp_views, step of 100": 3.0,
    "ddp_views, step of 1000": 1.6,
}


@dataclass(frozen=True)
class Row:
    """One figure in microseconds, and what it was predicted to be."""

    what: str
    per: str
    predicted: float
    quartiles: Spread
    fastest: float
    limit: float | None = None

    @classmethod
    def of(cls, what: str, per: str, samples: Sequence[float], limit: float | None = None) -> Row:
        spread = Spread.quartiles(samples).rounded()
        return cls(what, per, PREDICTED_US[what], spread, round(min(samples), 3), limit)

    def bars(self) -> list[Bar]:
        if self.limit is None:
            return []
        median = self.quartiles.middle
        what = f"{self.what}: at most {self.limit:g} us per {self.per}"
        return [Bar(what, f"{median:.2f} us", median <= self.limit)]


def main() -> int:
    options = parse_options()
    if stand_ins is None:
        print("bench/host_cost.py: run it in the source tree", file=sys.stderr)
        return 2
    os.environ.update(stand_ins.environment(stand_ins.without_kernels()))
    stand_ins.loaded("cuda").stand_in_check_order(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=0, world_size=1)
        comm: Any = fastcomm.init(
            "nccl",
            init_method=f"file://{folder}/fastcomm",
            rank=0,
            world_size=1,
            device=torch.device("cpu"),
        )
        with comm, comm.cuda.selected():  # where torch keeps whoever trains
            rows = bucket_rows(comm, options.rounds)
            for n in STEP_PARAMETERS:
                rows += step_rows(comm, n, options.rounds)
        dist.destroy_process_group()
    print_rows(rows)
    write_results(rows, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    return report.parse(parser, rounds=30)


def take_turns(
    contenders: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int
) -> dict[str, list[float]]:
    """What the contenders' turns return, by name, one figure per round."""
    order, chance = list(contenders), random.Random(0)
    samples: dict[str, list[float]] = {}
    gc.collect()
    gc.disable()  # a collection now and then is the price of any Python object
    for _ in report.tracked(range(rounds), "turns"):
        chance.shuffle(order)
        for name in order:
            for what, figure in contenders[name]().items():
                samples.setdefault(what, []).append(figure)
    gc.enable()
    return samples


# ---- one bucket ----------------------------------------------------------------------------------


def bucket_rows(comm: Any, rounds: int) -> list[Row]:
    own, views, narrow = names = "gradients of their own", "views", "bfloat16 wire"
    contenders = {
        own: bucket_turn(own, comm, 1, None, has_views=False),
        views: bucket_turn(views, comm, 2, None, has_views=True),
        narrow: bucket_turn(narrow, comm, 3, torch.bfloat16, has_views=False),
    }
    samples = take_turns(contenders, rounds)
    rows = [
        Row.of(f"gather, {name}", "parameter", samples[f"gather, {name}"], GATHER_US)
        for name in names
    ]
    rows += [
        Row.of(f"{step}, {name}", "bucket", samples[f"{step}, {name}"], LAUNCH_US)
        for step in ("launch", "null calls")
        for name in names
    ]
    return rows


def bucket_turn(
    name: str, comm: Any, label: int, wire_dtype: torch.dtype | None, *, has_views: bool
) -> Callable[[], dict[str, float]]:
    """A turn of a bucket: microseconds of gather, per parameter, of launch, and of launch with null
    calls. Its gradients are tensors of their own each time, as after zero_grad(), or stay views of
    the flat buffer.
    """
    parameters = [Parameter(torch.zeros(NUMEL)) for _ in range(N_PARAMETERS)]
    gradients = [torch.ones(NUMEL) for _ in range(N_PARAMETERS)]
    bucket = bucket_clock.bind(comm, N_PARAMETERS, NUMEL, wire_dtype, label)

    def fastest() -> tuple[float, float]:
        """Microseconds of a gather and of a launch."""
        times = []
        for _ in range(CALLS):
            if not has_views:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            times.append(bucket_clock.time_round(bucket, parameters))
        gathers, launches = zip(*times, strict=True)
        return min(gathers) / 1e3, min(launches) / 1e3

    def turn() -> dict[str, float]:
        gather, launch = fastest()
        with stand_ins.null_calls():
            _, host_launch = fastest()
        return {
            f"gather, {name}": gather / N_PARAMETERS,
            f"launch, {name}": launch,
            f"null calls, {name}": host_launch,
        }

    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    turn()
    return turn


# ---- a whole step --------------------------------------------------------------------------------


def step_rows(comm: Any, n: int, rounds: int) -> list[Row]:
    plain, reduced = TinyParameters(n, NUMEL), TinyParameters(n, NUMEL)
    reducer = fastcomm.Reducer(comm).attach(reduced)
    ways = {
        "local": plain,
        "fastcomm": reduced,
        "ddp": DistributedDataParallel(TinyParameters(n, NUMEL)),
        "ddp_views": DistributedDataParallel(
            TinyParameters(n, NUMEL), gradient_as_bucket_view=True
        ),
    }
    samples = take_turns({way: step_turn(way, model) for way, model in ways.items()}, rounds)
    reducer.detach()
    return [
        Row.of(
            f"{way}, step of {n}",
            "parameter",
            [(a - b) / n for a, b in zip(samples[way], samples["local"], strict=True)],
        )
        for way in ways
        if way != "local"
    ]


def step_turn(way: str, model: nn.Module) -> Callable[[], dict[str, float]]:
    def step() -> None:
        model.zero_grad()
        model().backward()

    def turn() -> dict[str, float]:
        return {way: min(cpu_time(step) for _ in range(STEPS)) / 1e3}

    for _ in range(WARM_UP_STEPS):
        step()
    return turn


def cpu_time(step: Callable[[], None]) -> int:
    """Nanoseconds of this thread."""
    start = time.thread_time_ns()
    step()
    return time.thread_time_ns() - start


# ---- the report ----------------------------------------------------------------------------------


def shares_of_ddp(rows: Sequence[Row]) -> dict[str, float]:
    """What fastcomm adds to a step, as a share of what DDP adds."""
    medians = {row.what: row.quartiles.middle for row in rows}
    return {
        f"{ddp}, step of {n}": medians[f"fastcomm, step of {n}"] / medians[f"{ddp}, step of {n}"]
        for n in STEP_PARAMETERS
        for ddp in ("ddp", "ddp_views")
    }


def print_rows(rows: Sequence[Row]) -> None:
    print(machine.summary())
    columns = [Column(36, ("what",), "<"), Column(11, ("per",), "<")]
    columns += [Column(16, ("predicted (us)",)), Column(13, ("median (us)",))]
    columns += [Column(12, (f"quartile {n}",)) for n in (1, 3)]
    table = Table([*columns, Column(10, ("fastest",))])
    for row in rows:
        figures = (row.quartiles.low, row.quartiles.high, row.fastest)
        cells = [row.what, row.per, f"{row.predicted:.2f}", time_cell(row.quartiles, 2)]
        table.rows.append([*cells, *(f"{figure:.2f}" for figure in figures)])
    table.print()
    for what, share in shares_of_ddp(rows).items():
        print(f"  fastcomm adds {share:.2f} of what DDP over Gloo adds ({what})")


def write_results(rows: Sequence[Row], options: argparse.Namespace) -> None:
    if any(row.quartiles.is_wide for row in rows):
        print(tables.WIDE_NOTE)
    figures = {
        "parameters": N_PARAMETERS,
        "rounds": options.rounds,
        "rows": [asdict(row) for row in rows],
        "share_of_ddp": report.rounded(shares_of_ddp(rows)),
    }
    report.write_results("host_cost", figures, options)
    bars = [bar for row in rows for bar in row.bars()]
    tables.print_bars(bars)
    print(tables.count_bars(bars))


if __name__ == "__main__":
    sys.exit(main())
