"""What communication costs: a training step without it, with fastcomm, and with torch's DDP over
Gloo, measured in turns in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from fastcomm import Communicator

# DDP settles its buckets in its second step, the optimizers allocate their state in the first.
WARM_UP = 2
# Of a step. A difference of two medians that is less says nothing, nor would a ratio to it.
_NOISE = 0.02


def step_times(
    comm: Communicator,
    make_model: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
    rounds: int,
) -> dict[str, float]:
    """Seconds of one step (forward, backward, AdamW) by name: medians over `rounds`, in each of
    which the slowest rank counts.

    Every contestant has a model of its own. Collective: all ranks call it, each with its own batch.
    """
    dist.init_process_group("gloo")
    seconds = take_turns(
        comm,
        {name: make_model() for name in ("local", "fastcomm", "DDP over Gloo")},
        loss_of,
        batch,
        WARM_UP + rounds,
    )
    # DDP's model is gone by now, as it must be: torch can deadlock when it outlives its process
    # group.
    dist.destroy_process_group()
    return {name: statistics.median(times[WARM_UP:]) for name, times in seconds.items()}


def take_turns(
    comm: Communicator,
    models: dict[str, nn.Module],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of every step of every model on the slowest rank. All of them start a step together,
    whoever's turn it is.
    """
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()
    }
    reducer = fastcomm.Reducer(comm).attach(models["fastcomm"])
    models["DDP over Gloo"] = DistributedDataParallel(models["DDP over Gloo"])

    seconds = torch.zeros(len(models), rounds, dtype=torch.float64)
    for i in range(rounds):
        for times, (name, model) in zip(seconds, models.items(), strict=True):
            comm.barrier()
            start = time.perf_counter()
            optimizers[name].zero_grad()
            loss_of(model, batch).backward()
            optimizers[name].step()
            times[i] = time.perf_counter() - start
    comm.all_reduce(seconds, "max")
    reducer.detach()
    return dict(zip(models, seconds.tolist(), strict=True))


def report(seconds: dict[str, float]) -> str:
    """The table of step times, with what each way of communicating adds to the local step."""
    overhead = {
        name: value - seconds["local"] for name, value in seconds.items() if name != "local"
    }
    lines = [f"step time        {'local':<14}{1e3 * seconds['local']:8.1f} ms"]
    for name, extra in overhead.items():
        cost = f"communication cost {1e3 * extra:6.1f} ms, {extra / seconds[name]:5.1%} of the step"
        lines.append(f"                 {name:<14}{1e3 * seconds[name]:8.1f} ms   {cost}")
    lines.append(f"                 {_compared(*overhead.values(), seconds['local'])}")
    return "\n".join(lines)


def _compared(ours: float, theirs: float, local: float) -> str:
    noise = _NOISE * local
    if min(ours, theirs) > noise:
        ratio = theirs / ours
        return f"DDP over Gloo spends {ratio:.1f} times as long on communication as fastcomm"
    if theirs > noise:
        return f"what fastcomm adds is below the noise of this run, {_NOISE:.0%} of a step"
    return "a cost below the noise of this run; --rounds 30 would tell more"
