"""What bench/flatten.py prints and writes: the tables, the bars its figures are held to, and the
JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lib import tables
from lib.tables import Bar, Column, Times

PEERS = ("with norm", "foreach", "dense", "per tensor")

SHARE_OF_COPY = {"fp32": 0.90, "bf16": 0.90, "fp32->bf16": 0.85}
TIMES_PER_TENSOR, TINY_US, LAUNCH_US = 10.0, 15.0, 15.0


@dataclass(frozen=True)
class Pass:
    """What was measured of one list, mode and way, in microseconds. `nbytes`: read and written by
    one pass.
    """

    name: str
    mode: str
    way: str
    nbytes: int
    times: Times

    def bandwidth(self, contender: str) -> float:
        """GB/s, decimal."""
        return self.nbytes / self.times.median(contender) / 1e3

    def ratio(self, contender: str) -> float:
        """How many times fastcomm's time the contender takes."""
        return self.times.ratio(contender, "fastcomm")

    def bars(self) -> list[Bar]:
        peer = min(("foreach", "dense"), key=self.times.median)
        bars = [
            self._bar(f"not slower than {peer}", f"{self.ratio(peer):.2f} x", self.ratio(peer) >= 1)
        ]
        if self.name == "tiny":
            time, per_tensor = self.times.median("fastcomm"), self.ratio("per tensor")
            return [
                *bars,
                self._bar(f"under {TINY_US:.0f} us", f"{time:.1f} us", time < TINY_US),
                self._bar(
                    f"{TIMES_PER_TENSOR:.0f} x per-tensor copies",
                    f"{per_tensor:.1f} x",
                    per_tensor >= TIMES_PER_TENSOR,
                ),
            ]
        share, least = self.ratio("copy"), SHARE_OF_COPY[self.mode]
        return [*bars, self._bar(f"{least:.0%} of copy", f"{share:.1%}", share >= least)]

    def _bar(self, what: str, figure: str, is_met: bool) -> Bar:
        return Bar(f"{self.name} {self.mode} {self.way}: {what}", figure, is_met)


@dataclass(frozen=True)
class Launch:
    """What one bucket costs the host, in microseconds: medians of noting its gradients, and of the
    launch.
    """

    n_tensors: int
    wire: str
    gather: float
    launch: float

    def bar(self) -> Bar:
        """For the launch alone: what noting the gradients takes depends on how many they are."""
        return Bar(
            f"launching a bucket of {self.n_tensors}, {self.wire}: {LAUNCH_US:.0f} us",
            f"{self.launch:.1f} us",
            self.launch <= LAUNCH_US,
        )


def bars_of(rows: Sequence[Pass], launches: Sequence[Launch]) -> list[Bar]:
    return [bar for row in rows for bar in row.bars()] + [launch.bar() for launch in launches]


# ---- the tables ----------------------------------------------------------------------------------


class Table(tables.Table):
    """Times and bandwidths of a plain copy and of fastcomm, and for each peer its time and how many
    times fastcomm's that is.
    """

    def __init__(self) -> None:
        columns = [
            Column(10, ("list", "")),
            Column(11, ("mode", "")),
            Column(10, ("", "")),
            Column(9, ("moved", "(MB)")),
            Column(9, ("", "(us)")),
            Column(7, ("copy", "(GB/s)")),
            Column(10, ("", "(us)")),
            Column(7, ("", "(GB/s)")),
            Column(8, ("fastcomm", "of copy")),
        ]
        for peer in PEERS:
            columns += [Column(10, ("", "(us)")), Column(7, (peer, "ratio"))]
        columns.append(Column(2, ("", ""), "<"))  # the mark of a wide spread
        super().__init__(columns, prefix="# ")

    def print_pass(self, row: Pass) -> None:
        cells = [row.name, row.mode, row.way, f"{row.nbytes / 1e6:.1f}"]
        for contender in ("copy", "fastcomm"):
            cells += [f"{row.times.median(contender):.1f}", f"{row.bandwidth(contender):.0f}"]
        cells.append(f"{row.ratio('copy'):.1%}")
        for peer in PEERS:
            cells += (
                [f"{row.times.median(peer):.1f}", f"{row.ratio(peer):.2f}"]
                if peer in row.times
                else ["-", "-"]
            )
        cells.append(row.times.wide())
        self.print_row(cells)


def print_legend() -> None:
    print(
        "#\n# copy: device to device; with norm: fastcomm's unflatten that also counts; foreach: "
        "torch._foreach_copy_ with views; dense:"
    )
    print(
        "# torch._utils._flatten_dense_tensors (torch.cat) and back; per tensor: copy_, as DDP does"
    )
    print(f"# {tables.WIDE_NOTE}")


def print_launches(launches: Sequence[Launch]) -> None:
    print(
        "#\n# host time of one bucket, us: noting the gradients, then flatten, event, all_reduce, "
        "event (bf16: and unflatten)"
    )
    columns = [("tensors", 10), ("wire", 11), ("gather", 9), ("launch", 9), ("together", 9)]
    table = tables.Table([Column(width, (title,)) for title, width in columns], prefix="# ")
    table.print_head()
    for cost in launches:
        times = (cost.gather, cost.launch, cost.gather + cost.launch)
        table.print_row([str(cost.n_tensors), cost.wire, *(f"{time:.2f}" for time in times)])


def print_bars(bars: Sequence[Bar]) -> None:
    print("#")
    for bar in bars:
        print(f"# {bar.verdict()}  {bar.figure:>9}  {bar.what}")
    print(f"# {tables.count_bars(bars)}")


# ---- the file ------------------------------------------------------------------------------------


def figures_of(rows: Sequence[Pass], launches: Sequence[Launch]) -> dict[str, Any]:
    return {
        "rows": [as_json(row) for row in rows],
        "launches": [asdict(launch) for launch in launches],
        "bars": [asdict(bar) for bar in bars_of(rows, launches)],
    }


def as_json(row: Pass) -> dict[str, Any]:
    contenders = {
        name: {
            "time_us": round(median, 3),
            "quartiles_us": [round(low, 3), round(high, 3)],
            "gbs": round(row.bandwidth(name), 1),
            "of_copy": round(row.times.ratio("copy", name), 4),
        }
        for name, (low, median, high) in row.times.spreads.items()
    }
    return {
        "list": row.name,
        "mode": row.mode,
        "way": row.way,
        "nbytes": row.nbytes,
        "contenders": contenders,
    }
