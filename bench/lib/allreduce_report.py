"""What bench/allreduce.py prints and writes: the table of nccl-tests with columns for the peers,
and the figures as JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lib import harness, machine, report, tables
from lib.allreduce_mpi import NAMES
from lib.allreduce_options import DTYPES, OPS
from lib.tables import Column, Times

PEERS = ("gloo", "backend", *NAMES, "ordinary", "nccl")
PLACEMENTS = ("out_of_place", "in_place")
# Flags reach a core of the same last-level cache in 25 to 100 ns, one of another in 240 or more. A
# barrier takes two to three times as long.
SAME_CACHE_NS = 400.0


@dataclass(frozen=True)
class Barrier:
    """What a barrier took while a size was measured, less the call itself: the median and the
    quartiles over rounds, in ns.
    """

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, probes: Sequence[float]) -> Barrier | None:
        if not probes:
            return None
        # twice: of a single probe there are no quantiles
        low, middle, high = statistics.quantiles([*probes, *probes], n=4, method="inclusive")
        return cls(low, middle, high)

    @property
    def caches(self) -> str:
        """Whether the cores shared a last-level cache."""
        if self.low < SAME_CACHE_NS <= self.high:
            return "mixed"
        return "one" if self.high < SAME_CACHE_NS else "two"


@dataclass(frozen=True)
class Size:
    """What was measured at one size, by placement, in microseconds. Keys of `wrong` are (peer,
    placement); it counts elements over all ranks. `barrier` is missing where none was timed.
    """

    count: int
    nbytes: int
    times: dict[str, Times]
    wrong: dict[tuple[str, str], int]
    barrier: Barrier | None = None

    @property
    def in_place(self) -> Times:
        return self.times["in_place"]


def bandwidths(nbytes: int, microseconds: float, ranks: int) -> tuple[float, float]:
    """algbw and busbw in GB/s, decimal."""
    algbw = nbytes / microseconds / 1e3
    return algbw, algbw * 2 * (ranks - 1) / ranks


# ---- the table -----------------------------------------------------------------------------------


def print_settings(
    options: argparse.Namespace, warm_up: int, calls: str, missing: dict[str, str]
) -> None:
    print(f"# {machine.summary()}")
    print("# Collective test starting: all_reduce_perf")
    print(
        f"# nThread 1 nGpus {int(options.device == 'cuda')} minBytes {options.b} maxBytes "
        f"{options.e} step: {options.f}(factor) "
        f"warmup iters: {warm_up} iters: {calls} agg iters: 1 validation: 1 graph: 0 unalign: 0"
    )
    print(
        f"# {options.ranks} ranks, tensors: "
        f"{'comm.empty' if options.tensors == 'comm' else 'torch.empty'}"
    )
    if options.device == "cuda":
        print(f"# NCCL {machine.nccl_version()}; torch was built with {torch_nccl_version()}")
    if options.ranks > machine.cores():
        print(
            f"# More ranks than cores ({machine.cores()}): the ranks share cores, and times say "
            "how well they do."
        )
    for peer, reason in missing.items():
        print(f"# {peer} is not measured: {reason}")


def torch_nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"


class Table(tables.Table):
    """A line of nccl-tests' table, and for each peer its time in place and how many times
    fastcomm's that is. For the bound it is fastcomm's time over the bound.
    """

    def __init__(self, contenders: Iterable[str], options: argparse.Namespace) -> None:
        self.options = options
        self.peers = [peer for peer in contenders if peer != "fastcomm"]
        super().__init__(self._columns(), prefix="# ")

    def _columns(self) -> list[Column]:
        columns = [
            Column(10, ("size", "(B)")),
            Column(14, ("count", "(elements)")),
            Column(10, ("type", "")),
            Column(8, ("redop", "")),
            Column(8, ("root", "")),
        ]
        for _ in PLACEMENTS:
            columns += [
                Column(9, ("time", "(us)")),
                Column(8, ("algbw", "(GB/s)")),
                Column(8, ("busbw", "(GB/s)")),
                Column(8, ("#wrong", "")),
            ]
        for peer in self.peers:
            columns += [Column(10, (peer, "(us)")), Column(8, ("ratio", ""))]
        if self.options.device == "cpu":
            columns += [Column(9, ("barrier", "(ns)")), Column(8, ("caches", ""))]
        return [*columns, Column(2, ("", ""), "<")]  # the mark of a wide spread

    def print_head(self) -> None:
        beside = "in-place time, and times that of fastcomm" if self.peers else ""
        print(f"#\n# {'':50}{'out-of-place':^32}{'in-place':^32}{beside}".rstrip())
        super().print_head()

    def print_size(self, size: Size) -> None:
        options = self.options
        cells = [str(size.nbytes), str(size.count), options.d, options.o, "-1"]
        for placement in PLACEMENTS:
            time = size.times[placement].median("fastcomm")
            algbw, busbw = bandwidths(size.nbytes, time, options.ranks)
            wrong = f"{size.wrong['fastcomm', placement]:g}"
            cells += [fit(time, 7), fit(algbw, 6), fit(busbw, 6), wrong]
        for peer in self.peers:
            pair = ("fastcomm", peer) if peer == "bound" else (peer, "fastcomm")
            cells += [fit(size.in_place.median(peer), 8), fit(size.in_place.ratio(*pair), 6)]
        if options.device == "cpu":
            barrier = size.barrier
            cells += [f"{barrier.middle:.0f}", barrier.caches] if barrier else ["N/A", "N/A"]
        self.print_row([*cells, size.in_place.wide()])


def fit(value: float, width: int) -> str:
    """As many decimals, two at most, as the width allows."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}"


