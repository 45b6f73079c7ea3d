"""Flatten and unflatten on a GPU: fastcomm's kernels beside the other ways to get many tensors into
one buffer and back, in one run.

    python bench/flatten.py                     ResNet-50, BERT-large, GPT-2, 2,000 tiny tensors
    python bench/flatten.py --lists tiny --rounds 5

A time is the GPU's alone: the work is captured in a CUDA graph and replayed between two events;
what cannot be captured (CuPy) is launched back to back, and its host may be what is measured. The
contenders take turns in every round, and a time is the median over rounds. Every list lies in
several copies that are worked on in turn, so that the L2 cache holds nothing of what comes next.
GB/s count bytes read and written; "of copy" is the share of what a device-to-device copy of as many
bytes reaches in the same run.

What a launch costs the host is measured on the host's clock: a bucket in which nothing is a view
yet, the GPU never waited for.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cuda_clock
import machine
import models
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import Parameter

import fastcomm
from fastcomm.cuda.multi_tensor import MultiTensor
from fastcomm.reducer.layout import plan_buckets

RESULTS = Path(__file__).resolve().with_name("results")

# All copies of a list together are so many times the L2 cache. Not more copies than this, or
# capturing takes longer than running.
TIMES_L2 = 4
FEWEST_COPIES, MOST_COPIES = 2, 16
# A contender's turn lasts about this long: long enough for the events' resolution of half a
# microsecond not to count.
TURN_US = 3000.0
MOST_REPLAYS = 200

LAUNCHES = 300
# Small enough for the GPU to be done with a bucket before the host has launched the next: else the
# host would wait for room in the queue.
LAUNCHED_NUMEL = 256
LAUNCHES_AHEAD = 50

MODES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32->bf16": (torch.float32, torch.bfloat16),
}
SHARE_OF_COPY = {"fp32": 0.90, "bf16": 0.90, "fp32->bf16": 0.85}
TIMES_PER_TENSOR, TINY_US, LAUNCH_US = 10.0, 15.0, 15.0


@dataclass(frozen=True)
class Bar:
    """What a figure is to reach, and whether it does."""

    what: str
    figure: str
    is_met: bool


@dataclass(frozen=True)
class Place:
    """One copy of a list of tensors, and of the flat buffer they go into and come from. views[i] is
    where tensors[i] lies in it.
    """

    tensors: list[Tensor]
    flat: Tensor
    views: list[Tensor]


@dataclass(frozen=True)
class Row:
    """What was measured of one list, mode and way. `nbytes`: read and written by one pass. Times in
    microseconds, by contender.
    """

    name: str
    mode: str
    way: str
    nbytes: int
    quartiles: dict[str, tuple[float, float, float]]

    def time(self, contender: str) -> float:
        return self.quartiles[contender][1]

    def bandwidth(self, contender: str) -> float:
        """GB/s, decimal."""
        return self.nbytes / self.time(contender) / 1e3

    def ratio(self, contender: str) -> float:
        """How many times fastcomm's time the contender takes."""
        return self.time(contender) / self.time("fastcomm")

    def bars(self) -> list[Bar]:
        where = f"{self.name} {self.mode} {self.way}"
        peer = min(("foreach", "dense"), key=self.time)
        bars = [
            Bar(
                f"{where}: not slower than {peer}",
                f"{self.ratio(peer):.2f} x",
                self.ratio(peer) >= 1,
            )
        ]
        if self.name == "tiny":
            bars.append(
                Bar(
                    f"{where}: under {TINY_US:.0f} us",
                    f"{self.time('fastcomm'):.1f} us",
                    self.time("fastcomm") < TINY_US,
                )
            )
            times = self.ratio("per tensor")
            bars.append(
                Bar(
                    f"{where}: {TIMES_PER_TENSOR:.0f} x per-tensor copies",
                    f"{times:.1f} x",
                    times >= TIMES_PER_TENSOR,
                )
            )
        else:
            share = self.ratio("copy")
            bars.append(
                Bar(
                    f"{where}: {SHARE_OF_COPY[self.mode]:.0%} of copy",
                    f"{share:.1%}",
                    share >= SHARE_OF_COPY[self.mode],
                )
            )
        return bars


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


