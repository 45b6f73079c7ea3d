"""Steps that a rank makes by itself, for tests of LocalSGD and DiLoCo."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.models import backward

NESTEROV: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, i: int) -> None:
    """With the gradients of the rank's i-th batch."""
    optimizer.zero_grad()
    backward(model, rank, i)
    optimizer.step()
