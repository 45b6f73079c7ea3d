"""Steps that a rank makes by itself, for tests of LocalSGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fastcomm
from tests.support.models import backward, mlp

NESTEROV: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def training(
    comm: Any, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **reducing: Any
) -> tuple[nn.Module, fastcomm.Reducer, torch.optim.Optimizer]:
    """A model, attached to a reducer, and its optimizer."""
    model = mlp()
    return model, fastcomm.Reducer(comm, **reducing).attach(model), make(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, i: int) -> None:
    """With the gradients of the rank's i-th batch."""
    optimizer.zero_grad()
    backward(model, rank, i)
    optimizer.step()
