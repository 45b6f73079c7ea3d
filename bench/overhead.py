"""Where the overhead of a training step goes: takes it apart over shared memory, part by part.

    python -m fastcomm bench overhead                             three models, 2 ranks
    python -m fastcomm bench overhead --models conv --rounds 60 --json -

Contestants that each do a little more than the one before take turns, in random order in every
round, and the account is made of the differences between neighbours, paired by round:

    local     a step without communication
    hooks     and autograd calls a hook that does nothing on each parameter
    python    and the whole reducer, over a transport that moves nothing and waits for nobody
    wait      and that transport lets the ranks meet at the end of backward
    fastcomm  and gradients are moved: the Reducer as it is
    ddp       torch's DistributedDataParallel over Gloo; what it adds to local is 100%

A step's time is that of the slowest rank. Beside it stand, per step and of all ranks together, the
CPU's time, instructions and cache misses in user mode (where perf can count them), and page faults.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lib import launch, machine, report, turns
from lib.counters import Counters
from lib.models import CASES, WARM_UP_STEPS, Case
from lib.tables import Column, Spread, Table
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from fastcomm.comm.transport import BoundBucket, BucketWork, Transport

# Every part of the account, and the contestants between which it lies.
PARTS = {
    "autograd calls the hooks": ("local", "hooks"),
    "the reducer's Python": ("hooks", "python"),
    "waiting for the slower rank": ("python", "wait"),
    "moving gradients": ("wait", "fastcomm"),
    "all of fastcomm": ("local", "fastcomm"),
    "all of DDP": ("local", "ddp"),
}
WAYS = ("local", "hooks", "python", "wait", "fastcomm", "ddp")
USUAL_MODELS = ("mlp", "transformer", "conv")


class IdleWork(BucketWork):
    """Of a bucket that is not reduced. wait: for the other ranks, or for nobody."""

    def __init__(self, n: int, wait: Callable[[], object]) -> None:
        self._n, self._wait = n, wait

    def wait(self) -> None:
        self._wait()

    def is_completed(self) -> bool:
        return True

    def present(self) -> list[bool]:
        return [True] * self._n


class IdleBucket(BoundBucket):
    """Takes the gradients as the shared-memory bucket does, and leaves those of some size where
    they lie: it never launches.
    """

    def __init__(self, bucket: BoundBucket, n: int, wait: Callable[[], object]) -> None:
        self._bucket, self._n, self._wait = bucket, n, wait
        self._posted: BucketWork | None = None

    @property
    def posted(self) -> BucketWork | None:
        return self._posted

    def gather(self, parameters: list[Any]) -> list[int]:
        self._posted = None
        return self._bucket.gather(parameters)

    def launch(self, op: str, missing: list[int], step: int = 0, weight: Any = None) -> BucketWork:
        self._posted = IdleWork(self._n, self._wait)
        return self._posted


class IdleTransport:
    """The communicator, but for the reduction of buckets. meets: whether the ranks wait for each
    other at the end of backward, where the reducer waits for the last bucket.
    """

    def __init__(self, comm: Any, meets: bool) -> None:
        self._comm, self._meets = comm, meets
        self._labels: list[int] = []
        self.left_in_backward = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def bind_bucket(self, flat: Any, views: list[Any], *args: Any, **named: Any) -> BoundBucket:
        label = named["label"]
        self._labels.append(label)

        def wait() -> None:
            if self._meets and label == self._labels[-1]:
                self._comm.barrier()

        bucket = self._comm.bind_bucket(flat, views, *args, **named)
        return IdleBucket(bucket, len(views), wait)


Transport.register(IdleTransport)


def main() -> int:
    options = parse_options()
    if "RANK" not in os.environ:
        launch.become_ranks(options.ranks)
    torch.set_num_threads(1)
    counters = Counters()  # first: it counts Gloo's threads as well
    with fastcomm.init("shm") as comm:
        dist.init_process_group("gloo")
        models = {name: measure(comm, CASES[name], counters, options) for name in options.models}
        if comm.rank == 0:
            print(f"\n{machine.summary()}")
            figures = {
                "title": f"A step's overhead, {comm.world_size} ranks",
                "ranks": comm.world_size,
                "models": models,
                "rows": [row for name in models for row in rows_of(name, models[name])],
            }
            report.write_results("overhead", figures, options)
        comm.barrier()
        dist.destroy_process_group()
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    report.add_choices(parser, "--models", CASES, USUAL_MODELS)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="on this machine (2)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each turn (3)")
    return report.parse(parser, rounds=30)


def measure(
    comm: Any, case: Case, counters: Counters, options: argparse.Namespace
) -> dict[str, Any]:
    """Collective. The account of one model; printed by rank 0."""
    steps = make_steps(comm, case)
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    names = list(counters.read())
    times = torch.zeros(options.rounds, len(WAYS), options.steps, dtype=torch.float64)
    counts = torch.zeros(options.rounds, len(WAYS), len(names), dtype=torch.float64)
    order = random.Random(0)
    for number in report.tracked(range(options.rounds), case.description, shown=comm.rank == 0):
        for way in order.sample(WAYS, len(WAYS)):
            i = WAYS.index(way)
            comm.barrier()
            before = counters.read()
            nanoseconds = turns.time_calls(steps[way], options.steps)
            after = counters.read()
            times[number, i] = torch.tensor(nanoseconds, dtype=torch.float64) / 1e6
            counts[number, i] = torch.tensor(
                [(after[name] - before[name]) / options.steps for name in names]
            )
    comm.all_reduce(times, "max")
    comm.all_reduce(counts, "sum")
    del step
    steps.clear()
    gc.collect()
    result = summarise(case, names, times.median(dim=2).values, counts)
    if comm.rank == 0:
        print_result(result)
    return result


def make_steps(comm: Any, case: Case) -> dict[str, Callable[[], None]]:
    """For each way, a function that makes one training step."""
    original, batch = case.make(comm.rank)

    def reduced(over: Any) -> Callable[[], None]:
        model = copy.deepcopy(original)
        reducer = fastcomm.Reducer(over).attach(model)
        step = case.training_step(model, batch)
        step.keep = reducer  # type: ignore[attr-defined]  # a reducer lives as long as its step
        return step

    def hooked() -> Callable[[], None]:
        model = copy.deepcopy(original)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        return case.training_step(model, batch)

    return {
        "local": case.training_step(copy.deepcopy(original), batch),
        "hooks": hooked(),
        "python": reduced(IdleTransport(comm, meets=False)),
        "wait": reduced(IdleTransport(comm, meets=True)),
        "fastcomm": reduced(comm),
        "ddp": case.training_step(DistributedDataParallel(copy.deepcopy(original)), batch),
    }


def summarise(
    case: Case, names: Sequence[str], times: torch.Tensor, counts: torch.Tensor
) -> dict[str, Any]:
    """times: ms [round, way]; counts: [round, way, counter]."""
    model = case.make_model()
    by_round = dict(zip(WAYS, times.T.tolist(), strict=True))
    ddp = report.added(by_round, "local", "ddp")
    parts = {}
    for part, (before, after) in PARTS.items():
        added = Spread.quartiles(report.differences(by_round, before, after)).rounded()
        parts[part] = {
            "ms": added.middle,
            "quartile_1_ms": added.low,
            "quartile_3_ms": added.high,
            "share_of_ddp": round(added.middle / ddp, 3),
        }
        for i, name in enumerate(names):
            by_way = dict(zip(WAYS, counts[:, :, i].T.tolist(), strict=True))
            parts[part][name] = round(report.added(by_way, before, after), 1)
    medians = {way: round(statistics.median(ms), 3) for way, ms in by_round.items()}
    return {
        "model": case.description,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": sum(1 for _ in model.parameters()),
        "median_ms": medians,
        "parts": parts,
    }


def rows_of(name: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As a page shows them."""
    return [{"model": name, "part": part, **figures} for part, figures in result["parts"].items()]


