"""torch.distributed over the backend "fastcomm" and over Gloo, in one run: dist.all_reduce of
ordinary tensors, and DDP's training step.

    python -m fastcomm bench backend                     both, 2 ranks, 1 thread each
    python -m fastcomm bench backend --only all_reduce --rounds 9
    python -m fastcomm bench backend --only ddp --models mlp conv
    python -m fastcomm bench backend --only ddp --bucket-views

The two engines belong to the same processes and take turns, in an order that changes from round to
round. An all-reduce takes what the slowest rank's median call takes, a step what it takes the
slowest rank. The overhead of a step is the median over rounds of (DDP - local), where "local" is
the same step without communication, with all ranks at work. "unreduced" is DDP with a hook that
reduces nothing: what DDP itself takes, for its copies above all, over any backend.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import launch, machine, report, tables, turns
from lib.chart import size_text
from lib.models import CASES, WARM_UP_STEPS
from lib.step_table import steps_table
from lib.tables import RATIO, Column, Table, Times, ratio_cells, time_cell
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import fastcomm  # noqa: F401  (registers the backend)

PEERS = ("fastcomm", "gloo")
WAYS = ("local", "unreduced", *PEERS)
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # bytes: 1 KiB to 64 MiB
# A turn moves about this much, so that small sizes are called often and large ones do not take all
# day.
BYTES_PER_TURN = 64 << 20
CALLS = (3, 300)  # of a turn, at least and at most
WARM_UP_CALLS = 3


def main() -> int:
    options = parse_options()
    if launch.SOCKET_VARIABLE in os.environ:
        serve()
        return 0
    launch.exit_on_sigterm()
    results: dict[str, Any] = {}
    with launch.Ranks(Path(__file__).resolve(), options.ranks) as ranks:
        if options.only != "ddp":
            results["all_reduce"] = measure_all_reduce(ranks, options)
        if options.only != "all_reduce":
            results["ddp"] = {
                name: measure_steps(ranks, name, options)
                for name in report.tracked(options.models, "steps under DDP")
            }
    print_summary(results)
    figures = {"ranks": options.ranks, "bucket_views": options.bucket_views, **results}
    report.write_results("backend", figures, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("--only", choices=("all_reduce", "ddp"), help="measure one of the two")
    report.add_choices(parser, "--models", CASES)
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="number of ranks, on this machine (2)"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps of each turn (3)")
    parser.add_argument(
        "--bucket-views",
        action="store_true",
        help="DDP's gradient_as_bucket_view: gradients are not copied out of their buckets",
    )
    report.add_largest_size(parser, SIZES, "all-reduce")
    return report.parse(parser, rounds=16)


# ---- the parent ----------------------------------------------------------------------------------


def measure_all_reduce(ranks: launch.Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"dist.all_reduce of float32 tensors, sum, {options.ranks} ranks")
    columns = [Column(10, ("size",)), Column(15, ("fastcomm (us)",)), Column(12, ("Gloo (us)",))]
    table = Table([*columns, *RATIO])
    table.print_head()
    rows = []
    for nbytes in report.tracked([size for size in SIZES if size <= options.e], "all-reduce"):
        samples = slowest(ranks.call("all_reduce", nbytes=nbytes, rounds=options.rounds), PEERS)
        times = Times.of({peer: [1e6 * s for s in of] for peer, of in samples.items()})
        rows.append(
            {
                "bytes": nbytes,
                **{f"{peer}_us": round(times.median(peer), 2) for peer in PEERS},
                "quartiles_us": {
                    peer: [round(spread.low, 2), round(spread.high, 2)]
                    for peer, spread in times.spreads.items()
                },
                "ratio": round(times.ratio("gloo", "fastcomm"), 2),
                "wide": times.wide(),
            }
        )
        own, gloo = (times.spreads[peer] for peer in PEERS)
        cells = [size_text(nbytes), time_cell(own, 1), time_cell(gloo, 1)]
        table.print_row([*cells, *ratio_cells(gloo.over(own))])
    return rows


def measure_steps(ranks: launch.Ranks, name: str, options: argparse.Namespace) -> dict[str, Any]:
    answers = ranks.call(
        "steps",
        model=name,
        rounds=options.rounds,
        steps=options.steps,
        bucket_views=options.bucket_views,
    )
    seconds = slowest(answers, WAYS)
    samples = {way: [1e3 * s for s in turn] for way, turn in seconds.items()}
    times, overhead = Times.of(samples), report.overheads(samples, "local")
    share = overhead["fastcomm"] / overhead["gloo"]
    floor = overhead["unreduced"] / overhead["gloo"]
    result = {
        "model": CASES[name].description,
        "quartiles_ms": times.rounded(),
        "overhead_ms": report.rounded(overhead),
        "share_of_gloo": round(share, 3),
        "unreduced_share": round(floor, 3),
        "wide": times.wide(),
    }
    print()
    steps_table(result, f"{CASES[name].description}: a step under DDP").print()
    print(
        f"  the overhead over fastcomm is {share:.2f} of that over Gloo; that of DDP itself, "
        f"without any reduction, {floor:.2f}",
        flush=True,
    )
    return result


def slowest(answers: list[list[list[float]]], ways: tuple[str, ...]) -> dict[str, list[float]]:
    """answers: seconds by rank, round and way. Returns by way those of the slowest rank in each
    round.
    """
    rounds = turns.slowest(answers)
    return {way: [seconds[i] for seconds in rounds] for i, way in enumerate(ways)}


def print_summary(results: dict[str, Any]) -> None:
    """What was measured, in a few lines."""
    rows, steps = results.get("all_reduce", []), results.get("ddp", {})
    print()
    if rows:
        ratios = [f"{row['ratio']:.1f} at {row['bytes'] >> 10} KiB" for row in rows]
        print(f"dist.all_reduce, times as fast as Gloo: {', '.join(ratios)}")
    if steps:
        shares = [f"{result['share_of_gloo']:.2f} ({name})" for name, result in steps.items()]
        print(f"DDP's overhead, as a share of that over Gloo: {', '.join(shares)}")
    if any(figures["wide"] for figures in (*rows, *steps.values())):
        print(tables.WIDE_NOTE)
    print(f"\n{machine.summary()}")


# ---- a rank --------------------------------------------------------------------------------------


class Methods:
    """What the parent calls, on all ranks at once. Answers are seconds by round and way."""

    def __init__(self, rank: int, groups: dict[str, Any]) -> None:
        self.rank = rank
        self.groups = groups

    def all_reduce(self, nbytes: int, rounds: int) -> list[list[float]]:
        tensors = {peer: torch.ones(nbytes // 4) for peer in PEERS}
        for peer, tensor in tensors.items():
            dist.all_reduce(tensor, group=self.groups[peer])
            if not bool((tensor == dist.get_world_size()).all()):
                raise RuntimeError(f"all_reduce of {nbytes} bytes over {peer} gives a wrong sum")
            tensor.zero_()  # what is added again and again stays finite
        n_calls = max(CALLS[0], min(CALLS[1], BYTES_PER_TURN // nbytes))

        def turn(peer: str) -> float:
            call = functools.partial(dist.all_reduce, tensors[peer], group=self.groups[peer])
            for _ in range(WARM_UP_CALLS):
                call()
            return statistics.median(turns.time_calls(call, n_calls)) / 1e9

        return self.take_turns({peer: functools.partial(turn, peer) for peer in PEERS}, rounds)

    def steps(self, model: str, rounds: int, steps: int, bucket_views: bool) -> list[list[float]]:
        case = CASES[model]
        original, batch = case.make(self.rank)

        def prepare(way: str) -> Callable[[], None]:
            model = copy.deepcopy(original)
            if way != "local":
                model = self.ddp(model, way, bucket_views)
            step = case.training_step(model, batch)
            for _ in range(WARM_UP_STEPS):
                step()
            return step

        def turn(step: Callable[[], None]) -> float:
            return statistics.median(turns.time_calls(step, steps)) / 1e9

        return self.take_turns({way: functools.partial(turn, prepare(way)) for way in WAYS}, rounds)

    def ddp(self, model: nn.Module, way: str, bucket_views: bool) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            model,
            process_group=self.groups.get(way, dist.group.WORLD),
            gradient_as_bucket_view=bucket_views,
        )
        if way == "unreduced":
            ddp.register_comm_hook(None, noop_hook)
        return ddp

    def take_turns(
        self, contenders: Mapping[str, Callable[[], float]], rounds: int
    ) -> list[list[float]]:
        names = list(contenders)
        seconds = []
        for number in range(rounds):
            gc.collect()
            gc.disable()
            row = {}
            for name in turns.order_of(names, number):
                dist.barrier()
                row[name] = contenders[name]()
            gc.enable()
            seconds.append([row[name] for name in names])
        return seconds


def serve() -> None:
    launch.die_with_parent()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "fastcomm", init_method=f"file://{launch.scratch()}/ranks", rank=rank, world_size=world_size
    )
    groups = {"fastcomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    launch.serve(rank, Methods(rank, groups))
    gc.collect()  # models go before their groups do
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
