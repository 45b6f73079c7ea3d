"""All-reduce between hosts: backend "hierarchical" beside Gloo over all ranks, on hosts whose links
are limited, in one run.

    python -m fastcomm bench hierarchical            2 hosts of 2 ranks, 1 Gbit/s, 64 MiB of float32
    python -m fastcomm bench hierarchical --hosts 2,1,2 --rate 10gbit --mib 256
    python -m fastcomm bench hierarchical --wires bfloat16 int8   these beside Gloo and the backend

The hosts are network namespaces that the benchmark makes, for which it needs root's rights, and
takes down again; links are limited by tc's token bucket. Contenders take turns in every round, in
random order; narrow wires are also compared with bfloat16's, round by round. A time is the median
over all calls of the slowest rank's; "bound" is what the bytes that must cross a link need at its
rate, headers not counted: 2 (h - 1) / h times the buffer between h hosts, each way.

A bucket of fastcomm lies in comm.empty and is launched and waited for as a reducer does it;
"backend" is dist.all_reduce of an ordinary tensor over the torch.distributed backend "fastcomm".
Before anything is measured, the results are compared with Gloo's. Runs from the source tree only:
the hosts are those of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import launch, machine, report, tables
from lib.tables import RATIO, Column, Spread, Table, Times, ratio_cells, time_cell

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))
try:
    from tests.support import namespaces
except ModuleNotFoundError:  # installed: --help is all there is
    namespaces = None  # type: ignore[assignment]

NAMES = {
    "gloo": "gloo, all ranks",
    "float32": "hierarchical, float32",
    "bfloat16": "hierarchical, bfloat16",
    "int8": "hierarchical, int8",
    "int8_feedback": "hierarchical, int8 fb",
    "float8": "hierarchical, float8",
    "backend": 'backend "fastcomm"',
}
PORT = 29500  # in namespaces of our own every port is free


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
WHOLE = Wire(4, 1e-6)  # what the others send


def main() -> int:
    options = parse_options()
    reason = namespaces.why_not() if namespaces else "run it in the source tree"
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
            errors = ranks.call("compare", contenders=options.contenders)[0]
            samples = measure(ranks, options)
    times = Times({name: spread_of(seconds) for name, seconds in samples.items()})
    rows = make_rows(times, errors, options)
    print_times(times, rows, options)
    print_paired(samples, rows, options)
    write_results(rows, options)
    return report_wrong(errors)


def report_wrong(errors: Mapping[str, float]) -> int:
    """Says which results are not Gloo's; returns the exit status."""
    wrong = {name: far for name, far in errors.items() if not far <= wire_of(name).tolerance}
    for name, far in wrong.items():
        print(
            f"bench/hierarchical.py: {name} is {far:.1e} of the largest value off Gloo's sum, and "
            f"{wire_of(name).tolerance:.1e} at most is rounding: its times mean nothing",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def wire_of(contender: str) -> Wire:
    return WIRES.get(contender, WHOLE)


def spread_of(seconds: Sequence[float]) -> Spread:
    return Spread(min(seconds), statistics.median(seconds), max(seconds))


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "--hosts",
        type=report.hosts,
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
        "--wires", nargs="+", choices=WIRES, default=list(WIRES), help="which of them (all)"
    )
    options = report.parse(parser, rounds=7)
    if options.mib < 1:
        parser.error("--mib is at least 1")
    options.contenders = ["gloo", *options.wires, "backend"]
    return options


def bits_per_second(rate: str) -> float:
    units = {"gbit": 1e9, "mbit": 1e6}
    return float(rate[:-4]) * units[rate[-4:]]


