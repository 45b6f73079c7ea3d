"""torch.distributed over the backend "fastcomm" and over Gloo, in one run: dist.all_reduce of
ordinary tensors, and DDP's training step.

    python bench/backend.py                              both, 2 ranks, 1 thread each
    python bench/backend.py --only all_reduce --rounds 9
    python bench/backend.py --only ddp --models mlp conv

The two engines belong to the same processes and take turns, in an order that changes from round to
round. An all-reduce takes what the slowest rank's median call takes, a step what it takes the
slowest rank. The overhead of a step is the median over rounds of (DDP - local), where "local" is
the same step without communication, with all ranks at work.
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

import launch
import machine
import torch
import torch.distributed as dist
from models import CASES
from step import WARM_UP_STEPS, turn_on_the_host
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm  # noqa: F401  (registers the backend)

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = ("fastcomm", "gloo")
WAYS = ("local", *PEERS)
SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))  # bytes: 1 KiB to 64 MiB
SMALL, LARGE = 64 << 10, 1 << 20  # bytes: up to the one and from the other on there is a bar
BAR_SMALL, BAR_LARGE = 15.0, 5.0
BAR_STEP = 0.5  # the overhead's share of Gloo's
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
            results["ddp"] = {name: measure_steps(ranks, name, options) for name in options.models}
    print_bars(results)
    write_results(results, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("all_reduce", "ddp"), help="measure one of the two")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(CASES),
        default=tuple(CASES),
        metavar="MODEL",
        help=f"of {', '.join(CASES)} (all)",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="number of ranks, on this machine (2)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=16,
        help="rounds, in each of which every way has its turn (16)",
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps of each turn (3)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write the results (in the source tree: bench/results/)",
    )
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: quartiles need more than one")
    return options


# ---- the parent ----------------------------------------------------------------------------------


def measure_all_reduce(ranks: launch.Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"dist.all_reduce of float32 tensors, sum, {options.ranks} ranks (us)")
    print(f"  {'bytes':>10} {'fastcomm':>10} {'gloo':>10} {'ratio':>7}")
    rows = []
    for nbytes in SIZES:
        turns = slowest(ranks.call("all_reduce", nbytes=nbytes, rounds=options.rounds))
        us = {
            peer: 1e6 * statistics.median(turn[i] for turn in turns) for i, peer in enumerate(PEERS)
        }
        ratio = us["gloo"] / us["fastcomm"]
        rows.append(
            {
                "bytes": nbytes,
                "fastcomm_us": round(us["fastcomm"], 2),
                "gloo_us": round(us["gloo"], 2),
                "ratio": round(ratio, 2),
            }
        )
        print(
            f"  {nbytes:>10} {us['fastcomm']:>10.1f} {us['gloo']:>10.1f} {ratio:>6.1f}x", flush=True
        )
    return rows


def measure_steps(ranks: launch.Ranks, name: str, options: argparse.Namespace) -> dict[str, Any]:
    ms = [
        [1e3 * seconds for seconds in turn]
        for turn in slowest(
            ranks.call("steps", model=name, rounds=options.rounds, steps=options.steps)
        )
    ]
    overhead = {
        way: statistics.median(turn[i] - turn[0] for turn in ms)
        for i, way in enumerate(WAYS)
        if way != "local"
    }
    share = overhead["fastcomm"] / overhead["gloo"]
    print(f"\n{CASES[name].description}: a step with DDP over each backend (ms)")
    for i, way in enumerate(WAYS):
        over = f"{overhead[way]:>9.2f} over local" if way != "local" else ""
        print(f"  {way:10} {statistics.median(turn[i] for turn in ms):>9.2f} {over}")
    print(f"  the overhead over fastcomm is {share:.2f} of that over Gloo", flush=True)
    return {
        "model": CASES[name].description,
        "quartiles_ms": {
            way: [round(q, 3) for q in statistics.quantiles([turn[i] for turn in ms], n=4)]
            for i, way in enumerate(WAYS)
        },
        "overhead_ms": {way: round(value, 3) for way, value in overhead.items()},
        "share_of_gloo": round(share, 3),
    }


def slowest(answers: list[list[list[float]]]) -> list[list[float]]:
    """answers: seconds by rank, round and way. Returns those of the slowest rank by round
    and way.
    """
    return [
        [max(times) for times in zip(*turns, strict=True)] for turns in zip(*answers, strict=True)
    ]


def print_bars(results: dict[str, Any]) -> None:
    bars = [
        (
            row["ratio"] >= bar,
            f"all_reduce of {row['bytes']} bytes: {row['ratio']:.1f} times Gloo's speed (at least "
            f"{bar:g})",
        )
        for row in results.get("all_reduce", ())
        for bar in (
            [BAR_SMALL] if row["bytes"] <= SMALL else [BAR_LARGE] if row["bytes"] >= LARGE else []
        )
    ]
    bars += [
        (
            result["share_of_gloo"] <= BAR_STEP,
            f"DDP, {name}: {result['share_of_gloo']:.2f} of Gloo's overhead (at most {BAR_STEP})",
        )
        for name, result in results.get("ddp", {}).items()
    ]
    print()
    for is_met, text in bars:
        print(f"{'met' if is_met else 'NOT met':>8}  {text}")


def write_results(results: dict[str, Any], options: argparse.Namespace) -> None:
    description = machine.describe()
    print(f"\n{machine.summary(description)}")
    path = options.json
    if path is None and RESULTS.is_dir():
        path = RESULTS / f"backend-{options.ranks}ranks.json"
    if path is not None:
        path.write_text(
            json.dumps(
                {"benchmark": "backend", "machine": description, "ranks": options.ranks, **results},
                indent=1,
            )
            + "\n"
        )
        print(f"Results: {os.path.relpath(path)}")


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
            tensor, group = tensors[peer], self.groups[peer]
            for _ in range(WARM_UP_CALLS):
                dist.all_reduce(tensor, group=group)
            clock, stamps = time.perf_counter, [0.0] * (n_calls + 1)
            stamps[0] = clock()
            for index in range(1, n_calls + 1):
                dist.all_reduce(tensor, group=group)
                stamps[index] = clock()
            return statistics.median(
                end - start for start, end in zip(stamps, stamps[1:], strict=False)
            )

        return self.take_turns({peer: lambda peer=peer: turn(peer) for peer in PEERS}, rounds)

    def steps(self, model: str, rounds: int, steps: int) -> list[list[float]]:
        case = CASES[model]
        torch.manual_seed(0)
        original = case.make_model()
        torch.manual_seed(1 + self.rank)
        batch = case.make_batch()

        def step_of(model: nn.Module) -> Callable[[], None]:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

            def step() -> None:
                optimizer.zero_grad()
                case.loss(model, batch).backward()
                optimizer.step()

            return step

        models = {way: copy.deepcopy(original) for way in WAYS}
        ways = {
            way: step_of(
                model
                if way == "local"
                else DistributedDataParallel(model, process_group=self.groups[way])
            )
            for way, model in models.items()
        }
        for step in ways.values():
            for _ in range(WARM_UP_STEPS):
                step()
        turns = {
            way: lambda step=step: statistics.median(turn_on_the_host(step, steps))
            for way, step in ways.items()
        }  # type: ignore[misc]
        return self.take_turns(turns, rounds)

    def take_turns(self, turns: dict[str, Callable[[], float]], rounds: int) -> list[list[float]]:
        names = list(turns)
        seconds = []
        for number in range(rounds):
            gc.collect()
            gc.disable()
            row = {}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                row[name] = turns[name]()
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
