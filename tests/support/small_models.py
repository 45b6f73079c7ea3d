"""Gives the benchmarks models with hardly any work, which whoever imports this before it runs one
finds in bench/lib/models.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
WIDTHS = [16, 32, 10]


def mlp() -> nn.Module:
    width, hidden, out = WIDTHS
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


sys.path.insert(0, str(BENCH))
from lib import models  # noqa: E402


class FewParameters(models.TinyParameters):
    """A tenth of them."""

    def __init__(self, n: int, numel: int = 8) -> None:
        super().__init__(n // 10, numel)


models.CASES["mlp"] = models.Case(
    "a small MLP", mlp, lambda: torch.randn(4, WIDTHS[0]), models.mean_square
)
models.TinyParameters = FewParameters
