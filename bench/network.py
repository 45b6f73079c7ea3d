"""Hosts that a limited network joins: an all-reduce between them beside Gloo's; ranks that sync
seldom (LocalSGD, DiLoCo) beside ranks that reduce every gradient; and the loss of each way.

    python -m fastcomm bench network            2 hosts of 2 ranks, 1 Gbit/s, 64 MiB of float32
    python -m fastcomm bench network --hosts 2,1,2 --rate 10gbit --mib 256
    python -m fastcomm bench network --wires bfloat16 int8   these beside Gloo and the backend
    python -m fastcomm bench network syncs      2 hosts of one rank, 100 Mbit/s: time and bytes
    python -m fastcomm bench network losses     after as many tokens, over five seeds
    python -m fastcomm bench network losses --ways every_gradient int8 int8_feedback --steps 100

The hosts are network namespaces that the benchmark makes, for which it needs root's rights, and
takes down again; links are limited by tc's token bucket. Contenders take turns in every round, in
random order. A time is that of the slowest rank. Runs from the source tree only: the hosts are
those of the tests.

Of an all-reduce, "bound" is what the bytes that must cross a link need at its rate, headers not
counted: 2 (h - 1) / h times the buffer between h hosts, each way. A bucket of fastcomm lies in
comm.empty and is launched and waited for as a reducer does it; "backend" is dist.all_reduce of an
ordinary tensor over the torch.distributed backend "fastcomm". Narrow wires are also compared with
bfloat16's, round by round. Before anything is measured, the results are compared with Gloo's.

syncs and losses train the demo's model. A turn of syncs has `every` steps, so every parameter syncs
once in it; bytes are those that the host's interface has sent, headers included. The loss is that
of the parameters at the end, on batches that nobody has trained on: one seed means the same model
and the same batches in every way.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import harness, launch, machine, report, tables
from lib.tables import RATIO, Column, Spread, Table, ratio_cells, time_cell

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
N_EVALUATED = 16  # batches
BUCKET_MB = 0.25  # of training: several of them, as in a larger model


@dataclass(frozen=True)
class Wire:
    """nbytes: of an element. tolerance: the rounding, times the ranks whose values are added."""

    nbytes: float
    tolerance: float
    dtype: torch.dtype | None = None
    error_feedback: bool = False


IN_BLOCKS = 1 + 4 / 256  # bytes, with a scale for each block
WIRES = {
    "float32": Wire(4, 1e-6),
    "bfloat16": Wire(2, 2**-6, torch.bfloat16),
    "int8": Wire(IN_BLOCKS, 2**-6, torch.int8),
    "int8_feedback": Wire(IN_BLOCKS, 2**-6, torch.int8, error_feedback=True),
    "float8": Wire(IN_BLOCKS, 2**-3, torch.float8_e4m3fn),
}
WHOLE = WIRES["float32"]  # what Gloo and the backend send
NAMES = {
    "gloo": "gloo, all ranks",
    **{name: f"hierarchical, {name}" for name in WIRES},
    "backend": 'backend "fastcomm"',
}

Begin = Callable[[fastcomm.Reducer, int], contextlib.AbstractContextManager[Any]]


def _local_sgd(reducer: fastcomm.Reducer, every: int) -> fastcomm.LocalSGD:
    return fastcomm.LocalSGD(reducer, every=every)


def _diloco(reducer: fastcomm.Reducer, every: int) -> fastcomm.DiLoCo:
    return fastcomm.DiLoCo(reducer, torch.optim.SGD, every=every, **OUTER)


# How ranks sync that do not reduce every gradient, and the wire.
SYNCS: dict[str, tuple[str, Begin]] = {
    "local_sgd": ("float32", _local_sgd),
    "diloco": ("float32", _diloco),
    "diloco_bf16": ("bfloat16", _diloco),
}
EVERY_GRADIENT = "every_gradient"
USUAL_WAYS = (EVERY_GRADIENT, *SYNCS)
WAYS = (*USUAL_WAYS, *(name for name in WIRES if name != "float32"))  # of training
WORDS = {
    EVERY_GRADIENT: "every gradient reduced",
    "local_sgd": "LocalSGD",
    "diloco": "DiLoCo",
    "diloco_bf16": "DiLoCo, bfloat16",
}


def main() -> int:
    options = parse_options()
    if harness.is_rank():
        group = "fastcomm" if options.part == "all_reduce" else ""
        with harness.joined(group=group) as comm:
            launch.serve(comm.rank, PARTS[options.part](comm, options))
        return 0
    reason = harness.why_no_network()
    if reason is not None:
        print(f"bench/network.py: {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    n_ranks = sum(options.hosts)
    with harness.started(__file__, n_ranks, hosts=options.hosts, rate=options.rate) as ranks:
        figures = {
            "part": options.part,
            "hosts": options.hosts,
            "rate": options.rate,
            "rounds": options.rounds,
        }
        if options.part == "all_reduce":
            errors = measure_all_reduce(ranks, figures, options)
        else:
            errors = {}
            (add_times if options.part == "syncs" else add_losses)(ranks, figures, options)
    report.write_results("network", figures, options, prefix="# ")
    return report_wrong(errors)


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "part", nargs="?", choices=tuple(PARTS), default="all_reduce", help="(all_reduce)"
    )
    parser.add_argument(
        "--hosts", type=report.hosts, metavar="N,N,...", help="ranks on each host (2,2; else 1,1)"
    )
    parser.add_argument(
        "--rate",
        help="of every link, each way, as tc(8) writes it, in mbit or gbit (1gbit; syncs 100mbit)",
    )
    parser.add_argument(
        "--mib", type=int, default=64, help="size of the buffer, in MiB of float32 (64)"
    )
    report.add_choices(parser, "--wires", WIRES)
    report.add_choices(parser, "--ways", WAYS, USUAL_WAYS)
    parser.add_argument("--every", type=int, default=8, help="steps to a sync (8)")
    parser.add_argument("--layers", type=int, help="of the trained model (syncs 4, losses 2)")
    parser.add_argument("--width", type=int, help="of the trained model (syncs 256, losses 128)")
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--steps", type=int, default=200, help="of a run for the loss (200)")
    options = report.parse(parser, rounds=7)
    if options.mib < 1:
        parser.error("--mib is at least 1")
    if options.ways[0] != EVERY_GRADIENT:
        parser.error(f"--ways: the others are compared with {EVERY_GRADIENT}, which comes first")
    is_syncs, is_all_reduce = options.part == "syncs", options.part == "all_reduce"
    options.hosts = options.hosts or ([2, 2] if is_all_reduce else [1, 1])
    options.rate = options.rate or ("100mbit" if is_syncs else "1gbit")
    options.layers = options.layers or (4 if is_syncs else 2)
    options.width = options.width or (256 if is_syncs else 128)
    return options


# ---- an all-reduce -------------------------------------------------------------------------------


def measure_all_reduce(
    ranks: launch.Ranks, figures: dict[str, Any], options: argparse.Namespace
) -> dict[str, float]:
    """Adds the rows to the figures. Returns how far each way's result is off Gloo's."""
    errors: dict[str, float] = ranks.call("compare")[0]
    samples = harness.slowest(ranks.call("measure"))
    spreads = {name: spread_of(seconds) for name, seconds in samples.items()}
    rows = {
        name: row_of(name, spread, spreads["gloo"], options) | {"relative_error": errors.get(name)}
        for name, spread in spreads.items()
    }
    figures |= {"nbytes": options.mib * 2**20, "rows": rows}
    print(f"# {machine.summary()}")
    print(
        f"# hosts of {', '.join(map(str, options.hosts))} ranks, links of {options.rate}, "
        f"{options.mib} MiB of float32, sum"
    )
    table_of(rows).print()
    if any(spread.is_wide for spread in spreads.values()):
        print(f"# {tables.WIDE_NOTE}")
    add_paired(samples, rows, options)
    return errors


def report_wrong(errors: Mapping[str, float]) -> int:
    """Says which results are not Gloo's; returns the exit status."""
    wrong = {name: far for name, far in errors.items() if not far <= wire_of(name).tolerance}
    for name, far in wrong.items():
        print(
            f"bench/network.py: {name} is {far:.1e} of the largest value off Gloo's sum, and "
            f"{wire_of(name).tolerance:.1e} at most is rounding: its times mean nothing",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def wire_of(contender: str) -> Wire:
    return WIRES.get(contender, WHOLE)


def spread_of(samples: Sequence[float]) -> Spread:
    return Spread(min(samples), statistics.median(samples), max(samples))


def bound(contender: str, options: argparse.Namespace) -> float:
    """The seconds that what must cross a link needs at its rate."""
    n_hosts = len(options.hosts)
    numel = options.mib * 2**20 // 4
    nbytes = float(numel * wire_of(contender).nbytes * 2 * (n_hosts - 1) / n_hosts)
    units = {"gbit": 1e9, "mbit": 1e6}
    return nbytes * 8 / (float(options.rate[:-4]) * units[options.rate[-4:]])


def row_of(
    contender: str, spread: Spread, gloo: Spread, options: argparse.Namespace
) -> dict[str, Any]:
    least = bound(contender, options)
    return {
        "seconds": round(spread.middle, 4),
        "fastest": round(spread.low, 4),
        "slowest": round(spread.high, 4),
        "bound": round(least, 4),
        "gloo/it": round(gloo.middle / spread.middle, 3),
        "gloo/bound": round(gloo.middle / least, 3),
    }


def table_of(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ratio is that of Gloo's time to a row's."""
    columns = [Column(28, ("way",), "<"), Column(12, ("median (s)",)), Column(10, ("fastest",))]
    columns += [Column(10, ("slowest",)), Column(11, ("bound (s)",)), *RATIO]
    columns += [Column(14, ("gloo / bound",)), Column(12, ("error",))]
    table = Table(columns)
    spreads = {
        name: Spread(row["fastest"], row["seconds"], row["slowest"]) for name, row in rows.items()
    }
    for name, row in rows.items():
        error = row["relative_error"]
        cells = [NAMES[name], time_cell(spreads[name], 3)]
        cells += [f"{row[key]:.3f}" for key in ("fastest", "slowest", "bound")]
        cells += ratio_cells(None if name == "gloo" else spreads["gloo"].over(spreads[name]))
        cells += [f"{row['gloo/bound']:.2f}", "" if error is None else f"{error:.1e}"]
        table.rows.append(cells)
    return table


def add_paired(
    samples: Mapping[str, Sequence[float]],
    rows: dict[str, dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """How many times as long the bfloat16 wire takes as narrower ones, round by round; noted in the
    rows, too.
    """
    for contender in options.wires:
        if "bfloat16" in samples and wire_of(contender).nbytes < 2:
            paired = spread_of(harness.ratios(samples, contender, "bfloat16"))
            rows[contender]["bfloat16/it"] = list(paired.rounded())
            allowed = bound("bfloat16", options) / bound(contender, options)
            print(
                f"# {contender} wire: {paired.middle:.2f} times as fast as bfloat16 "
                f"({paired.low:.2f} to {paired.high:.2f}); the link allows {allowed:.2f}"
            )


class AllReduce:
    """What a rank does when it is called. All contenders have the same values to reduce."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        self.options = options
        self.over_gloo = dist.new_group(backend="gloo")
        numel = options.mib * 2**20 // 4
        self.values = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
        self.gloo, self.tensor = self.values.clone(), self.values.clone()
        self.flat = comm.empty(numel, dtype=torch.float32).copy_(self.values)
        self.calls: dict[str, Callable[[], object]] = {
            "gloo": lambda: dist.all_reduce(self.gloo, group=self.over_gloo),
            **{name: self._launch_of(comm, name) for name in options.wires},
            "backend": lambda: dist.all_reduce(self.tensor),
        }

    def _launch_of(self, comm: Any, name: str) -> Callable[[], object]:
        bucket = comm.bind_bucket(
            self.flat,
            [self.flat[:-1]],  # an 8-bit wire carries what is some parameter's
            [0],
            wire_dtype=WIRES[name].dtype,
            label=1 + list(WIRES).index(name),
            error_feedback=WIRES[name].error_feedback,
        )
        return lambda: bucket.launch("sum", []).wait()

    def compare(self) -> dict[str, float]:
        """The largest difference to Gloo's sum, relative to the largest value."""
        self.calls["gloo"]()
        last = self.gloo.numel() - 1  # there a bucket keeps what the ranks tell each other
        errors = {}
        for contender in (*self.options.wires, "backend"):
            result = self.tensor if contender == "backend" else self.flat
            result.copy_(self.values)
            self.calls[contender]()
            errors[contender] = float(
                (result - self.gloo)[:last].abs().max() / self.gloo[:last].abs().max()
            )
        return errors

    def measure(self) -> dict[str, list[float]]:
        """Seconds, by contender and round."""
        for call in self.calls.values():
            self._time(call)  # connections open their windows, memory is touched
        turns = {name: functools.partial(self._time, call) for name, call in self.calls.items()}
        return harness.take_turns(turns, self.options.rounds, self._meet)

    def _meet(self) -> None:
        dist.barrier(group=self.over_gloo)

    def _time(self, call: Callable[[], object]) -> float:
        for tensor in (self.gloo, self.flat, self.tensor):  # sums of sums would soon be infinite
            tensor.copy_(self.values)
        self._meet()
        before = time.perf_counter()
        call()
        return time.perf_counter() - before


# ---- ranks that train ----------------------------------------------------------------------------


def add_times(ranks: launch.Ranks, figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Seconds and bytes of one step."""
    answers = ranks.call("measure")
    seconds = harness.slowest([answer["seconds"] for answer in answers])
    rows: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        nbytes = [
            statistics.mean(turn) for turn in zip(*(a["nbytes"][way] for a in answers), strict=True)
        ]
        rows[way] = {
            "seconds": Spread.quartiles(seconds[way]).rounded(4),
            "nbytes": round(statistics.median(nbytes)),
        }
    figures |= {**trained(options), "parameters": answers[0]["parameters"], "rows": rows}
    print(f"# {machine.summary()}")
    table_of_times(rows).print()


def trained(options: argparse.Namespace) -> dict[str, int]:
    return {"every": options.every, "layers": options.layers, "width": options.width}


def add_losses(ranks: launch.Ranks, figures: dict[str, Any], options: argparse.Namespace) -> None:
    """At the end of a run, by seed."""
    rows: dict[str, dict[str, list[float]]] = {way: {"losses": []} for way in options.ways}
    runs = [(seed, way) for seed in range(options.seeds) for way in options.ways]
    for seed, way in report.tracked(runs, "training"):
        answers = ranks.call("train", way=way, seed=seed)
        rows[way]["losses"].append(round(statistics.mean(answers), 4))
    figures |= {"steps": options.steps, "seeds": options.seeds, **trained(options), "rows": rows}
    print(f"# {machine.summary()}")
    table_of_losses(rows).print()


def words_of(way: str) -> str:
    return WORDS.get(way, f"every gradient, {way}")


def table_of_times(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """What a step takes and sends. Ratios are the time with every gradient reduced over the way's,
    and the bytes of the way over those with every gradient reduced.
    """
    columns = [Column(30, ("way",), "<"), Column(12, ("step (s)",)), *RATIO]
    table = Table([*columns, Column(13, ("MB per step",)), Column(9, ("share",))])
    reduced = rows[EVERY_GRADIENT]
    for way, row in rows.items():
        spread = Spread(*row["seconds"])
        cells = [words_of(way), time_cell(spread, 3)]
        cells += ratio_cells(Spread(*reduced["seconds"]).over(spread))
        cells += [f"{row['nbytes'] / 1e6:.2f}", f"{row['nbytes'] / reduced['nbytes']:.3f}"]
        table.rows.append(cells)
    return table


def table_of_losses(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The loss of each way over the seeds, and how far it is above that with every gradient
    reduced.
    """
    columns = [Column(30, ("way",), "<"), Column(11, ("mean loss",)), Column(9, ("least",))]
    table = Table([*columns, Column(9, ("most",)), Column(30, ("above every gradient, by seed",))])
    losses = {way: row["losses"] for way, row in rows.items()}
    for way, some in losses.items():
        apart = harness.differences(losses, EVERY_GRADIENT, way)
        figures = (statistics.mean(some), min(some), max(some))
        between = f"{min(apart):+.4f} to {max(apart):+.4f}"
        table.rows.append([words_of(way), *(f"{figure:.4f}" for figure in figures), between])
    return table


class Training:
    """What a rank does when it is called."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        corpus, self.gpt, self.demo = map(importlib.import_module, ("corpus", "gpt", "train_gpt"))
        self.comm, self.options = comm, options
        self.text = corpus.standard_library()

    def measure(self) -> dict[str, Any]:
        """Seconds and bytes of a step, by way and round; and how many parameters there are."""
        turns = {way: functools.partial(self._turn, self._loop(way)) for way in self.options.ways}
        for turn in turns.values():
            turn()  # optimizers make their state
        found = harness.take_turns(turns, self.options.rounds, self.comm.barrier)
        seconds, nbytes = (
            {way: [turn[part] for turn in some] for way, some in found.items()} for part in (0, 1)
        )
        numel = sum(p.numel() for p in self._model().parameters())
        return {"seconds": seconds, "nbytes": nbytes, "parameters": numel}

    def train(self, way: str, seed: int) -> float:
        """The loss at the end."""
        model = self._model(seed)
        generator = torch.Generator().manual_seed(1000 * (1 + seed) + self.comm.rank)
        reducer, syncs = self._attach(way, model)
        with syncs, contextlib.redirect_stderr(io.StringIO()):  # no progress bar
            self.demo.train(reducer, model, self.text, generator, self.options.steps)
        reducer.check_in_sync()
        reducer.detach()
        unseen = torch.Generator().manual_seed(9 + self.comm.rank)
        with torch.no_grad():
            losses: list[float] = [
                self.gpt.next_byte_loss(model, self.demo.random_batch(self.text, unseen)).item()
                for _ in range(N_EVALUATED)
            ]
        return statistics.mean(losses)

    def _model(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model: torch.nn.Module = self.gpt.GPT(self.options.layers, self.options.width)
        return model

    def _attach(
        self, way: str, model: torch.nn.Module
    ) -> tuple[fastcomm.Reducer, contextlib.AbstractContextManager[Any]]:
        """A reducer, and what has begun to sync seldom, if the way does."""
        wire = WIRES[SYNCS[way][0] if way in SYNCS else way if way in WIRES else "float32"]
        reducer = fastcomm.Reducer(
            self.comm,
            wire_dtype=wire.dtype,
            error_feedback=wire.error_feedback,
            bucket_cap_mb=BUCKET_MB,
        ).attach(model)
        if way not in SYNCS:
            return reducer, contextlib.nullcontext()
        return reducer, SYNCS[way][1](reducer, self.options.every)

    def _loop(self, way: str) -> Callable[[], None]:
        """A function that makes a step."""
        model = self._model()
        reducer, syncs = self._attach(way, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        batch = self.demo.random_batch(self.text, torch.Generator().manual_seed(self.comm.rank))

        def step() -> None:
            optimizer.zero_grad()
            self.gpt.next_byte_loss(model, batch).backward()
            optimizer.step()

        step.keep = reducer, syncs  # type: ignore[attr-defined]  # they live as long as the step
        return step

    def _turn(self, step: Callable[[], None]) -> tuple[float, float]:
        """Of a step: seconds, and bytes that this host has sent."""
        nbytes, before = harness.sent(), time.perf_counter()
        for _ in range(self.options.every):
            step()
        seconds = time.perf_counter() - before
        self.comm.barrier()
        return seconds / self.options.every, (harness.sent() - nbytes) / self.options.every


PARTS: dict[str, Callable[[Any, argparse.Namespace], object]] = {
    "all_reduce": AllReduce,
    "syncs": Training,
    "losses": Training,
}


if __name__ == "__main__":
    sys.exit(main())
