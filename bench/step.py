"""One training step without communication, with fastcomm, and with torch DDP over Gloo (with and without bucket views), in one run.

    python bench/step.py                       all four models, 2 ranks, 1 thread each
    python bench/step.py --models mlp conv --rounds 30
    python bench/step.py --hook-cost           what the reducer's Python costs per parameter

Every way has a model and an SGD optimizer of its own, and the same batch. The ways take turns; in every round each makes a few steps,
all ranks at once, in an order that changes from round to round. "local" is the step without any communication, with all ranks at work,
so that it meets the same contention for memory. A step's time is that of the slowest rank; the overhead is the median over rounds of
(way - local), so that what slows a whole round does not count.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from models import CASES, Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm

WAYS = ("local", "fastcomm", "ddp", "ddp_views")
RESULTS = Path(__file__).resolve().parent / "results"
# DDP plans its buckets anew after its first step, and the allocator settles.
WARM_UP_STEPS = 3
TINY_PARAMETERS = 2000


def main() -> None:
    options = parse_options()
    if "RANK" not in os.environ:
        launch(options.ranks)
    torch.set_num_threads(1)
    with fastcomm.init() as comm:
        dist.init_process_group("gloo")
        if options.hook_cost:
            report_hook_cost(comm)
        else:
            results = {name: measure(comm, CASES[name], options) for name in options.models}
            if comm.rank == 0:
                write_results(results, comm.world_size, options)
        comm.barrier()
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="MODEL", help=f"of {', '.join(CASES)} (all)"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="number of ranks, on this machine (2)")
    parser.add_argument("--rounds", type=int, default=16, help="rounds, in each of which every way has its turn (16)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each turn (3)")
    parser.add_argument("--hook-cost", action="store_true", help="measure the reducer's Python, not steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results (in the source tree: bench/results/)")
    return parser.parse_args()


def launch(ranks: int) -> None:
    """Becomes torchrun with this script and these arguments."""
    os.environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *sys.argv]
    os.execv(sys.executable, command)


def measure(comm: Any, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Collective. Returns the result of one model; printed by rank 0."""
    steps = make_steps(comm, case)
    for step in steps.values():
        for _ in range(WARM_UP_STEPS):
            step()
    seconds = torch.zeros(options.rounds, len(WAYS), options.steps, dtype=torch.float64)
    for number in range(options.rounds):
        for turn in range(len(WAYS)):
            way = (turn + number) % len(WAYS)
            comm.barrier()
            for i in range(options.steps):
                start = time.perf_counter()
                steps[WAYS[way]]()
                seconds[number, way, i] = time.perf_counter() - start
    comm.all_reduce(seconds, "max")
    steps.clear()
    gc.collect()
    result = summarise(case, seconds.median(dim=2).values)
    if comm.rank == 0:
        print_result(result)
    return result


def make_steps(comm: Any, case: Case) -> dict[str, Callable[[], None]]:
    """For each way, a function that makes one training step."""
    torch.manual_seed(0)
    original = case.make_model()
    torch.manual_seed(1 + comm.rank)
    batch = case.make_batch()

    def training_step(model: nn.Module, keep: object = None) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            case.loss(model, batch).backward()
            optimizer.step()

        step.keep = keep  # type: ignore[attr-defined]
        return step

    reduced = copy.deepcopy(original)
    return {
        "local": training_step(copy.deepcopy(original)),
        "fastcomm": training_step(reduced, fastcomm.Reducer(comm).attach(reduced)),
        "ddp": training_step(DistributedDataParallel(copy.deepcopy(original))),
        "ddp_views": training_step(DistributedDataParallel(copy.deepcopy(original), gradient_as_bucket_view=True)),
    }


def summarise(case: Case, rounds: torch.Tensor) -> dict[str, Any]:
    """rounds: seconds [round, way]."""
    model = case.make_model()
    numels = [p.numel() for p in model.parameters()]
    ms = (1e3 * rounds).T.tolist()
    times = {way: [round(q, 3) for q in statistics.quantiles(ms[i], n=4)] for i, way in enumerate(WAYS)}
    overhead = {way: statistics.median(a - b for a, b in zip(ms[i], ms[0], strict=True)) for i, way in enumerate(WAYS) if way != "local"}
    return {
        "model": case.description,
        "parameters": sum(numels),
        "tensors": len(numels),
        "quartiles_ms": times,
        "overhead_ms": {way: round(value, 3) for way, value in overhead.items()},
        "fastcomm_share_of_ddp_overhead": round(overhead["fastcomm"] / overhead["ddp"], 3),
        "fastcomm_share_of_ddp_views_overhead": round(overhead["fastcomm"] / overhead["ddp_views"], 3),
    }


def print_result(result: dict[str, Any]) -> None:
    print(f"\n{result['model']}: {result['parameters'] / 1e6:.1f} M parameters in {result['tensors']} tensors")
    print(f"  {'':10} {'median':>9} {'quartiles':>20} {'over local':>11}   (ms)")
    for way, (low, middle, high) in result["quartiles_ms"].items():
        over = f"{result['overhead_ms'][way]:11.2f}" if way != "local" else ""
        print(f"  {way:10} {middle:9.2f} {low:9.2f} ..{high:9.2f} {over}")
    share, share_of_views = result["fastcomm_share_of_ddp_overhead"], result["fastcomm_share_of_ddp_views_overhead"]
    print(f"  fastcomm's overhead is {share:.2f} of DDP's, {share_of_views:.2f} of that with bucket views", flush=True)


def write_results(results: dict[str, Any], ranks: int, options: argparse.Namespace) -> None:
    description = machine.describe()
    print(f"\n{machine.summary(description)}")
    path = options.json
    if path is None and RESULTS.is_dir():
        path = RESULTS / f"step-{ranks}ranks.json"
    if path is not None:
        path.write_text(json.dumps({"benchmark": "step", "machine": description, "ranks": ranks, "models": results}, indent=1) + "\n")
        print(f"Results: {os.path.relpath(path)}")


class TinyParameters(nn.Module):
    """Many parameters and hardly any work."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(TINY_PARAMETERS))

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.all)).sum()


def report_hook_cost(comm: Any) -> None:
    """CPU time of zero_grad and backward with the reducer, less that without, per parameter. Python and C++ of torch's hooks included."""
    plain, reduced = TinyParameters(), TinyParameters()
    reducer = fastcomm.Reducer(comm).attach(reduced)
    gc.disable()  # a collection now and then is the price of any Python object, and not the reducer's
    differences = []
    for _ in range(50):
        cost = []
        for model in (plain, reduced):
            comm.barrier()
            start = time.process_time()
            model.zero_grad()
            model().backward()
            cost.append(time.process_time() - start)
        differences.append(1e6 * (cost[1] - cost[0]) / TINY_PARAMETERS)
    gc.enable()
    reducer.detach()
    if comm.rank == 0:
        print(f"{statistics.median(differences):.2f} us per parameter and step, {TINY_PARAMETERS} parameters, {comm.world_size} ranks")


if __name__ == "__main__":
    main()
