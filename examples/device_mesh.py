"""Four ranks as a mesh: two copies of a model, each divided over two ranks. Every step compares its
gradients with those of one process that has the whole batch.

    torchrun --standalone --nproc-per-node=4 examples/device_mesh.py tensor-parallel
    torchrun --standalone --nproc-per-node=4 examples/device_mesh.py fsdp
    torchrun --standalone --nproc-per-node=4 examples/device_mesh.py hsdp

tensor-parallel and fsdp: torch divides each copy, and fastcomm reduces between the copies. hsdp:
torch does both, with fastcomm as its backend.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fastcomm


def main() -> None:
    ways = {
        "tensor-parallel": train_tensor_parallel,
        "fsdp": train_sharded_copies,
        "hsdp": train_hsdp,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=ways)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("fastcomm")
    worst = ways[options.way](options.steps)
    print(f"rank {dist.get_rank()}: gradients differ from one process's by up to {worst:.0e}")
    dist.destroy_process_group()


def train_tensor_parallel(steps: int) -> float:
    model = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with fastcomm.init(group=mesh["dp"].get_group(), device="cpu") as copies:
        copy_values(model, copies)
        # The ranks of a copy read the same batch.
        return train(model, steps, copies.rank, copies.world_size, copies)


def train_sharded_copies(steps: int) -> float:
    model = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    with fastcomm.init(group=mesh["dp"].get_group(), device="cpu") as copies:
        copy_values(model, copies)
        return train(model, steps, dist.get_rank(), dist.get_world_size(), copies)


def train_hsdp(steps: int) -> float:
    model = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard"))
    fully_shard(model, mesh=mesh)
    return train(model, steps, dist.get_rank(), dist.get_world_size(), None)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_values(model: nn.Module, copies: fastcomm.Communicator) -> None:
    """Before training: the first copy's values in all copies."""
    for parameter in model.parameters():
        copies.broadcast(local(parameter.data))


def reduce_gradients(model: nn.Module, copies: fastcomm.Communicator) -> None:
    """After each backward: the mean over the copies."""
    for parameter in model.parameters():
        copies.all_reduce(local(parameter.grad), "mean")


def train(
    model: nn.Module, steps: int, part: int, parts: int, copies: fastcomm.Communicator | None
) -> float:
    """Trains on one of the equal parts of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(steps):
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss_of(model, batch.chunk(parts)[part]).backward()
        if copies is not None:
            reduce_gradients(model, copies)
        worst = max(worst, difference(model, batch))
        optimizer.step()
    return worst


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, dims=1)).square().mean()


def difference(model: nn.Module, batch: Tensor) -> float:
    """By how much the gradients differ from those of one process with equal parameters."""
    alone = mlp()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    with torch.no_grad():
        for parameter, own in pairs:
            own.copy_(full(parameter))
    loss_of(alone, batch).backward()
    return max((full(p.grad) - own.grad).abs().max().item() for p, own in pairs)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