def main() -> int:
    options = parse_options()
    reason = cuda_clock.why_not()
    if reason is not None:
        print(f"bench/flatten.py measures GPU time, and {reason}", file=sys.stderr)
        return 2
    device = cuda_clock.use_device(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        fastcomm.init(
            "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device=device
        ) as comm,
    ):
        description = machine.describe()
        print(f"# {machine.summary(description)}, NCCL {machine.nccl_version()}")
        print_head()
        rows = [
            row
            for name in options.lists
            for mode in MODES
            for row in measure_mode(name, mode, comm.cuda, options.rounds)
        ]
        launches = [
            launch_cost(comm, n, wire)
            for n in options.launches
            for wire in (torch.float32, torch.bfloat16)
        ]
    print_launches(launches)
    bars = [bar for row in rows for bar in row.bars()] + [launch.bar() for launch in launches]
    write_results(description, rows, launches, bars, options.json)
    print_bars(bars)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lists",
        nargs="+",
        choices=tuple(LISTS),
        default=list(LISTS),
        metavar="LIST",
        help=f"of {', '.join(LISTS)} (all)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds, in each of which every contender has its turn (9)",
    )
    parser.add_argument(
        "--launches",
        nargs="*",
        type=int,
        default=[1, 32, 500],
        metavar="N",
        help="measure launching a bucket of N tensors (1 32 500)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write the results (in the source tree: bench/results/)",
    )
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is at least 2")
    return options


# ---- what is flattened ---------------------------------------------------------------------------


def shapes_of(make_model: Callable[[], torch.nn.Module]) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in make_model().parameters()]


def tiny_shapes() -> list[torch.Size]:
    """2,000 tensors of 1 to 1,999 elements, 1,000 on average, few of which end where 16 bytes do.
    617 spreads the sizes: it is prime.
    """
    return [torch.Size([1 + 617 * i % 1999]) for i in range(2000)]


LISTS: dict[str, Callable[[], list[torch.Size]]] = {
    "resnet50": lambda: shapes_of(models.resnet50),
    "bert-large": lambda: shapes_of(lambda: models.Bert(1024, 24, 16)),
    "gpt2": lambda: shapes_of(models.Gpt2),
    "tiny": tiny_shapes,
}


