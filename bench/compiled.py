"""Whether backward and communication of a compiled model overlap, and what cutting its graphs
costs: two ranks over shared memory, two hosts of one rank, or a rank for each GPU.

    python -m fastcomm bench compiled                         GPT-2 small and a conv net
    python -m fastcomm bench compiled --models conv --backend aot_eager --rounds 4 --json -
    python -m fastcomm bench compiled --rate 1gbit --models transformer conv
    python -m fastcomm bench compiled --device cuda           BERT-base, over NCCL

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

On a GPU a time is what passes between two events around the steps of a turn; when buckets are
launched is the host's time.

With --rate, hosts are network namespaces, for which the benchmark needs root's rights, joined by
links of that rate; it runs from the source tree only then.

Predicted before the first run: of GPT-2 small the head and the last block, a third of the backward,
come before the first bucket is full, eager and in pieces alike; whole, nothing is launched before
the backward is over. Cutting 12 times costs less than 2% of GPT-2's step, where matrix products are
nearly all; the conv net has one bucket of 1.5 MB but for the first one of 1 MB, is cut once, and
loses less than 1%. Over shared memory the ranks' cores do the communication, so overlap gains
little: pieces add to their step what eager adds to its own, within 2% of the step. Gradients in
pieces are as far from eager's as those of one graph.

Predicted before the first run at 1 Gbit/s: the transformer, whose bytes take several times as long
as its backward, hides half of its backward in pieces. On one GPU, where NCCL moves nothing: where
the host is the limit, it has 0.1 to 0.2 ms more to do for each piece, 2 to 4 ms of BERT's step;
where the GPU is, the step is 3% longer in pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lib import cuda_clock, launch, machine, report, turns
from lib.models import CASES, CUDA_CASES, WARM_UP_STEPS, Case
from lib.places import enter, places_of
from lib.tables import Column, Table
from torch import Tensor

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))
try:
    from tests.support import namespaces
except ModuleNotFoundError:  # installed: ranks share this machine's memory
    namespaces = None  # type: ignore[assignment]

AS_RANK = "--as-rank"
# Each way that communicates, by the same graphs without communication.
LOCAL = {
    "eager": "local",
    "whole": "whole local",
    "pieces": "pieces local",
}
WAYS = (*dict.fromkeys(LOCAL.values()), *LOCAL)


def main() -> int:
    options = parse_options()
    why_not = options.rate and (namespaces.why_not() if namespaces else "run it in the source tree")
    if why_not:
        print(f"bench/compiled.py: {why_not}", file=sys.stderr)
        return 2
    if options.device == "cuda" and (why_not := cuda_clock.why_not()):
        print(f"bench/compiled.py --device cuda needs a GPU, and {why_not}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    rows = []
    with ranks_of(options) as ranks:
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


@contextlib.contextmanager
def ranks_of(options: argparse.Namespace) -> Iterator[launch.Ranks]:
    n = options.ranks
    with contextlib.ExitStack() as stack:
        places: list[list[Any]] = []
        if options.rate is not None:
            hosts = stack.enter_context(namespaces.Hosts([1] * n, rate=options.rate))
            places = places_of(hosts)
        arguments = [AS_RANK, options.device, json.dumps(places)]
        yield stack.enter_context(launch.Ranks(Path(__file__).resolve(), n, arguments=arguments))


def measure(ranks: launch.Ranks, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One model's rows."""
    ranks.call("begin", model=name, backend=options.backend)
    found = ranks.call("look")[0]
    ranks.call("warm_up")
    rounds = []
    order = random.Random(0)
    for _ in report.tracked(range(options.rounds), cases_of(options.device)[name].description):
        slowest = {}
        for way in order.sample(WAYS, len(WAYS)):
            slowest[way] = max(ranks.call("time_steps", way=way, n=options.steps))
        rounds.append(slowest)
    ranks.call("end")
    return [row_of(name, way, rounds, found[way]) for way in LOCAL]


class Methods:
    """What a rank does when the parent calls; all ranks are called together."""

    def __init__(self, comm: fastcomm.Communicator) -> None:
        self._comm, self._is_cuda = comm, comm.device.type == "cuda"

    def begin(self, model: str, backend: str) -> None:
        """Makes the model, and compiles it in all ways."""
        torch._dynamo.reset()  # torch compiles so many models at most, and the rest stay eager
        comm = self._comm
        self._case = cases_of(comm.device.type)[model]
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

    def warm_up(self) -> None:
        alone, attached = (
            torch.optim.SGD(self._forwards[way].parameters(), lr=1e-4) for way in ("local", "eager")
        )
        self._steps = {
            way: self._case.training_step(forward, self._batch, attached if way in LOCAL else alone)
            for way, forward in self._forwards.items()
        }
        for step in self._steps.values():
            for _ in range(WARM_UP_STEPS):
                step()

    def time_steps(self, way: str, n: int) -> float:
        """What a step takes, of n, in ms."""
        self._comm.barrier()
        if self._is_cuda:
            return cuda_clock.microseconds_of(self._steps[way], n) / 1e3
        return statistics.median(turns.time_calls(self._steps[way], n)) / 1e6

    def end(self) -> None:
        self._reducer.detach()


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def row_of(
    name: str, way: str, rounds: Sequence[Mapping[str, float]], found: Mapping[str, float]
) -> dict[str, Any]:
    """rounds: ms of each way's step."""
    local_ms = statistics.median(one[LOCAL[way]] for one in rounds)
    added_ms = statistics.median(one[way] - one[LOCAL[way]] for one in rounds)
    return {
        "model": name,
        "way": way,
        "local_ms": round(local_ms, 2),
        "added_ms": round(added_ms, 2),
        "added_share": round(added_ms / local_ms, 4),
        # paired, as a drift of the machine meets all ways of a round
        "over_whole": round(statistics.median(one[way] / one["whole"] for one in rounds), 4),
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


def run_rank(device: str, places: Sequence[Sequence[Any]]) -> None:
    """device: its kind. places: namespace, address and environment of each rank, where each is a
    host.
    """
    launch.die_with_parent()
    torch.set_num_threads(1)
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, method = enter(rank, places)
    own = torch.device("cpu")
    if device == "cuda":
        backend, own = "nccl", cuda_clock.use_device(rank)
    with fastcomm.init(backend, init_method=method, rank=rank, world_size=n, device=own) as comm:
        launch.serve(rank, Methods(comm))
        comm.barrier()


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        run_rank(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
