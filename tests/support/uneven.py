"""What the tests of join() train: a small model, on other data for each rank and batch."""

from __future__ import annotations

import torch
from torch import nn

LR = 0.05
ANNOUNCING = ("shm", "group", "hierarchical")  # on which ranks hear of any collective


def small(number=0):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2)).double()


def data_of(rank, i):
    """Rows of data: others for every rank and batch, and of another number."""
    generator = torch.Generator("cpu").manual_seed(1000 * rank + i)
    x = torch.randn(1 + (rank + i) % 3, 4, generator=generator, dtype=torch.float64, device="cpu")
    return x.to(torch.get_default_device())


def loss_of(model, x):
    return (model(x) - x[:, :2]).square().mean()
