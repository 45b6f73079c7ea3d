"""Trains twice, with torch's DDP over Gloo and with a Reducer, and prints both losses of each
step.

torchrun --standalone --nproc-per-node=2 examples/converge.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fastcomm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one host
    dist.init_process_group("gloo")
    with fastcomm.init("shm", group=dist.group.WORLD) as comm:
        ours = make_model()
        fastcomm.Reducer(comm).attach(ours)
        theirs = make_model()
        wrapped = DistributedDataParallel(theirs)
        losses = {
            "fastcomm": train(ours, comm.rank, options.steps),
            "DDP": train(wrapped, comm.rank, options.steps),
        }
        if comm.rank == 0:
            for step in range(0, options.steps, max(1, options.steps // 5)):
                print(
                    f"step {step:4}: "
                    + ", ".join(f"{name} {by_step[step]:.6f}" for name, by_step in losses.items())
                )
            apart = max(
                (a - b).abs().max().item()
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
            )
            print(f"largest difference of a parameter after {options.steps} steps: {apart:g}")
        del wrapped  # before its group: torch may wait for ever otherwise
    dist.destroy_process_group()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def train(model: Callable[[Tensor], Tensor], rank: int, steps: int) -> list[float]:
    """By SGD with momentum on batches of this rank's own; returns the loss of every step."""
    assert isinstance(model, nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
