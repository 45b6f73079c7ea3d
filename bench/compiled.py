"""Whether backward and communication of a compiled model overlap, and what cutting its graphs
costs: two ranks over shared memory, two hosts of one rank, or a rank for each GPU.

    python -m fastcomm bench compiled                         GPT-2 small and a conv net
    python -m fastcomm bench compiled --models conv --backend aot_eager --rounds 4 --json -
    python -m fastcomm bench compiled --rate 1gbit --models transformer conv
    python -m fastcomm bench compiled --device cuda           BERT-base, over NCCL

Six ways to make a step take turns, in random order in every round:

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

On a GPU a time is what passes between two events around the steps of a turn; when buckets are
launched is the host's time.

With --rate, hosts are network namespaces, for which the benchmark needs root's rights, joined by
links of that rate; it runs from the source tree only then.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lib import cuda_clock, harness, launch, machine, report
from lib.models import CASES, CUDA_CASES, WARM_UP_STEPS, Case
from lib.tables import Column, Table
from torch import Tensor

import fastcomm

# Each way that communicates, by the same graphs without communication.
LOCAL = {
    "eager": "local",
    "whole": "whole local",
    "pieces": "pieces local",
}


def main() -> int:
    options = parse_options()
    if harness.is_rank():
        with harness.joined(options.device) as comm:
            launch.serve(comm.rank, Methods(comm, options))
        return 0
    if options.rate and (why_not := harness.why_no_network()):
        print(f"bench/compiled.py: {why_not}", file=sys.stderr)
        return 2
    if options.device == "cuda" and (why_not := cuda_clock.why_not()):
        print(f"bench/compiled.py --device cuda needs a GPU, and {why_not}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    rows = []
    hosts = [1] * options.ranks if options.rate else ()
    network = {"hosts": hosts, "rate": options.rate}
    with harness.started(__file__, options.ranks, **network) as ranks:
        for name in options.models:
            rows += measure(ranks, name, options)
    print(f"\n{machine.summary()}")
    print_rows(rows)
    print(headline_of(rows))
    figures = {
        "title": f"Compiled models, {options.ranks} ranks",
        "device": options.device,
        "rate": options.rate,
        "ranks": options.ranks,
        "backend": options.backend,
        "rows": rows,
    }
    report.write_results("compiled", figures, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(CASES | CUDA_CASES),
        metavar="MODEL",
        help=f"of {', '.join(CASES)} (gpt2 conv); on a GPU of {', '.join(CUDA_CASES)} (bert)",
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile (inductor)")
    parser.add_argument("--ranks", type=int, metavar="N", help="or hosts (2; on GPUs all)")
    parser.add_argument("--rate", help="of the hosts' links, as tc(8) writes it; without: one host")
    parser.add_argument("--steps", type=int, default=2, help="steps of each turn (2)")
    options = report.parse(parser, rounds=12)
    is_cuda = options.device == "cuda"
    options.ranks = options.ranks or (cuda_clock.device_count() if is_cuda else 2)
    options.models = options.models or (("bert",) if is_cuda else ("gpt2", "conv"))
    unknown = [name for name in options.models if name not in cases_of(options.device)]
    if unknown or (is_cuda and options.rate):
        what = f"no model {unknown[0]}" if unknown else "no --rate"
        sys.exit(f"bench/compiled.py: there is {what} with --device {options.device}")
    return options


def cases_of(device: str) -> Mapping[str, Case]:
    return CUDA_CASES if device == "cuda" else CASES


def measure(ranks: launch.Ranks, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One model's rows."""
    ranks.call("begin", model=name)
    found = ranks.call("look")[0]
    samples = harness.slowest(ranks.call("measure"))
    ranks.call("end")
    return [row_of(name, way, samples, found[way]) for way in LOCAL]


