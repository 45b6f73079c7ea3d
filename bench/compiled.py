"""Whether backward and communication of a compiled model overlap, and what cutting its graphs
costs: two ranks over shared memory.

    python -m fastcomm bench compiled                         GPT-2 small and a conv net
    python -m fastcomm bench compiled --models conv --backend aot_eager --rounds 4 --json -

Six ways to make a step take turns, in another order in every round:

    local           eager, without communication
    eager           with a Reducer
    whole local     torch.compile(model), without communication
    whole           torch.compile(model), with a Reducer
    pieces local    the graphs of the next, without communication
    pieces          reducer.compile(model): cut where buckets are full

A step's time is that of the slowest rank; what communication adds is the median over rounds of the
difference to the same graphs without it. Beside it: which part of the backward is over when the
first bucket is launched, how many of the buckets have been launched when the last gradient is
ready, and how far gradients are from eager's, as a part of their norm; "whole" is the compiler's
own difference.

Predicted before the first run: of GPT-2 small the head and the last block, a third of the backward,
come before the first bucket is full, eager and in pieces alike; whole, nothing is launched before
the backward is over. Cutting 12 times costs less than 2% of GPT-2's step, where matrix products are
nearly all; the conv net has one bucket of 1.5 MB but for the first one of 1 MB, is cut once, and
loses less than 1%. Over shared memory the ranks' cores do the communication, so overlap gains
little: pieces add to their step what eager adds to its own, within 2% of the step. Gradients in
pieces are as far from eager's as those of one graph.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lib import launch, machine, report, turns
from lib.models import CASES, WARM_UP_STEPS, Case
from lib.tables import Column, Table
from torch import Tensor, nn

import fastcomm

WAYS = ("local", "eager", "whole local", "whole", "pieces local", "pieces")
REDUCED = WAYS[1::2]


def main() -> int:
    options = parse_options()
    if "RANK" not in os.environ:
        launch.become_torchrun(options.ranks)
    torch.set_num_threads(1)
    with fastcomm.init("shm") as comm:
        rows = []
        for name in options.models:
            rows += measure(comm, name, options)
        if comm.rank == 0:
            print(f"\n{machine.summary()}")
            print_rows(rows)
            figures = {
                "title": f"Compiled models, {comm.world_size} ranks",
                "ranks": comm.world_size,
                "backend": options.backend,
                "rows": rows,
            }
            report.write_results("compiled", figures, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    report.add_choices(parser, "--models", CASES, ("gpt2", "conv"))
    parser.add_argument("--backend", default="inductor", help="of torch.compile (inductor)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="on this machine (2)")
    parser.add_argument("--steps", type=int, default=2, help="steps of each turn (2)")
    return report.parse(parser, rounds=12)


def measure(comm: Any, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Collective. One model's rows."""
    case = CASES[name]
    original, batch = case.make(comm.rank)
    alone, attached = original, copy.deepcopy(original)
    reducer = fastcomm.Reducer(comm).attach(attached)
    forwards = make_forwards(comm, case, (alone, attached), reducer, batch, options.backend)
    found = {way: gradients_of(case, forwards[way], attached, batch) for way in REDUCED}
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in (alone, attached)]
    steps = {
        way: case.training_step(forwards[way], batch, optimizers[WAYS.index(way) % 2])
        for way in WAYS
    }
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    launches = {way: launches_of(case, forwards[way], reducer, batch) for way in REDUCED}
    times = torch.zeros(options.rounds, len(WAYS), dtype=torch.float64)
    order = random.Random(0)
    for number in report.tracked(range(options.rounds), case.description, shown=comm.rank == 0):
        for way in order.sample(WAYS, len(WAYS)):
            comm.barrier()
            nanoseconds = turns.time_calls(steps[way], options.steps)
            times[number, WAYS.index(way)] = statistics.median(nanoseconds) / 1e6
    comm.all_reduce(times, "max")
    reducer.detach()
    return [row_of(name, way, times, launches[way], found) for way in REDUCED]


def make_forwards(
    comm: Any,
    case: Case,
    models: tuple[nn.Module, nn.Module],
    reducer: fastcomm.Reducer,
    batch: Tensor,
    backend: str,
) -> dict[str, nn.Module]:
    """Each compiled, and run once. models: without a reducer, and with one."""
    alone, attached = models
    planner = fastcomm.Reducer(comm).attach(alone)  # for the cuts alone
    forwards = {
        "local": alone,
        "eager": attached,
        "whole local": torch.compile(alone, backend=backend),
        "whole": torch.compile(attached, backend=backend),
        "pieces local": planner.compile(alone, backend=backend),
        "pieces": reducer.compile(attached, backend=backend),
    }
    for forward in forwards.values():
        case.loss(forward, batch).backward()
        forward.zero_grad()
        # one rank may compile for longer than another, and than a collective waits
        comm.barrier()
    planner.detach()
    return forwards


def gradients_of(case: Case, forward: nn.Module, model: nn.Module, batch: Tensor) -> list[Tensor]:
    case.loss(forward, batch).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def launches_of(
    case: Case, forward: nn.Module, reducer: fastcomm.Reducer, batch: Tensor, n: int = 5
) -> tuple[float, float]:
    """Medians: which part of the backward is over at the first launch, and which part of the
    buckets has been launched when the last gradient is ready.
    """
    first, launched = [], []
    with reducer.timeline() as timeline:
        for _ in range(n):
            loss = case.loss(forward, batch)
            begin = time.monotonic_ns()
            loss.backward()
            step = timeline.steps()[-1]
            last = max(step.ready)
            first.append((step.buckets[0].launch - begin) / (last - begin))
            launched.append(statistics.mean(one.launched < last for one in step.buckets))
            forward.zero_grad()
    return statistics.median(first), statistics.median(launched)


def row_of(
    name: str,
    way: str,
    times: Tensor,
    launches: tuple[float, float],
    found: Mapping[str, Sequence[Tensor]],
) -> dict[str, Any]:
    """times: ms [round, way]."""
    i = WAYS.index(way)
    local_ms = times[:, i - 1].median().item()
    added_ms = (times[:, i] - times[:, i - 1]).median().item()
    off = [(a - b).norm() for a, b in zip(found[way], found["eager"], strict=True)]
    norm = torch.stack([gradient.norm() for gradient in found["eager"]]).norm()
    return {
        "model": name,
        "way": way,
        "local_ms": round(local_ms, 2),
        "added_ms": round(added_ms, 2),
        "added_share": round(added_ms / local_ms, 4),
        "first_launch": round(min(launches[0], 1.0), 3),
        "launched_early": round(launches[1], 3),
        "off_eager": float(f"{(torch.stack(off).norm() / norm).item():.2e}"),
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [Column(8, ("model",), "<"), Column(8, ("way",), "<")]
    columns += [Column(12, ("local (ms)",)), Column(12, ("added (ms)",)), Column(8, ("share",))]
    columns += [Column(14, ("first launch",)), Column(16, ("launched early",))]
    table = Table([*columns, Column(12, ("off eager",))])
    for row in rows:
        cells = [row["model"], row["way"], f"{row['local_ms']:.1f}", f"{row['added_ms']:+.2f}"]
        cells += [f"{row[key]:.3f}" for key in ("added_share", "first_launch", "launched_early")]
        table.rows.append([*cells, f"{row['off_eager']:.1e}"])
    table.print()


if __name__ == "__main__":
    sys.exit(main())
