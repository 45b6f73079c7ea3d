"""One rank of bench/allreduce.py: the all-reduces that are measured, their timing and the check of
their results.

Started by bench/lib/launch.py. `torch` as the argument makes a rank of fastcomm, of Gloo
(torch.distributed) and of the streaming bound; the name of an MPI, under its mpiexec, makes one of
that; `cuda` one of fastcomm and of torch.distributed, both over NCCL. Every peer is called from
Python, on tensors of its own.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lib import cuda_clock, harness, launch
from lib.allreduce_mpi import NAMES, world
from lib.allreduce_options import GROUPS
from lib.arithmetic import reduction_of
from torch import Tensor

TIMEOUT = timedelta(seconds=60)

# A prime: no boundary of a shard, a chunk or a page falls on the same place of the pattern twice.
PATTERN = 65_537


@dataclass(frozen=True)
class Settings:
    """What all calls of a run have in common. `op` as fastcomm spells it; `tensors`: where fastcomm
    has them, "comm" or "ordinary".
    """

    rank: int
    world_size: int
    dtype: torch.dtype
    op: str
    tensors: str
    device: torch.device = torch.device("cpu")
    unchanged: bool = False

    @property
    def neutral(self) -> int:
        """What may be reduced again and again: one for a product, zero for all else."""
        return 1 if self.op == "prod" else 0


@dataclass(frozen=True)
class Prepared:
    """One peer's buffers of one size, and the calls on them. Out of place, `out` is to become the
    reduction of all ranks' `inp`.
    """

    inp: Tensor
    out: Tensor
    in_place: Callable[[], object]
    out_of_place: Callable[[], object]


def after_copy(inp: Tensor, out: Tensor, in_place: Callable[[], object]) -> Callable[[], None]:
    """The out-of-place call of a peer that has none of its own."""

    def out_of_place() -> None:
        out.copy_(inp)
        in_place()

    return out_of_place


def divided(call: Callable[[], object], out: Tensor, world_size: int) -> Callable[[], None]:
    """The mean of a peer that has none of its own: what DDP does, sum and divide."""

    def mean() -> None:
        call()
        out.div_(world_size)

    return mean


class Fastcomm:
    def __init__(self, settings: Settings, backend: str) -> None:
        import fastcomm

        self.settings = settings
        self.comm = fastcomm.init(
            backend,
            init_method=f"file://{launch.scratch()}/fastcomm",
            rank=settings.rank,
            world_size=settings.world_size,
            device=settings.device,
            timeout=TIMEOUT,
        )
        self.barrier = self.comm.barrier
        self.close = self.comm.close

    @functools.cache  # noqa: B019 (there is one peer, which lives as long as the rank)
    def alone(self) -> Any:
        """A communicator of this rank only."""
        import fastcomm

        method = f"file://{launch.scratch()}/alone{self.settings.rank}"
        return fastcomm.init("shm", init_method=method, rank=0, world_size=1, timeout=TIMEOUT)

    def prepare(self, count: int) -> Prepared:
        return self.prepare_in(self.settings.tensors, count)

    def prepare_in(self, tensors: str, count: int) -> Prepared:
        dtype, op, device = self.settings.dtype, self.settings.op, self.settings.device
        inp = torch.empty(count, dtype=dtype, device=device)
        out = self.comm.empty(count, dtype=dtype) if tensors == "comm" else torch.empty_like(inp)
        in_place = functools.partial(self.comm.all_reduce, out, op)
        return Prepared(inp, out, in_place, after_copy(inp, out, in_place))


class Ordinary:
    """fastcomm's communicator on tensors it knows nothing of."""

    def __init__(self, peer: Fastcomm) -> None:
        self.barrier = peer.barrier
        self.prepare = functools.partial(peer.prepare_in, "ordinary")

    def close(self) -> None:
        pass