class Methods:
    """What a rank does when the parent calls; all ranks are called together."""

    def __init__(self, comm: fastcomm.Communicator, options: argparse.Namespace) -> None:
        self._comm, self._options = comm, options

    def begin(self, model: str) -> None:
        """Makes the model, and compiles it in all ways."""
        torch._dynamo.reset()  # torch compiles so many models at most, and the rest stay eager
        comm, backend = self._comm, self._options.backend
        self._case = cases_of(self._options.device)[model]
        alone, batch = self._case.make(comm.rank)
        alone, self._batch = alone.to(comm.device), batch.to(comm.device)
        attached = copy.deepcopy(alone)
        planner = fastcomm.Reducer(comm).attach(alone)  # for the cuts alone
        self._reducer = reducer = fastcomm.Reducer(comm).attach(attached)
        self._forwards = {
            "local": alone,
            "whole local": torch.compile(alone, backend=backend),
            "pieces local": planner.compile(alone, backend=backend),
            "eager": attached,
            "whole": torch.compile(attached, backend=backend),
            "pieces": reducer.compile(attached, backend=backend),
        }
        for forward in self._forwards.values():
            # one rank may compile for longer than another, and than a collective waits
            with planner.no_sync(), reducer.no_sync():
                self._case.loss(forward, self._batch).backward()
            forward.zero_grad()
            comm.barrier()
        planner.detach()

    def look(self) -> dict[str, dict[str, float]]:
        """By way: when buckets are launched, and how far gradients are from eager's."""
        eager = self._gradients("eager")
        norm = _norm(eager)
        found = {}
        for way in LOCAL:
            off = [a - b for a, b in zip(self._gradients(way), eager, strict=True)]
            first, launched = self._launches(way)
            found[way] = {
                "first_launch": round(min(first, 1.0), 3),
                "launched_early": round(launched, 3),
                "off_eager": float(f"{_norm(off) / norm:.2e}"),
            }
        return found

    def _gradients(self, way: str) -> list[Tensor]:
        forward = self._forwards[way]
        self._case.loss(forward, self._batch).backward()
        found = [p.grad.clone() for p in forward.parameters() if p.grad is not None]
        forward.zero_grad()
        return found

    def _launches(self, way: str, n: int = 5) -> tuple[float, float]:
        """Medians: which part of the backward is over at the first launch, and which part of the
        buckets has been launched when the last gradient is ready.
        """
        first, launched = [], []
        with self._reducer.timeline() as timeline:
            for _ in range(n):
                loss = self._case.loss(self._forwards[way], self._batch)
                begin = time.monotonic_ns()
                loss.backward()
                step = timeline.steps()[-1]
                last = max(step.ready)
                first.append((step.buckets[0].launch - begin) / (last - begin))
                launched.append(statistics.mean(one.launched < last for one in step.buckets))
                self._forwards[way].zero_grad()
        return statistics.median(first), statistics.median(launched)

    def measure(self) -> dict[str, list[float]]:
        """What a step takes, in ms, by way and round."""
        alone, attached = (
            torch.optim.SGD(self._forwards[way].parameters(), lr=1e-4) for way in ("local", "eager")
        )
        steps = {
            way: self._case.training_step(forward, self._batch, attached if way in LOCAL else alone)
            for way, forward in self._forwards.items()
        }
        for step in steps.values():
            for _ in range(WARM_UP_STEPS):
                step()
        turns = {way: functools.partial(self._time, step) for way, step in steps.items()}
        return harness.take_turns(turns, self._options.rounds, self._comm.barrier)

    def _time(self, step: Callable[[], None]) -> float:
        if self._comm.device.type == "cuda":
            return cuda_clock.microseconds_of(step, self._options.steps) / 1e3
        return statistics.median(harness.time_calls(step, self._options.steps)) / 1e6

    def end(self) -> None:
        self._reducer.detach()


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def row_of(
    name: str, way: str, samples: Mapping[str, Sequence[float]], found: Mapping[str, float]
) -> dict[str, Any]:
    """samples: ms of a step, by way and round."""
    local_ms = statistics.median(samples[LOCAL[way]])
    added_ms = statistics.median(harness.differences(samples, LOCAL[way], way))
    return {
        "model": name,
        "way": way,
        "local_ms": round(local_ms, 2),
        "added_ms": round(added_ms, 2),
        "added_share": round(added_ms / local_ms, 4),
        # paired, as a drift of the machine meets all ways of a round
        "over_whole": round(statistics.median(harness.ratios(samples, "whole", way)), 4),
        **found,
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [Column(12, ("model",), "<"), Column(8, ("way",), "<")]
    columns += [Column(12, ("local (ms)",)), Column(12, ("added (ms)",)), Column(8, ("share",))]
    columns += [Column(13, ("step / whole",)), Column(14, ("first launch",))]
    table = Table([*columns, Column(16, ("launched early",)), Column(12, ("off eager",))])
    for row in rows:
        cells = [row["model"], row["way"], f"{row['local_ms']:.1f}", f"{row['added_ms']:+.2f}"]
        shares = ("added_share", "over_whole", "first_launch", "launched_early")
        cells += [f"{row[key]:.3f}" for key in shares]
        table.rows.append([*cells, f"{row['off_eager']:.1e}"])
    table.print()


def headline_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return "step / whole: " + ", ".join(
        f"{row['model']} {row['way']} {row['over_whole']:.3f}"
        for row in rows
        if row["way"] == "pieces"
    )


if __name__ == "__main__":
    sys.exit(main())
