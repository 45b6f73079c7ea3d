"""Ranks that sync seldom (LocalSGD, DiLoCo) beside ranks that reduce every gradient: what they send
and how long a step takes over a slow link, and the loss after as many tokens.

    python -m fastcomm bench syncs                2 hosts, a link of 100 Mbit/s
    python -m fastcomm bench syncs --rate 1gbit --every 16
    python -m fastcomm bench syncs losses         of a smaller model, over five seeds

Two hosts of one rank each train the demo's model; they are network namespaces, for which the
benchmark needs root's rights, and their link is limited by tc's token bucket. Ways take turns in
every round, in random order. A turn has `every` steps, so every parameter syncs once in it. A time
is that of the slowest rank; bytes are those that the host's interface has sent, headers included.

The loss is that of the parameters at the end, on batches that nobody has trained on: one seed means
the same model and the same batches in every way. Runs from the source tree only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lib import launch, machine, report
from lib.tables import RATIO, Column, Spread, Table, time_cell

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
try:
    from tests.support import namespaces
except ModuleNotFoundError:  # installed: --help is all there is
    namespaces = None  # type: ignore[assignment]

PORT = 29500  # in namespaces of our own every port is free
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
N_EVALUATED = 16  # batches
BUCKET_MB = 0.25  # several of them, as in a larger model
Begin = Callable[[fastcomm.Reducer, int], contextlib.AbstractContextManager[Any]]


def _local_sgd(reducer: fastcomm.Reducer, every: int) -> fastcomm.LocalSGD:
    return fastcomm.LocalSGD(reducer, every=every)


def _diloco(reducer: fastcomm.Reducer, every: int) -> fastcomm.DiLoCo:
    return fastcomm.DiLoCo(reducer, torch.optim.SGD, every=every, **OUTER)


# By name: the wire, and how ranks sync.
WAYS: dict[str, tuple[torch.dtype | None, Begin]] = {
    "every_gradient": (None, lambda reducer, every: contextlib.nullcontext()),
    "local_sgd": (None, _local_sgd),
    "diloco": (None, _diloco),
    "diloco_bf16": (torch.bfloat16, _diloco),
}

NAMES = {
    "every_gradient": "every gradient reduced",
    "local_sgd": "LocalSGD",
    "diloco": "DiLoCo",
    "diloco_bf16": "DiLoCo, bfloat16",
}


def main() -> int:
    options = parse_options()
    reason = namespaces.why_not() if namespaces else "run it in the source tree"
    if reason is not None:
        print(f"bench/syncs.py: {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    figures: dict[str, Any] = {"every": options.every, "rows": {way: {} for way in WAYS}}
    if options.part == "times":
        add_times(figures, options)
    else:
        add_losses(figures, options)
    print(f"# {machine.summary()}")
    (table_of_times if options.part == "times" else table_of_losses)(figures["rows"]).print()
    report.write_results("syncs", figures, options, prefix="# ")
    return 0


def table_of_times(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """What a step takes and sends. Ratios are the time with every gradient reduced over the way's,
    and the bytes of the way over those with every gradient reduced.
    """
    columns = [Column(28, ("way",), "<"), Column(12, ("step (s)",)), *RATIO]
    table = Table([*columns, Column(13, ("MB per step",)), Column(9, ("share",))])
    reduced = rows["every_gradient"]
    for way, row in rows.items():
        spread = Spread(*row["seconds"])
        ratio = Spread(*reduced["seconds"]).over(spread)
        table.rows.append(
            [
                NAMES[way],
                time_cell(spread, 3),
                *(f"{value:.2f}" for value in (ratio.middle, ratio.low, ratio.high)),
                f"{row['nbytes'] / 1e6:.2f}",
                f"{row['nbytes'] / reduced['nbytes']:.3f}",
            ]
        )
    return table


def table_of_losses(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The loss of each way over the seeds, and how far it is above that with every gradient
    reduced.
    """
    columns = [Column(28, ("way",), "<"), Column(11, ("mean loss",)), Column(9, ("least",))]
    table = Table([*columns, Column(9, ("most",)), Column(30, ("above every gradient, by seed",))])
    for way, row in rows.items():
        some = row["losses"]
        pairs = zip(some, rows["every_gradient"]["losses"], strict=True)
        apart = [its - theirs for its, theirs in pairs]
        figures = (sum(some) / len(some), min(some), max(some))
        between = f"{min(apart):+.3f} to {max(apart):+.3f}"
        table.rows.append([NAMES[way], *(f"{figure:.3f}" for figure in figures), between])
    return table