def print_tail(rows: list[Size], ranks: int) -> None:
    wrong = sum(
        count for row in rows for (peer, _), count in row.wrong.items() if peer == "fastcomm"
    )
    busbw = [
        bandwidths(row.nbytes, times.median("fastcomm"), ranks)[1]
        for row in rows
        for times in row.times.values()
    ]
    print(f"# {'Out of bounds values':<20} : {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    print(f"# {'Avg bus bandwidth':<20} : {statistics.fmean(busbw):g}")
    wrong_peers = {peer for row in rows for (peer, _), count in row.wrong.items() if count}
    for peer in sorted(wrong_peers - {"fastcomm"}):
        print(f"# {peer} has wrong results as well: its times mean nothing")
    if any(row.in_place.wide() for row in rows):
        print(f"# {tables.WIDE_NOTE}")
    print("#\n# Collective test concluded: all_reduce_perf")


def print_headline(row: Size) -> None:
    times = ", ".join(
        f"{peer} {row.in_place.median(peer):.1f} us" for peer in ("fastcomm", "ordinary", "nccl")
    )
    print(f"# {report.short_size(row.nbytes)} in place: {times}")


# ---- the file ------------------------------------------------------------------------------------


def write_results(rows: list[Size], missing: dict[str, str], options: argparse.Namespace) -> None:
    figures = {
        "device": options.device,
        "ranks": options.ranks,
        "tensors": options.tensors,
        "dtype": DTYPES[options.d],
        "op": OPS[options.o],
        "unchanged": options.unchanged or options.device == "cuda",
        "peers_not_measured": missing,
        "rows": [as_json(row, options.ranks) for row in rows],
    }
    report.write_results("allreduce", figures, options, prefix="# ")


def as_json(row: Size, ranks: int) -> dict[str, Any]:
    peers = {
        peer: {
            placement: placement_as_json(row, peer, placement, ranks)
            for placement in PLACEMENTS
            if peer in row.times[placement]
        }
        for peer in row.in_place.spreads
    }
    ratios = {
        f"{peer}/fastcomm": row.in_place.ratio(peer, "fastcomm")
        for peer in PEERS
        if peer in row.in_place
    }
    if "bound" in row.in_place:
        ratios["fastcomm/bound"] = row.in_place.ratio("fastcomm", "bound")
    return {
        "nbytes": row.nbytes,
        "count": row.count,
        "ratios": harness.rounded(ratios),
        **_barrier_as_json(row.barrier),
        **peers,
    }


def _barrier_as_json(barrier: Barrier | None) -> dict[str, Any]:
    if barrier is None:
        return {}
    return {"barrier_ns": round(barrier.middle, 1), "caches": barrier.caches}


def placement_as_json(row: Size, peer: str, placement: str, ranks: int) -> dict[str, Any]:
    low, median, high = row.times[placement].spreads[peer]
    algbw, busbw = bandwidths(row.nbytes, median, ranks)
    return {
        "time_us": round(median, 3),
        "quartiles_us": [round(low, 3), round(high, 3)],
        "algbw_gbs": round(algbw, 4),
        "busbw_gbs": round(busbw, 4),
        "wrong": row.wrong.get((peer, placement)),
    }
