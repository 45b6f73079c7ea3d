"""One rank of bench/paper.py: all-reduces of a fixed total, training steps in the ways of
paper_figures.py, and trainings whose loss is looked at.

Started by bench/lib/launch.py, with one argument: where the ranks meet, as JSON. Over shared memory
fastcomm's backend is "shm", over the network "hierarchical"; on GPUs both sides use NCCL. DDP is
torch's own, over Gloo or NCCL. Times are the host's, on a GPU those between two events.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib import cuda_clock, launch
from lib.models import WARM_UP_STEPS, Case
from lib.paper_figures import CONTENDERS, DEFAULT_MB, FIGURES, Way, case_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent))
from examples import converge

PORT = 29500  # in namespaces of our own every port is free
MIB = 2**20
# of DDP, which has one for bfloat16 over NCCL alone
DTYPE_HOOKS = {"float16": default_hooks.fp16_compress_hook}
LEAST_MB = 1e-6  # of a bucket, for both contenders: less than any gradient has


def shuffled(contenders: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: random, and the same on every rank."""
    return random.Random(number).sample(contenders, len(contenders))


@dataclass
class Trainee:
    """A model that is trained in one way."""

    way: Way
    case: Case
    model: nn.Module  # as it is called
    batch: Tensor
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    after_backward: Callable[[], None] = lambda: None
    keep: object = None  # what has to live as long

    def steps(self, n_steps: int) -> list[float]:
        """Seconds of forward, backward and optimizer, each the mean of a step."""
        parts = [0.0, 0.0, 0.0]
        for number in range(1, n_steps + 1):
            is_last = number % self.way.every == 0
            with contextlib.nullcontext() if is_last else self.no_sync():
                stamps = [time.perf_counter()]
                loss = self.case.loss(self.model, self.batch)
                stamps.append(time.perf_counter())
                loss.backward()
                if is_last:
                    self.after_backward()
                stamps.append(time.perf_counter())
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            stamps.append(time.perf_counter())
            for part, (start, end) in enumerate(zip(stamps, stamps[1:], strict=False)):
                parts[part] += (end - start) / n_steps
        return parts

    def steps_on_the_device(self, n_steps: int) -> list[float]:
        """Seconds of a whole step, by events. One step before them lets the host get ahead."""
        self.steps(1)
        with cuda_clock.Span() as span:
            self.steps(n_steps)
        return [span.microseconds() / 1e6 / n_steps]


class Methods:
    """What the parent calls, on all ranks at once."""

    def __init__(self, comm: Any, device: torch.device) -> None:
        self.comm = comm
        self.device = device

    # ---- Fig. 2

    def all_reduce(self, total: int, parts: Sequence[int], rounds: int) -> list[list[float]]:
        """Seconds by round and contender ("fastcomm 10": the total in ten calls)."""
        buffers = {
            "fastcomm": self.comm.empty(total, dtype=torch.float32).zero_(),
            "ddp": torch.zeros(total),
        }
        contenders = {
            f"{who} {n}": functools.partial(self._reduce_parts, who, buffers[who].chunk(n))
            for who in CONTENDERS
            for n in parts
        }
        return [list(row.values()) for row in self._rounds(contenders, rounds)]

    def _reduce_parts(self, who: str, parts: Sequence[Tensor]) -> float:
        """Launches all, then waits for all, as DDP does with its buckets."""
        start = time.perf_counter()
        if who == "fastcomm":
            works = [self.comm.all_reduce(part, async_op=True) for part in parts]
        else:
            works = [dist.all_reduce(part, async_op=True) for part in parts]
        for work in works:
            work.wait()
        return time.perf_counter() - start

    # ---- Figs. 6, 7, 8, 10 and 12

    def train(
        self,
        figure: str,
        model: str,
        ways: Sequence[Mapping[str, Any]],
        rounds: int,
        steps: int,
        warm_up: int,
    ) -> list[list[dict[str, Any]]]:
        """By round and way: seconds of the parts of a step, and of the processor in all."""
        case = case_of(FIGURES[figure], model)
        original, batch = case.make(self.comm.rank)
        original, batch = original.to(self.device), batch.to(self.device)
        trainees = [self._trainee(Way(**way), case, original, batch) for way in ways]
        turns: dict[str, Callable[[], dict[str, Any]]] = {}
        for trainee in trainees:
            trainee.steps(max(WARM_UP_STEPS, trainee.way.every))
            turns[trainee.way.name] = functools.partial(self._turn, trainee, warm_up, steps)
        measured = [list(row.values()) for row in self._rounds(turns, rounds)]
        del trainee, trainees, turns  # models go before their groups do
        gc.collect()
        return measured

    def _turn(self, trainee: Trainee, warm_up: int, n_steps: int) -> dict[str, Any]:
        if warm_up:
            trainee.steps(warm_up)
            self.comm.barrier()
        is_host = self.comm.backend != "nccl"
        start = time.process_time()
        parts = (trainee.steps if is_host else trainee.steps_on_the_device)(n_steps)
        return {"parts": parts, "processor": (time.process_time() - start) / n_steps}

    def _trainee(self, way: Way, case: Case, original: nn.Module, batch: Tensor) -> Trainee:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainee = Trainee(way, case, model, batch, optimizer)
        if way.who == "fastcomm":
            trainee.keep = reducer = self._attach(way, model)
            trainee.no_sync = reducer.no_sync
        elif way.who == "ddp" and way.overlap:
            size = None if way.bucket_mb is None else size_of_buckets(way)
            wrapped = DistributedDataParallel(
                model, bucket_cap_mb=size, gradient_as_bucket_view=way.has_views
            )
            if way.dtype is not None:
                wrapped.register_comm_hook(None, DTYPE_HOOKS[way.dtype])
            trainee.model, trainee.no_sync = wrapped, wrapped.no_sync
        elif way.who == "ddp":
            parameters = list(model.parameters())[::-1]
            trainee.after_backward = functools.partial(
                reduce_gradients, parameters, size_of_buckets(way)
            )
        return trainee

    def _attach(self, way: Way, model: nn.Module) -> fastcomm.Reducer:
        reducer = fastcomm.Reducer(
            self.comm,
            bucket_cap_mb=size_of_buckets(way),
            overlap=way.overlap,
            streams=way.streams,
            wire_dtype=None if way.dtype is None else getattr(torch, way.dtype),
        )
        return reducer.attach(model)

    # ---- Fig. 11

    def converge(self, batch: int, lr: float, iterations: int, every: int) -> list[list[float]]:
        """The loss of every iteration, of fastcomm's training and of DDP's."""
        ours, theirs = converge.make_model(), converge.make_model()
        reducer = fastcomm.Reducer(self.comm).attach(ours)
        wrapped = DistributedDataParallel(theirs)
        losses = [
            losses_of(model, no_sync, self.comm.rank, batch, lr, iterations, every)
            for model, no_sync in ((ours, reducer.no_sync), (wrapped, wrapped.no_sync))
        ]
        reducer.detach()
        return losses

    # ---- what they share

    def _rounds(
        self, contenders: Mapping[str, Callable[[], Any]], rounds: int
    ) -> list[dict[str, Any]]:
        """What each contender's turn returns, by round, in the order of `contenders`."""
        rows = []
        for number in range(-1, rounds):  # the first is a warm-up: connections open their windows
            gc.collect()
            gc.disable()
            row = {}
            for name in shuffled(list(contenders), number):
                self.comm.barrier()
                row[name] = contenders[name]()
            gc.enable()
            rows.append({name: row[name] for name in contenders})
        return rows[1:]


