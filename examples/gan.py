"""A generator and a discriminator, with two optimizers and two reducers.

    torchrun --standalone --nproc-per-node=2 examples/gan.py

The generator learns to draw points on a circle. Its backward runs through the discriminator, but
must not reduce the discriminator's gradients: `torch.autograd.grad` triggers no hook there.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastcomm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    with fastcomm.init() as comm:
        torch.manual_seed(0)
        generator = mlp(8, 2).to(comm.device)
        discriminator = mlp(2, 1).to(comm.device)
        fastcomm.Reducer(comm).attach(generator)
        fastcomm.Reducer(comm).attach(discriminator)
        optimizers = [
            torch.optim.Adam(model.parameters(), 1e-3, betas=(0.5, 0.9))
            for model in (discriminator, generator)
        ]
        torch.manual_seed(1 + comm.rank)  # every rank draws points of its own
        for _ in range(options.steps):
            train_discriminator(generator, discriminator, optimizers[0])
            train_generator(generator, discriminator, optimizers[1])
        radius = fakes(generator).norm(dim=1).mean().detach()
        comm.all_reduce(radius, "mean")
        if comm.rank == 0:
            print(
                f"mean radius of what the generator draws: {radius.item():.2f} (the circle's is 1)"
            )


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(n_in, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, n_out),
    )


def reals(like: nn.Module, n: int = 128) -> Tensor:
    angle = 2 * math.pi * torch.rand(n, device=next(like.parameters()).device)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def fakes(generator: nn.Module, n: int = 128) -> Tensor:
    return generator(torch.randn(n, 8, device=next(generator.parameters()).device))


def train_discriminator(
    generator: nn.Module, discriminator: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad()
    loss = (
        F.softplus(-discriminator(reals(generator))).mean()
        + F.softplus(discriminator(fakes(generator).detach())).mean()
    )
    loss.backward()  # reduces the discriminator's gradients
    optimizer.step()


def train_generator(
    generator: nn.Module, discriminator: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad()
    points = fakes(generator)
    loss = F.softplus(-discriminator(points)).mean()
    (towards_real,) = torch.autograd.grad(
        loss, points
    )  # through the discriminator, leaving it alone
    points.backward(towards_real)  # reduces the generator's gradients
    optimizer.step()


if __name__ == "__main__":
    main()