def add_times(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Seconds and bytes of one step."""
    with namespaces.Hosts([1, 1], rate=options.rate) as hosts:
        places = [
            [hosts.namespace(rank), hosts.address(0), hosts.environment(rank)] for rank in range(2)
        ]
        arguments = ["--as-rank", json.dumps(places)]
        with launch.Ranks(Path(__file__).resolve(), 2, arguments=arguments) as ranks:
            turns, facts = measure(ranks, options)
    figures |= {"rate": options.rate, "rounds": options.rounds, **facts}
    for way, some in turns.items():
        figures["rows"][way] |= {
            "seconds": Spread.quartiles([seconds for seconds, _ in some]).rounded(4),
            "nbytes": round(statistics.median(nbytes for _, nbytes in some)),
        }


def add_losses(figures: dict[str, Any], options: argparse.Namespace) -> None:
    """At the end of a run, by seed. On this host: a link makes no difference to them."""
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    arguments = ["--as-rank", "null"]
    with launch.Ranks(Path(__file__).resolve(), 2, arguments=arguments) as ranks:
        runs = [(seed, way) for seed in range(options.seeds) for way in WAYS]
        for seed, way in report.tracked(runs, "training"):
            answers = ranks.call(
                "train", way=way, seed=seed, steps=options.steps, every=options.every
            )
            losses[way].append(round(statistics.mean(answers), 4))
    figures |= {"steps": options.steps, "seeds": options.seeds}
    for way, some in losses.items():
        figures["rows"][way]["losses"] = some


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "part", nargs="?", choices=("times", "losses"), default="times", help="(times)"
    )
    parser.add_argument("--rate", default="100mbit", help="of every link, each way (100mbit)")
    parser.add_argument("--every", type=int, default=8, help="steps to a sync (8)")
    parser.add_argument("--layers", type=int, default=4, help="of the timed model (4)")
    parser.add_argument("--width", type=int, default=256, help="of the timed model (256)")
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--steps", type=int, default=200, help="of a run for the loss (200)")
    return report.parse(parser, rounds=5)


def measure(
    ranks: launch.Ranks, options: argparse.Namespace
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, Any]]:
    """Seconds and bytes of one step, by way and round; and what was trained."""
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    facts = ranks.call("begin", layers=options.layers, width=options.width, every=options.every)[0]
    for way in WAYS:
        ranks.call("turn", way=way, steps=options.every)  # optimizers make their state
    for _ in report.tracked(range(options.rounds), "steps"):
        for way in random.sample(list(WAYS), len(WAYS)):
            answers = ranks.call("turn", way=way, steps=options.every)
            seconds, nbytes = max(s for s, _ in answers), statistics.mean(n for _, n in answers)
            turns[way].append((seconds / options.every, nbytes / options.every))
    return turns, facts


# -- the ranks -------------------------------------------------------------------------------------


class Methods:
    """What a rank does when it is called."""

    def __init__(self, rank: int, init_method: str) -> None:
        corpus, self.gpt, self.demo = map(importlib.import_module, ("corpus", "gpt", "train_gpt"))
        self.comm = fastcomm.init("hierarchical", init_method=init_method, rank=rank, world_size=2)
        self.text = corpus.standard_library()
        self.loops: dict[str, Callable[[], None]] = {}

    def begin(self, layers: int, width: int, every: int) -> dict[str, Any]:
        """Makes a model for each way. Returns what is trained."""
        for way in WAYS:
            model = self._model(layers, width)
            self.loops[way] = self._loop(way, model, every)
        numel = sum(p.numel() for p in model.parameters())
        return {"layers": layers, "width": width, "parameters": numel}

    def _model(self, layers: int, width: int, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model: torch.nn.Module = self.gpt.GPT(layers, width)
        return model

    def _loop(self, way: str, model: torch.nn.Module, every: int) -> Callable[[], None]:
        """A function that makes a step."""
        wire_dtype, begin = WAYS[way]
        reducer = self._reducer(wire_dtype).attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        begin(reducer, every)
        batch = self.demo.random_batch(self.text, torch.Generator().manual_seed(self.comm.rank))

        def step() -> None:
            optimizer.zero_grad()
            self.gpt.next_byte_loss(model, batch).backward()
            optimizer.step()

        return step

    def _reducer(self, wire_dtype: torch.dtype | None) -> fastcomm.Reducer:
        return fastcomm.Reducer(self.comm, wire_dtype=wire_dtype, bucket_cap_mb=BUCKET_MB)

    def turn(self, way: str, steps: int) -> tuple[float, int]:
        """Seconds, and bytes that this host has sent."""
        self.comm.barrier()
        nbytes, before = sent(), time.perf_counter()
        for _ in range(steps):
            self.loops[way]()
        seconds = time.perf_counter() - before
        self.comm.barrier()
        return seconds, sent() - nbytes

    def train(self, way: str, seed: int, steps: int, every: int) -> float:
        """The loss at the end."""
        wire_dtype, begin = WAYS[way]
        model = self._model(2, 128, seed)
        generator = torch.Generator().manual_seed(1000 * (1 + seed) + self.comm.rank)
        reducer = self._reducer(wire_dtype).attach(model)
        with begin(reducer, every), contextlib.redirect_stderr(io.StringIO()):  # no progress bar
            self.demo.train(reducer, model, self.text, generator, steps)
        reducer.check_in_sync()
        reducer.detach()
        unseen = torch.Generator().manual_seed(9 + self.comm.rank)
        with torch.no_grad():
            losses: list[float] = [
                self.gpt.next_byte_loss(model, self.demo.random_batch(self.text, unseen)).item()
                for _ in range(N_EVALUATED)
            ]
        return statistics.mean(losses)


def sent() -> int:
    """Bytes that have left this network namespace's interface so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == namespaces.INTERFACE:
            return int(figures.split()[8])
    return 0


def run_rank(places: list[Any] | None) -> None:
    launch.die_with_parent()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if places is None:  # on this host, whose ranks take each other for those of two
        os.environ |= {"FASTCOMM_HOST_ID": f"host {rank}", "GLOO_SOCKET_IFNAME": "lo"}
        launch.serve(rank, Methods(rank, f"file://{launch.scratch()}/ranks"))
        return
    namespace, address, environment = places[rank]
    namespaces.enter(namespace)
    os.environ.update(environment)
    launch.serve(rank, Methods(rank, f"tcp://{address}:{PORT}"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