def measure(ranks: launch.Ranks, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each call by round, of the slowest rank."""
    contenders = options.contenders
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for contender in contenders:
        ranks.call("time", contender=contender)  # connections open their windows, memory is touched
    for _ in report.tracked(range(options.rounds), "all-reduce"):
        for contender in random.sample(contenders, len(contenders)):
            seconds[contender].append(max(ranks.call("time", contender=contender)))
    return seconds


def bound(contender: str, options: argparse.Namespace) -> float:
    """The seconds that what must cross a link needs at its rate."""
    n_hosts = len(options.hosts)
    numel = options.mib * 2**20 // 4
    nbytes = float(numel * wire_of(contender).nbytes * 2 * (n_hosts - 1) / n_hosts)
    return nbytes * 8 / bits_per_second(options.rate)


def make_rows(
    times: Times, errors: dict[str, float], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    return {
        contender: {
            "seconds": round(median, 4),
            "fastest": round(fastest, 4),
            "slowest": round(slowest, 4),
            "bound": round(bound(contender, options), 4),
            "gloo/it": round(times.ratio("gloo", contender), 3),
            "gloo/bound": round(times.median("gloo") / bound(contender, options), 3),
            "relative_error": errors.get(contender),
        }
        for contender, (fastest, median, slowest) in times.spreads.items()
    }


def print_times(times: Times, rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"# {machine.summary()}")
    print(
        f"# hosts of {', '.join(map(str, options.hosts))} ranks, links of {options.rate}, "
        f"{options.mib} MiB of float32, sum"
    )
    table_of(rows).print()
    for contender in options.wires:
        ratio, least = times.ratio("gloo", contender), bound(contender, options)
        print(
            f"# {contender} wire: {ratio:.2f} times as fast as Gloo; the link allows "
            f"{times.median('gloo') / least:.2f}"
        )
    if times.wide():
        print(f"# {tables.WIDE_NOTE}")


def table_of(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """The ratio is that of Gloo's time to a row's."""
    columns = [Column(24, ("way",), "<"), Column(12, ("median (s)",)), Column(10, ("fastest",))]
    columns += [Column(10, ("slowest",)), Column(11, ("bound (s)",)), *RATIO]
    columns += [Column(14, ("gloo / bound",)), Column(12, ("error",))]
    table = Table(columns)
    gloo = spread_of_row(rows["gloo"])
    for name, row in rows.items():
        spread, error = spread_of_row(row), row["relative_error"]
        cells = [NAMES[name], time_cell(spread, 3)]
        cells += [f"{row[key]:.3f}" for key in ("fastest", "slowest", "bound")]
        cells += ratio_cells(None if name == "gloo" else gloo.over(spread))
        cells += [f"{row['gloo/bound']:.2f}", "" if error is None else f"{error:.1e}"]
        table.rows.append(cells)
    return table


def spread_of_row(row: Mapping[str, Any]) -> Spread:
    return Spread(row["fastest"], row["seconds"], row["slowest"])


def print_paired(
    samples: Mapping[str, Sequence[float]],
    rows: dict[str, dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """How many times as long the bfloat16 wire takes as narrower ones, round by round; noted in the
    rows, too.
    """
    for contender in options.wires:
        if "bfloat16" in samples and wire_of(contender).nbytes < 2:
            pairs = zip(samples["bfloat16"], samples[contender], strict=True)
            least, ratio, most = spread_of([theirs / its for theirs, its in pairs])
            rows[contender]["bfloat16/it"] = [round(x, 3) for x in (least, ratio, most)]
            allowed = bound("bfloat16", options) / bound(contender, options)
            print(
                f"# {contender} wire: {ratio:.2f} times as fast as bfloat16 ({least:.2f} to "
                f"{most:.2f}); the link allows {allowed:.2f}"
            )


def write_results(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    figures = {
        "hosts": options.hosts,
        "rate": options.rate,
        "nbytes": options.mib * 2**20,
        "rounds": options.rounds,
        "rows": rows,
    }
    report.write_results("hierarchical", figures, options, prefix="# ")


# -- the ranks -------------------------------------------------------------------------------------


class Methods:
    """What a rank does when it is called. All contenders have the same values to reduce."""

    comm: Any

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
        self.buckets = {
            name: self.comm.bind_bucket(
                self.flat,
                [self.flat[:-1]],  # an 8-bit wire carries what is some parameter's
                [0],
                wire_dtype=wire.dtype,
                label=1 + label,
                error_feedback=wire.error_feedback,
            )
            for label, (name, wire) in enumerate(WIRES.items())
        }

    def compare(self, contenders: list[str]) -> dict[str, float]:
        """The largest difference to Gloo's sum, relative to the largest value."""
        self.gloo.copy_(self.values)
        self._call_of("gloo")()
        last = self.gloo.numel() - 1  # there a bucket keeps what the ranks tell each other
        errors = {}
        for contender in contenders[1:]:  # without Gloo
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
