"""All-reduce between hosts: backend "hierarchical" beside Gloo over all ranks, on hosts whose links
are limited, in one run.

    python bench/hierarchical.py                     2 hosts of 2 ranks, 1 Gbit/s, 64 MiB of float32
    python bench/hierarchical.py --hosts 2,1,2 --rate 10gbit --mib 256

The hosts are network namespaces that the benchmark makes, for which it needs root's rights, and
takes down again; links are limited by tc's token bucket. Ranks take turns within every round. A
time is the median over all calls of the slowest rank's; "bound" is what the bytes that must cross a
link need at its rate, headers not counted: 2 (h - 1) / h times the buffer between h hosts, each
way.

A bucket of fastcomm lies in comm.empty and is launched and waited for as a reducer does it;
"backend" is dist.all_reduce of an ordinary tensor over the torch.distributed backend "fastcomm".
Before anything is measured, the results are compared with Gloo's. Runs from the source tree only:
the hosts are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import launch
import machine
import torch
import torch.distributed as dist

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import namespaces  # noqa: E402

RESULTS = Path(__file__).resolve().with_name("results")
PORT = 29500  # in namespaces of our own every port is free
WIRE_NBYTES = {"gloo": 4, "float32": 4, "bfloat16": 2, "backend": 4}
CONTENDERS = tuple(WIRE_NBYTES)
NAMES = {"gloo": "gloo, all ranks", "backend": 'backend "fastcomm"'}
# What is asked of the defaults: how many times as fast as Gloo.
BARS = {"float32": 1.45, "bfloat16": 2.8}
# Rounding of the wire, times the few ranks whose values are added.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-6, "backend": 1e-6}


@dataclass(frozen=True)
class Row:
    """Seconds per call, over all calls of the slowest rank."""

    contender: str
    median: float
    fastest: float
    slowest: float
    bound: float


def main() -> int:
    options = parse_options()
    reason = namespaces.why_not()
    if reason is not None:
        print(f"bench/hierarchical.py: {reason}", file=sys.stderr)
        return 2
    launch.exit_on_sigterm()
    with namespaces.Hosts(options.hosts, rate=options.rate) as hosts:
        places = [
            [hosts.namespace(host), hosts.address(0), hosts.environment(rank)]
            for rank, host in enumerate(hosts.host_of)
        ]
        arguments = ["--as-rank", json.dumps(places), "--mib", str(options.mib)]
        with launch.Ranks(Path(__file__).resolve(), hosts.world_size, arguments=arguments) as ranks:
            errors = ranks.call("compare")[0]
            rows = measure(ranks, options)
    print_rows(rows, errors, options)
    if options.json is not None:
        write_results(rows, errors, options)
    return 0 if all(errors[wire] <= TOLERANCE[wire] for wire in TOLERANCE) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts",
        type=parse_hosts,
        default="2,2",
        metavar="N,N,...",
        help="ranks on each host (2,2)",
    )
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="of every link, each way, as tc(8) writes it, in mbit or gbit (1gbit)",
    )
    parser.add_argument(
        "--mib", type=int, default=64, help="size of the buffer, in MiB of float32 (64)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="how often each contender has its turn (7)"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write the results (results/hierarchical.json, of the defaults)",
    )
    options = parser.parse_args()
    if options.mib < 1 or options.rounds < 1:
        parser.error("--mib and --rounds are at least 1")
    if options.json is None and (options.hosts, options.rate, options.mib) == ([2, 2], "1gbit", 64):
        options.json = RESULTS / "hierarchical.json"
    return options


def parse_hosts(text: str) -> list[int]:
    hosts = [int(n) for n in text.split(",") if n.isdigit()]
    if len(hosts) < 2 or min(hosts) < 1 or len(hosts) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: at least two hosts, each with at least one rank, as in 2,2"
        )
    return hosts


def bits_per_second(rate: str) -> float:
    units = {"gbit": 1e9, "mbit": 1e6}
    return float(rate[:-4]) * units[rate[-4:]]


def measure(ranks: launch.Ranks, options: argparse.Namespace) -> list[Row]:
    n_hosts = len(options.hosts)
    seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for contender in CONTENDERS:
        ranks.call("time", contender=contender)  # connections open their windows, memory is touched
    for _ in range(options.rounds):
        for contender in CONTENDERS:
            seconds[contender].append(max(ranks.call("time", contender=contender)))
    rows = []
    for contender, times in seconds.items():
        nbytes = options.mib * 2**20 // 4 * WIRE_NBYTES[contender] * 2 * (n_hosts - 1) / n_hosts
        bound = nbytes * 8 / bits_per_second(options.rate)
        rows.append(Row(contender, statistics.median(times), min(times), max(times), bound))
    return rows


def print_rows(rows: list[Row], errors: dict[str, float], options: argparse.Namespace) -> None:
    print(f"# {machine.summary(machine.describe())}")
    print(
        f"# hosts of {', '.join(map(str, options.hosts))} ranks, links of {options.rate}, "
        f"{options.mib} MiB of float32, sum"
    )
    print(
        "# "
        f"{'':<24}{'time (s)':>10}{'fastest':>10}{'slowest':>10}{'bound':>10}"
        f"{'gloo / it':>12}{'gloo / bound':>14}{'error':>12}"
    )
    for row in rows:
        name = NAMES.get(row.contender, f"hierarchical, {row.contender}")
        error = "" if row.contender == "gloo" else f"{errors[row.contender]:.1e}"
        times = f"{row.median:>10.3f}{row.fastest:>10.3f}{row.slowest:>10.3f}{row.bound:>10.3f}"
        print(
            f"  {name:<24}{times}{rows[0].median / row.median:>12.2f}"
            f"{rows[0].median / row.bound:>14.2f}{error:>12}"
        )
    for row in rows:
        if row.contender in BARS:
            ratio = rows[0].median / row.median
            print(
                f"# {row.contender} wire: {ratio:.2f} times as fast as Gloo; the bar for the "
                f"defaults is {BARS[row.contender]}"
            )


def write_results(rows: list[Row], errors: dict[str, float], options: argparse.Namespace) -> None:
    gloo = rows[0].median
    result = {
        "benchmark": "hierarchical",
        "machine": machine.describe(),
        "hosts": options.hosts,
        "rate": options.rate,
        "nbytes": options.mib * 2**20,
        "rounds": options.rounds,
        "bars": BARS,
        "rows": {
            row.contender: {
                "seconds": round(row.median, 4),
                "fastest": round(row.fastest, 4),
                "slowest": round(row.slowest, 4),
                "bound": round(row.bound, 4),
                "gloo/it": round(gloo / row.median, 3),
                "gloo/bound": round(gloo / row.bound, 3),
                "relative_error": errors.get(row.contender),
            }
            for row in rows
        },
    }
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


# -- the ranks -------------------------------------------------------------------------------------


class Methods:
    """What a rank does when it is called. All contenders have the same values to reduce."""

    def __init__(self, rank: int, world_size: int, address: str, numel: int) -> None:
        self.comm = fastcomm.init(
            "hierarchical", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=world_size
        )
        dist.init_process_group(
            "fastcomm",
            init_method=f"tcp://{address}:{PORT + 1}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=2),
        )
        self.over_gloo = dist.new_group(backend="gloo")
        self.values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        self.gloo, self.tensor = self.values.clone(), self.values.clone()
        self.flat = self.comm.empty(numel, dtype=torch.float32).copy_(self.values)
        wire_dtypes = {"float32": None, "bfloat16": torch.bfloat16}
        self.buckets = {
            name: self.comm.bind_bucket(
                self.flat, [self.flat[:1]], [0], wire_dtype=wire_dtype, label=1 + label
            )
            for label, (name, wire_dtype) in enumerate(wire_dtypes.items())
        }

    def compare(self) -> dict[str, float]:
        """The largest difference to Gloo's sum, relative to the largest value."""
        self.gloo.copy_(self.values)
        self._call_of("gloo")()
        last = self.gloo.numel() - 1  # there a bucket keeps what the ranks tell each other
        errors = {}
        for contender in TOLERANCE:
            result = self.tensor if contender == "backend" else self.flat
            result.copy_(self.values)
            self._call_of(contender)()
            errors[contender] = float(
                (result - self.gloo)[:last].abs().max() / self.gloo[:last].abs().max()
            )
        return errors

    def time(self, contender: str) -> float:
        call = self._call_of(contender)
        for tensor in (self.gloo, self.flat, self.tensor):  # sums of sums would soon be infinite
            tensor.copy_(self.values)
        dist.barrier(group=self.over_gloo)
        before = time.perf_counter()
        call()
        return time.perf_counter() - before

    def _call_of(self, contender: str) -> Callable[[], object]:
        if contender == "gloo":
            return lambda: dist.all_reduce(self.gloo, group=self.over_gloo)
        if contender == "backend":
            return lambda: dist.all_reduce(self.tensor)
        return lambda: self.buckets[contender].launch("sum", []).wait()


def run_rank(places: list[Any], mib: int) -> None:
    launch.die_with_parent()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    namespace, address, environment = places[rank]
    namespaces.enter(namespace)
    os.environ.update(environment)
    launch.serve(rank, Methods(rank, len(places), address, mib * 2**20 // 4))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(json.loads(sys.argv[2]), int(sys.argv[4]))
    else:
        sys.exit(main())