def size_of_buckets(way: Way) -> float:
    return DEFAULT_MB if way.bucket_mb is None else max(way.bucket_mb, LEAST_MB)


def reduce_gradients(parameters: Sequence[nn.Parameter], bucket_mb: float) -> None:
    """DDP without overlap, section 3.2.1 of the paper: backward is over, then DDP's buckets are
    filled, reduced together and emptied.
    """
    buckets: list[list[Tensor]] = [[]]
    nbytes = 0
    for gradient in (p.grad for p in parameters if p.grad is not None):
        if buckets[-1] and nbytes >= bucket_mb * MIB:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(gradient)
        nbytes += gradient.nbytes
    flats = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for work, flat, bucket in zip(works, flats, buckets, strict=True):
        work.wait()
        flat.div_(dist.get_world_size())
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, reduced in zip(bucket, flat.split(sizes), strict=True):
            gradient.copy_(reduced.view_as(gradient))


def losses_of(
    model: nn.Module,
    no_sync: Callable[[], AbstractContextManager[object]],
    rank: int,
    batch: int,
    lr: float,
    iterations: int,
    every: int,
) -> list[float]:
    """By plain SGD on batches of this rank's own. Gradients add up between reductions, as the
    paper's do: the optimizer steps only after one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for number in range(1, iterations + 1):
        x = torch.randn(batch, 16, generator=generator)
        is_last = number % every == 0
        with contextlib.nullcontext() if is_last else no_sync():
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    launch.die_with_parent()
    torch.set_num_threads(1)
    place = json.loads(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = cuda_clock.use_device(rank) if place["wire"] == "nccl" else torch.device("cpu")
    if place["wire"] == "network":
        enter(place["hosts"][rank])
        meeting = [f"tcp://{place['address']}:{PORT + n}" for n in range(2)]
    else:
        meeting = [f"file://{launch.scratch()}/{name}" for name in ("fastcomm", "torch")]
    backend = "hierarchical" if place["wire"] == "network" else place["wire"]
    with fastcomm.init(
        backend, init_method=meeting[0], rank=rank, world_size=world_size, device=device
    ) as comm:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=meeting[1],
            rank=rank,
            world_size=world_size,
        )
        launch.serve(rank, Methods(comm, device))
        gc.collect()
        dist.destroy_process_group()
        comm.barrier()  # rank 0 serves the store that the others are still leaving


def enter(host: Sequence[Any]) -> None:
    """Becomes a process of the host: [its namespace, its environment]."""
    from tests.support import namespaces  # where there is a network

    namespace, environment = host
    namespaces.enter(namespace)
    os.environ.update(environment)


if __name__ == "__main__":
    main()