class Bound:
    """The streaming bound: every rank reduces `world_size` private shards of 1 / world_size of the
    size into all of them, no flags. A peer has to read and write as much memory for the same
    all-reduce, whatever else it does.
    """

    def __init__(self, settings: Settings, barrier: Callable[[], object]) -> None:
        self.settings = settings
        self.barrier = barrier

    def prepare(self, count: int) -> Prepared:
        shards = [
            torch.zeros(max(1, count // self.settings.world_size), dtype=self.settings.dtype)
            for _ in range(self.settings.world_size)
        ]
        reduce = reduction_of(shards, self.settings.op)
        return Prepared(shards[0], shards[0], reduce, reduce)

    def close(self) -> None:
        pass


class TorchDistributed:
    """A group of torch.distributed's. Gloo has no mean."""

    def __init__(self, settings: Settings, backend: str) -> None:
        import torch.distributed as dist

        self.settings = settings
        self.close: Callable[[], object] = dist.destroy_process_group
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                init_method=f"file://{launch.scratch()}/{backend}",
                rank=settings.rank,
                world_size=settings.world_size,
                timeout=TIMEOUT,
            )
            group = dist.group.WORLD
        else:
            group = dist.new_group(backend=backend, timeout=TIMEOUT)
            self.close = lambda: None  # the first one ends all groups
        self.barrier = functools.partial(dist.barrier, group=group)
        ops = {
            "sum": dist.ReduceOp.SUM,
            "mean": dist.ReduceOp.SUM,
            "prod": dist.ReduceOp.PRODUCT,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
        }
        self._all_reduce = functools.partial(dist.all_reduce, op=ops[settings.op], group=group)

    def prepare(self, count: int) -> Prepared:
        inp, out = (
            torch.empty(count, dtype=self.settings.dtype, device=self.settings.device)
            for _ in range(2)
        )
        in_place: Callable[[], object] = functools.partial(self._all_reduce, out)
        if self.settings.op == "mean":
            in_place = divided(in_place, out, self.settings.world_size)
        return Prepared(inp, out, in_place, after_copy(inp, out, in_place))


class Mpi:
    """MPI through mpi4py. Its own out-of-place call is used; it has no mean."""

    def __init__(self, settings: Settings) -> None:
        from mpi4py import MPI

        self.settings = settings
        self.MPI = MPI
        self.barrier = MPI.COMM_WORLD.Barrier
        self.close = MPI.Finalize
        ops = {"sum": MPI.SUM, "mean": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
        self._all_reduce = functools.partial(MPI.COMM_WORLD.Allreduce, op=ops[settings.op])

    def prepare(self, count: int) -> Prepared:
        inp, out = (torch.empty(count, dtype=self.settings.dtype) for _ in range(2))
        calls: list[Callable[[], object]] = [
            functools.partial(self._all_reduce, source, out.numpy())
            for source in (self.MPI.IN_PLACE, inp.numpy())
        ]
        if self.settings.op == "mean":
            calls = [divided(call, out, self.settings.world_size) for call in calls]
        return Prepared(inp, out, *calls)


class Methods:
    """What the parent calls, on all ranks at once."""

    def __init__(self, settings: Settings, peers: dict[str, Any]) -> None:
        self.settings = settings
        self.peers = peers
        self.prepared: dict[str, Prepared] = {}

    def prepare(self, peer: str, count: int) -> None:
        """Buffers of `count` elements, every page of them touched."""
        prepared = self.prepared[peer] = self.peers[peer].prepare(count)
        for buffer in {prepared.inp, prepared.out}:
            buffer.fill_(self.settings.neutral)

    def release(self, peer: str) -> None:
        del self.prepared[peer]

    def measure(self, peer: str, placement: str, warmup: int, iterations: int) -> list[int]:
        """Nanoseconds of each of `iterations` calls."""
        prepared, barrier = self.prepared[peer], self.peers[peer].barrier
        call = getattr(prepared, placement)
        source = prepared.out if placement == "in_place" else prepared.inp

        def rewrite() -> None:
            source.fill_(self.settings.neutral)
            barrier()

        for _ in range(warmup):
            call()
        gc.disable()
        barrier()
        nanoseconds = (
            harness.time_calls(call, iterations)
            if self.settings.unchanged
            else harness.time_fresh_calls(call, rewrite, iterations)
        )
        gc.enable()
        return nanoseconds

    def probe(self, calls: int) -> float:
        """Nanoseconds of a barrier, less the same call where there is no other rank."""
        own: Fastcomm = self.peers["fastcomm"]
        gc.disable()
        alone, together = (
            statistics.median(harness.time_calls(comm.barrier, calls))
            for comm in (own.alone(), own.comm)
        )
        gc.enable()
        return together - alone

    def check(self, peer: str, placement: str) -> int:
        """How many elements of this rank's result are wrong."""
        prepared = self.prepared[peer]
        own = contribution(self.settings.rank, self.settings.op)
        if placement == "in_place":
            fill(prepared.out, own)
        else:
            fill(prepared.inp, own)
            prepared.out.fill_(0)
        self.peers[peer].barrier()
        getattr(prepared, placement)()
        return count_wrong(prepared.out, expected(self.settings), tolerance(self.settings))


class CudaMethods(Methods):
    def measure(self, peer: str, placement: str, warmup: int, iterations: int) -> list[int]:
        """As on the CPU, by events: the mean of all calls stands for each."""
        call = getattr(self.prepared[peer], placement)
        self.peers[peer].barrier()
        for _ in range(warmup):
            call()
        gc.disable()
        with cuda_clock.Span() as span:
            for _ in range(iterations):
                call()
        gc.enable()
        # At least one: calls that take nothing would be planned without end.
        return [max(1, round(1e3 * span.microseconds() / iterations))] * iterations


def contribution(rank: int, op: str) -> Tensor:
    """One period of a rank's input. Small whole numbers: their sum over 64 ranks, and their
    product, are exact in every dtype.
    """
    index = torch.arange(PATTERN)
    if op == "prod":
        return 1 + (index >> rank) % 2 if rank < 4 else torch.ones_like(index)
    return index * (2 * rank + 3) // 7 % 4


def expected(settings: Settings) -> Tensor:
    """One period of the result, in float64."""
    inputs = torch.stack(
        [contribution(rank, settings.op) for rank in range(settings.world_size)]
    ).double()
    reductions: dict[str, Callable[[int], Tensor]] = {
        "sum": inputs.sum,
        "mean": inputs.mean,
        "prod": inputs.prod,
        "min": inputs.amin,
        "max": inputs.amax,
    }
    return reductions[settings.op](0)


def tolerance(settings: Settings) -> float:
    """Relative. Only a mean may be rounded, and as nccl-tests we allow it two units in the last
    place.
    """
    return 2 * torch.finfo(settings.dtype).eps if settings.op == "mean" else 0.0


def fill(buffer: Tensor, period: Tensor) -> None:
    period = period.to(buffer.device)
    for part in buffer.split(PATTERN):
        part.copy_(period[: part.numel()])


def count_wrong(buffer: Tensor, period: Tensor, relative: float) -> int:
    wrong = 0
    period = period.to(buffer.device)
    for part in buffer.split(PATTERN):
        want = period[: part.numel()]
        # Not "how many are off by more": a NaN is wrong too.
        right = (part.double() - want).abs() <= relative * want.abs()
        wrong += part.numel() - int(right.sum())
    return wrong


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("torch", "cuda", *NAMES))
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--op", required=True)
    parser.add_argument("--tensors", default="ordinary")
    parser.add_argument("--groups", nargs="*", default=[], help="of torch.distributed")
    parser.add_argument("--unchanged", action="store_true")
    return parser.parse_args()


def make_settings(options: argparse.Namespace) -> Settings:
    rank = int(world().rank) if options.kind in NAMES else int(os.environ["RANK"])
    device = torch.device("cpu")
    if options.kind == "cuda":
        device = cuda_clock.use_device(rank)
    return Settings(
        rank,
        int(os.environ["WORLD_SIZE"]),
        getattr(torch, options.dtype),
        options.op,
        options.tensors,
        device,
        options.unchanged,
    )


def make_peers(options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    if options.kind in NAMES:
        return {options.kind: Mpi(settings)}
    if options.kind == "cuda":
        own = Fastcomm(settings, "nccl")
        nccl = TorchDistributed(settings, "nccl" if settings.device.type == "cuda" else "gloo")
        return {"fastcomm": own, "ordinary": Ordinary(own), "nccl": nccl}
    own = Fastcomm(settings, "shm")
    peers: dict[str, Any] = {
        "fastcomm": own,
        "bound": Bound(settings, own.barrier),
    }
    return peers | {peer: TorchDistributed(settings, GROUPS[peer]) for peer in options.groups}


def main() -> None:
    options = parse_options()
    launch.die_with_parent()
    torch.set_num_threads(1)
    settings = make_settings(options)
    peers = make_peers(options, settings)
    methods = CudaMethods if options.kind == "cuda" else Methods
    launch.serve(settings.rank, methods(settings, peers))
    for peer in peers.values():
        peer.close()


if __name__ == "__main__":
    main()
