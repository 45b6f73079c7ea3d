"""Flatten and unflatten on a GPU: fastcomm's kernels beside the other ways to get many tensors into
one buffer and back, in one run.

    python -m fastcomm bench flatten            a bucket of 25 MiB, ResNet-50, BERT-large, GPT-2,
                                                and 2,000 tiny tensors
    python -m fastcomm bench flatten --lists tiny --rounds 5

A time is the GPU's alone: the work is captured in a CUDA graph and replayed between two events. The
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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lib import cuda_clock, flatten_report, harness, machine, report
from lib.flatten_contenders import (
    LISTS,
    MODES,
    Place,
    copying,
    flattening,
    make_places,
    shapes_in,
    unflattening,
)
from lib.flatten_report import Launch, Pass
from lib.tables import Times
from torch.nn import Parameter

import fastcomm
from fastcomm.transports.cuda.multi_tensor import MultiTensor

# A contender's turn lasts about this long: long enough for the events' resolution of half a
# microsecond not to count.
TURN_US = 3000.0
MOST_REPLAYS = 200

LAUNCHES = 300
# Small enough for the GPU to be done with a bucket before the host has launched the next: else the
# host would wait for room in the queue.
LAUNCHED_NUMEL = 256
LAUNCHES_AHEAD = 50


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
        rows, launches = measure(comm, options)
    flatten_report.print_launches(launches)
    figures = flatten_report.figures_of(rows, launches)
    report.write_results("flatten", figures, options, prefix="# ")
    flatten_report.print_bars(flatten_report.bars_of(rows, launches))
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    report.add_choices(parser, "--lists", LISTS)
    parser.add_argument(
        "--launches",
        nargs="*",
        type=int,
        default=[1, 32, 500],
        metavar="N",
        help="measure launching a bucket of N tensors (1 32 500)",
    )
    return report.parse(parser, rounds=9)


def measure(comm: Any, options: argparse.Namespace) -> tuple[list[Pass], list[Launch]]:
    """Prints and writes what it measures of the lists as it goes."""
    print(f"# {machine.summary()}, NCCL {machine.nccl_version()}")
    flatten_report.print_legend()
    table = flatten_report.Table()
    table.print_head()
    rows = []
    lists = [(name, mode) for name in options.lists for mode in MODES]
    for name, mode in report.tracked(lists, "lists of tensors"):
        for row in measure_mode(name, mode, comm.cuda, options.rounds):
            table.print_pass(row)
            rows.append(row)
        report.write_so_far("flatten", flatten_report.figures_of(rows, []), options)
    launches = [
        launch_cost(comm, n, wire)
        for n in options.launches
        for wire in (torch.float32, torch.bfloat16)
    ]
    return rows, launches


def measure_mode(name: str, mode: str, cuda: Any, rounds: int) -> Iterator[Pass]:
    """One list in one mode, both ways."""
    dtype, wire = MODES[mode]
    places, offsets = make_places(shapes_in(name, mode), mode, cuda.device)
    numels = [tensor.numel() for tensor in places[0].tensors]
    nbytes = sum(numels) * (dtype.itemsize + wire.itemsize)
    multi_tensor = MultiTensor(numels, offsets, dtype, wire, cuda)
    check(multi_tensor, places[0])
    for way, contend in (("flatten", flattening), ("unflatten", unflattening)):
        captured = contend(multi_tensor, places) | {
            "copy": copying(nbytes, len(places), cuda.device)
        }
        works = {
            contender: cuda_clock.capture(all_of(calls)) for contender, calls in captured.items()
        }
        samples = {
            contender: [us / len(places) for us in times]
            for contender, times in take_turns(works, rounds).items()
        }
        yield Pass(name, mode, way, nbytes, Times.of(samples))
        works.clear()
        captured.clear()
        gc.collect()


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
    """Microseconds of each work, one mean per round."""
    repeats = {
        name: max(1, min(MOST_REPLAYS, round(TURN_US / max(span_of(work, 1), 1.0))))
        for name, work in works.items()
    }
    turns = {name: partial(mean_of, work, repeats[name]) for name, work in works.items()}
    return harness.take_turns(turns, rounds, cuda_clock.synchronize)


def mean_of(work: Callable[[], None], repeats: int) -> float:
    return span_of(work, repeats) / repeats


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
    bucket = bound(comm, n_tensors, LAUNCHED_NUMEL, wire_dtype, label=1)
    times: list[tuple[int, int]] = []
    gc.collect()
    gc.disable()
    for number in range(LAUNCHES + LAUNCHES_AHEAD):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        times.append(time_round(bucket, parameters))
        if number % LAUNCHES_AHEAD == 0:
            cuda_clock.synchronize()
    gc.enable()
    cuda_clock.synchronize()
    # The first ones warm up.
    gather, launch = (
        statistics.median(column) / 1e3 for column in zip(*times[LAUNCHES_AHEAD:], strict=True)
    )
    return Launch(n_tensors, str(wire_dtype).removeprefix("torch."), gather, launch)


def bound(comm: Any, n: int, numel: int, wire_dtype: torch.dtype | None, label: int) -> Any:
    """A bucket of n gradients of float32, of numel elements each."""
    # Behind the gradients: one element for each, in which ranks tell each other which they have.
    flat = comm.empty(n * numel + n, dtype=torch.float32).zero_()
    views = list(flat[: n * numel].split(numel))
    offsets = [i * numel for i in range(n)]
    return comm.bind_bucket(flat, views, offsets, wire_dtype=wire_dtype, label=label)


def time_round(bucket: Any, parameters: list[Parameter]) -> tuple[int, int]:
    """Nanoseconds of a gather and of a launch. Waits for the result, which does not count."""
    start = time.perf_counter_ns()
    bucket.gather(parameters)
    gathered = time.perf_counter_ns()
    work = bucket.launch("mean", [])
    launched = time.perf_counter_ns()
    work.wait()
    return gathered - start, launched - gathered


if __name__ == "__main__":
    sys.exit(main())
