"""Measures what an all-reduce of a flat buffer costs over a communicator, for the model of a step.

Every function that takes a communicator is collective, and returns the same on every rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.insight.collectives import Cost, Link, MeasuredCosts, all_gather, reduce_scatter

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)  # bytes: 4 KiB to 16 MiB
REPEATS = 3
BUDGET_S = 0.1  # no larger size is measured when so much time has passed


def measure_costs(
    comm: Transport, sizes: Sequence[int] = SIZES, budget_s: float = BUDGET_S
) -> MeasuredCosts:
    """What it costs to copy gradients into a flat buffer and to reduce it, on the slowest rank: the
    median of a few calls at each size. The two smallest sizes are measured in any case.
    """
    points: list[tuple[int, Cost]] = []
    spent = 0.0
    for nbytes in sizes:
        seconds, core_seconds = _agreed(comm, _time(comm, nbytes // 4))
        points.append((nbytes, Cost(seconds, core_seconds)))
        spent += (REPEATS + 1) * seconds
        if len(points) > 1 and spent > budget_s:
            break
    return MeasuredCosts(points)


def _time(comm: Transport, numel: int) -> tuple[float, float]:
    """Seconds of a call, and core seconds of this process."""
    flat = comm.empty(numel, dtype=torch.float32)
    gradients = torch.ones(numel, device=comm.device)
    wall, cores = [], []
    for number in range(REPEATS + 1):
        gradients.fill_(1.0)  # as if just made: reducing an unchanged buffer flatters
        comm.barrier()
        _finish_device(comm)
        began, began_on_cores = time.perf_counter(), time.process_time()
        flat.copy_(gradients)
        comm.all_reduce(flat)
        _finish_device(comm)
        if number:  # the first call touches the memory
            wall.append(time.perf_counter() - began)
            cores.append(time.process_time() - began_on_cores)
    seconds = statistics.median(wall)
    if comm.has_streams:
        return seconds, 0.0
    # Where the rank itself carries it out, it cannot compute while it waits either.
    is_own_work = not comm.progresses_itself
    return seconds, seconds if is_own_work else min(seconds, statistics.median(cores))


def _finish_device(comm: Transport) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def _agreed(comm: Transport, own: tuple[float, float]) -> tuple[float, float]:
    """The slowest rank's."""
    numbers = torch.tensor(own, dtype=torch.float64).to(comm.device)
    comm.all_reduce(numbers, "max")
    seconds, core_seconds = on_host(comm, numbers).tolist()
    return seconds, core_seconds


def link_of(costs: MeasuredCosts, algorithm: str, ranks: int) -> Link:
    """The link whose all-reduces over `ranks` ranks by this algorithm cost as much: alpha from the
    smallest size, beta from the largest. gamma is part of beta.
    """
    (_, least), (nbytes, most) = costs.points[0], costs.points[-1]
    rounds = _all_reduce_s(algorithm, Link(1.0, float("inf")), nbytes, ranks)
    moved = _all_reduce_s(algorithm, Link(0.0, 1.0), nbytes, ranks)
    latency_s = least.seconds / rounds
    rate = moved / max(most.seconds - least.seconds, 1e-9)
    return Link(latency_s, rate, core_share=min(1.0, most.core_seconds / most.seconds))


def _all_reduce_s(algorithm: str, link: Link, nbytes: float, ranks: int) -> float:
    halves = (half(algorithm, link, nbytes, ranks) for half in (reduce_scatter, all_gather))
    return sum(cost.seconds for cost in halves)