def print_result(result: Mapping[str, Any]) -> None:
    columns = [Column(30, ("part",), "<"), Column(9, ("ms",)), Column(17, ("quartiles",))]
    columns += [Column(13, ("share of DDP",))]
    columns += [Column(10, ("CPU ms",)), Column(16, ("k instructions",))]
    columns += [Column(16, ("k cache misses",)), Column(13, ("page faults",))]
    size = f"{result['parameters'] / 1e6:.1f} M parameters in {result['tensors']} tensors"
    medians = ", ".join(f"{way} {ms:.1f}" for way, ms in result["median_ms"].items())
    table = Table(columns, title=f"\n{result['model']}: {size}\n  steps in ms: {medians}")
    for part, figures in result["parts"].items():
        quartiles = f"{figures['quartile_1_ms']:.2f} to {figures['quartile_3_ms']:.2f}"
        cells = [part, f"{figures['ms']:.2f}", quartiles, f"{figures['share_of_ddp']:.3f}"]
        cells.append(f"{figures['cpu_ms']:.2f}")
        for name in ("instructions", "cache_misses"):
            cells.append(f"{figures[name] / 1e3:.1f}" if name in figures else "")
        table.rows.append([*cells, f"{figures['page_faults']:.0f}"])
    table.print()


if __name__ == "__main__":
    sys.exit(main())