def make_places(
    shapes: Sequence[torch.Size], mode: str, device: torch.device
) -> tuple[list[Place], list[int]]:
    """The copies of a list, and the offsets in their flat buffers. Tensors come from the allocator
    one by one, as gradients do.
    """
    dtype, wire = MODES[mode]
    plan = [(shape.numel(), dtype, dtype.itemsize) for shape in shapes]
    (layout,) = plan_buckets(plan, cap_bytes=sys.maxsize, first_cap_bytes=sys.maxsize)
    nbytes = layout.numel * (dtype.itemsize + wire.itemsize)
    n_copies = min(MOST_COPIES, max(FEWEST_COPIES, -(-TIMES_L2 * cuda_clock.l2_bytes() // nbytes)))
    places = []
    for _ in range(n_copies):
        tensors = [
            torch.randn(shapes[slot.index], dtype=dtype, device=device) for slot in layout.slots
        ]
        flat = torch.zeros(layout.numel, dtype=wire, device=device)
        views = [
            flat[slot.offset : slot.offset + slot.numel].view(shapes[slot.index])
            for slot in layout.slots
        ]
        places.append(Place(tensors, flat, views))
    return places, [slot.offset for slot in layout.slots]


# ---- the contenders ------------------------------------------------------------------------------


def flattening(
    multi_tensor: MultiTensor, places: list[Place]
) -> dict[str, list[Callable[[], object]]]:
    """By contender, what flattens each of the places."""

    def dense(place: Place) -> None:
        _flatten_dense_tensors(place.tensors).to(place.flat.dtype)

    def per_tensor(place: Place) -> None:
        for view, tensor in zip(place.views, place.tensors, strict=True):
            view.copy_(tensor)

    ways: dict[str, Callable[[Place], object]] = {
        "fastcomm": lambda place: multi_tensor.flatten(place.tensors, place.flat),
        "foreach": lambda place: torch._foreach_copy_(place.views, place.tensors),
        "dense": dense,
        "per tensor": per_tensor,
    }
    return on_all(ways, places)


def unflattening(
    multi_tensor: MultiTensor, places: list[Place]
) -> dict[str, list[Callable[[], object]]]:
    """By contender, what brings each of the places back."""

    def dense(place: Place) -> None:
        numel = sum(tensor.numel() for tensor in place.tensors)
        views = _unflatten_dense_tensors(
            place.flat[:numel].to(place.tensors[0].dtype), place.tensors
        )
        torch._foreach_copy_(place.tensors, list(views))

    def per_tensor(place: Place) -> None:
        for view, tensor in zip(place.views, place.tensors, strict=True):
            tensor.copy_(view)

    ways: dict[str, Callable[[Place], object]] = {
        "fastcomm": lambda place: multi_tensor.unflatten(place.flat, place.tensors),
        "with norm": lambda place: multi_tensor.unflatten(
            place.flat, place.tensors, with_stats=True
        ),
        "foreach": lambda place: torch._foreach_copy_(place.tensors, place.views),
        "dense": dense,
        "per tensor": per_tensor,
    }
    return on_all(ways, places)


def on_all(
    ways: dict[str, Callable[[Place], object]], places: list[Place]
) -> dict[str, list[Callable[[], object]]]:
    return {
        name: [lambda way=way, place=place: way(place) for place in places]
        for name, way in ways.items()
    }


def copying(nbytes: int, n_copies: int, device: torch.device) -> list[Callable[[], object]]:
    """Device-to-device copies that read and write `nbytes` together, one pair of buffers each."""
    pairs = [
        [torch.zeros(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(n_copies)
    ]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]


def concatenating(places: list[Place]) -> list[Callable[[], object]] | None:
    """CuPy's concatenate, where there is a CuPy and nothing is to be cast. It knows no bfloat16;
    the bytes are the same.
    """
    try:
        import cupy
    except ImportError:
        return None
    if places[0].tensors[0].dtype != places[0].flat.dtype or not places[0].flat.is_cuda:
        return None
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def concatenate(arrays: list[Any]) -> None:
        with stream:
            cupy.concatenate(arrays)

    as_bits = {torch.bfloat16: torch.int16}
    all_arrays = [
        [
            cupy.from_dlpack(tensor.view(-1).view(as_bits.get(tensor.dtype, tensor.dtype)))
            for tensor in place.tensors
        ]
        for place in places
    ]
    return [lambda arrays=arrays: concatenate(arrays) for arrays in all_arrays]


# ---- measuring -----------------------------------------------------------------------------------


def measure_mode(name: str, mode: str, cuda: Any, rounds: int) -> list[Row]:
    """One list in one mode, both ways."""
    dtype, wire = MODES[mode]
    places, offsets = make_places(LISTS[name](), mode, cuda.device)
    numels = [tensor.numel() for tensor in places[0].tensors]
    nbytes = sum(numels) * (dtype.itemsize + wire.itemsize)
    multi_tensor = MultiTensor(numels, offsets, dtype, wire, cuda)
    check(multi_tensor, places[0])
    rows = []
    for way, contend in (("flatten", flattening), ("unflatten", unflattening)):
        captured = contend(multi_tensor, places) | {
            "copy": copying(nbytes, len(places), cuda.device)
        }
        works = {
            contender: cuda_clock.capture(all_of(calls)) for contender, calls in captured.items()
        }
        concatenates = concatenating(places) if way == "flatten" else None
        if concatenates is not None:
            works["cupy"] = all_of(concatenates)
        times = take_turns(works, rounds)
        quartiles = {
            contender: tuple(q / len(places) for q in statistics.quantiles(times[contender], n=4))
            for contender in works
        }
        row = Row(name, mode, way, nbytes, quartiles)
        print(format_row(row), flush=True)
        rows.append(row)
        works.clear()
        captured.clear()
        gc.collect()
    return rows


def check(multi_tensor: MultiTensor, place: Place) -> None:
    """What is measured has to be right."""
    multi_tensor.flatten(place.tensors, place.flat)
    wrong = [
        i
        for i, (view, tensor) in enumerate(zip(place.views, place.tensors, strict=True))
        if not torch.equal(view, tensor.to(view.dtype))
    ]
    multi_tensor.unflatten(place.flat, place.tensors)
    wrong += [
        i
        for i, (view, tensor) in enumerate(zip(place.views, place.tensors, strict=True))
        if not torch.equal(tensor, view.to(tensor.dtype))
    ]
    if wrong:
        sys.exit(
            f"fastcomm's kernels are wrong: the first tensor that differs is number {wrong[0]} of "
            f"{len(place.tensors)}"
        )


def all_of(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def take_turns(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each work, one mean per round. The order moves on by one in each round."""
    repeats = {
        name: max(1, min(MOST_REPLAYS, round(TURN_US / max(span_of(work, 1), 1.0))))
        for name, work in works.items()
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(rounds):
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            times[name].append(span_of(works[name], repeats[name]) / repeats[name])
    return times


def span_of(work: Callable[[], None], repeats: int) -> float:
    """Microseconds of `repeats` runs one after the other, after one that keeps the GPU busy while
    the host gets ahead.
    """
    work()
    with cuda_clock.Span() as span:
        for _ in range(repeats):
            work()
    return span.microseconds()


def launch_cost(comm: Any, n_tensors: int, wire_dtype: torch.dtype) -> Launch:
    """What gather and launch of one bucket take on the host. Its gradients are tensors of their own
    each time, as after zero_grad().
    """
    parameters = [
        Parameter(torch.zeros(LAUNCHED_NUMEL, device=comm.device)) for _ in range(n_tensors)
    ]
    gradients = [torch.ones(LAUNCHED_NUMEL, device=comm.device) for _ in range(n_tensors)]
    # Behind the gradients: one element for each, in which ranks tell each other which they have.
    numel = n_tensors * LAUNCHED_NUMEL + n_tensors
    flat = comm.empty(numel, dtype=torch.float32).zero_()
    views = list(flat[: n_tensors * LAUNCHED_NUMEL].split(LAUNCHED_NUMEL))
    offsets = [i * LAUNCHED_NUMEL for i in range(n_tensors)]
    bucket = comm.bind_bucket(flat, views, offsets, wire_dtype=wire_dtype, label=1)
    stamps: list[tuple[int, int]] = []
    gc.collect()
    gc.disable()
    for number in range(LAUNCHES + LAUNCHES_AHEAD):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        start = time.perf_counter_ns()
        bucket.gather(parameters)
        gathered = time.perf_counter_ns()
        work = bucket.launch("mean", [])
        launched = time.perf_counter_ns()
        work.wait()
        stamps.append((gathered - start, launched - gathered))
        if number % LAUNCHES_AHEAD == 0:
            cuda_clock.synchronize()
    gc.enable()
    cuda_clock.synchronize()
    # The first ones warm up.
    gather, launch = (
        statistics.median(column) / 1e3 for column in zip(*stamps[LAUNCHES_AHEAD:], strict=True)
    )
    return Launch(n_tensors, str(wire_dtype).removeprefix("torch."), gather, launch)


# ---- telling -------------------------------------------------------------------------------------

PEERS = ("with norm", "foreach", "dense", "per tensor", "cupy")


def print_head() -> None:
    print(
        "#\n# copy: device to device; with norm: fastcomm's unflatten that also counts; foreach: "
        "torch._foreach_copy_ with views; dense:"
    )
    print(
        "# torch._utils._flatten_dense_tensors (torch.cat) and back; per tensor: copy_, as DDP "
        "does; cupy: concatenate, from the host"
    )
    names = f"# {'list':>10} {'mode':>10} {'':>9} {'moved':>8} {'copy':>15}  {'fastcomm':>23}"
    units = (
        f"# {'':>10} {'':>10} {'':>9} {'(MB)':>8} {'(us)':>8} {'(GB/s)':>6}  "
        f"{'(us)':>8} {'(GB/s)':>6} {'of copy':>7}"
    )
    print(names + "".join(f"  {peer:>15}" for peer in PEERS))
    print(units + "".join(f"  {'(us)':>8} {'ratio':>6}" for _ in PEERS), flush=True)


def format_row(row: Row) -> str:
    line = f"{row.name:>12} {row.mode:>10} {row.way:>9} {row.nbytes / 1e6:8.1f}"
    line += f" {row.time('copy'):8.1f} {row.bandwidth('copy'):6.0f}"
    line += (
        f"  {row.time('fastcomm'):8.1f} {row.bandwidth('fastcomm'):6.0f} {row.ratio('copy'):7.1%}"
    )
    for peer in PEERS:
        line += (
            f"  {row.time(peer):8.1f} {row.ratio(peer):6.2f}"
            if peer in row.quartiles
            else f"  {'-':>8} {'-':>6}"
        )
    return line


def print_launches(launches: list[Launch]) -> None:
    print(
        "#\n# host time of one bucket, us: noting the gradients, then flatten, event, all_reduce, "
        "event (bf16: and unflatten)"
    )
    print(f"# {'tensors':>10} {'wire':>10} {'gather':>8} {'launch':>8} {'together':>8}")
    for cost in launches:
        print(
            f"{cost.n_tensors:>12} {cost.wire:>10} {cost.gather:8.2f} {cost.launch:8.2f} "
            f"{cost.gather + cost.launch:8.2f}"
        )


def print_bars(bars: list[Bar]) -> None:
    print("#")
    for bar in bars:
        print(f"# {'met' if bar.is_met else 'NOT met':>8}  {bar.figure:>9}  {bar.what}")
    print(f"# bars: {sum(bar.is_met for bar in bars)} of {len(bars)} met")


def write_results(
    description: dict[str, object],
    rows: list[Row],
    launches: list[Launch],
    bars: list[Bar],
    path: Path | None,
) -> None:
    if path is None and RESULTS.is_dir():
        path = RESULTS / "flatten.json"
    if path is None:
        return
    result = {
        "benchmark": "flatten",
        "machine": description,
        "rows": [row_as_json(row) for row in rows],
        "launches": [asdict(launch) for launch in launches],
        "bars": [asdict(bar) for bar in bars],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"# Results: {os.path.relpath(path)}")


def row_as_json(row: Row) -> dict[str, Any]:
    contenders = {
        name: {
            "time_us": round(middle, 3),
            "quartiles_us": [round(low, 3), round(high, 3)],
            "gbs": round(row.bandwidth(name), 1),
            "of_copy": round(row.time("copy") / middle, 4),
        }
        for name, (low, middle, high) in row.quartiles.items()
    }
    return {
        "list": row.name,
        "mode": row.mode,
        "way": row.way,
        "nbytes": row.nbytes,
        "contenders": contenders,
    }


if __name__ == "__main__":
    sys.exit(main())
