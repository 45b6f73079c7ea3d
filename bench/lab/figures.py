"""What paper.py measures for each figure of "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training" (Li et al., VLDB 2020, arXiv 2006.15704): the ways of a step, and the models.
docs/lab/paper.md says what the paper found. This file measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from lib import models
from lib.models import CASES, Case

SIZES_MB = (0, 1, 5, 10, 25, 50)  # 0: a bucket for each gradient, as in the paper
DEFAULT_MB = 25  # of DDP and of a Reducer
# Our ResNet is a quarter of the paper's: in one bucket of 25 MB there is nothing to overlap.
QUARTER_MB = 5
EVERY = (1, 2, 4, 8)
BETWEEN_MB = (2, 5, 10, 25)  # between hosts; one of them is the best for each contender
NARROW = ("bfloat16", "int8")
# Parameters of one all-reduce, of so many in all. A link of the network is slow: a tenth of them.
TOTALS = {"shm": 60_000_000, "network": 6_000_000}
PARTS = (3000, 1000, 300, 100, 30, 10, 3, 1)

CONTENDERS = ("fastcomm", "ddp")


@dataclass(frozen=True)
class Way:
    """How a training step reduces its gradients. `bucket_mb`: None for the contender's default.
    `every`: the reduction comes every so many steps, and the optimizer with it. `dtype`: in which
    gradients travel, by its name in torch; None for their own. `has_views`: DDP's gradients are
    views into its buckets, as fastcomm's are.
    """

    who: str  # "local", "fastcomm" or "ddp"
    bucket_mb: float | None = None
    overlap: bool = True
    every: int = 1
    dtype: str | None = None
    has_views: bool = False

    @property
    def name(self) -> str:
        words = [
            f"{self.bucket_mb:g} MB" if self.bucket_mb is not None else "",
            "" if self.overlap else "no overlap",
            f"every {self.every}" if self.every != 1 else "",
            self.dtype or "",
        ]
        return ", ".join([self.who, *filter(None, words)])

    @property
    def local(self) -> Way:
        """The same step without communication."""
        return Way("local", every=self.every)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Figure:
    title: str
    ways: tuple[Way, ...] = ()
    rounds: int = 8
    steps: int = 1  # of each turn
    warm_up: int = 0  # steps before those: connections that have been idle close their windows
    models: Mapping[str, Case] = field(default_factory=dict)


def small_bert() -> models.Bert:
    return models.Bert(width=384, n_layers=6, n_heads=6, n_tokens=1000, length=64)


# What stands for the paper's two models on a CPU: small enough for a dozen of them side by side.
MODELS = {
    "resnet": Case(
        "ResNet-50 of half the width, 4 images of 64 x 64",
        lambda: models.resnet50(width=32, n_classes=100),
        lambda: torch.randn(4, 3, 64, 64),
        models.mean_square,
    ),
    "bert": Case(
        "BERT of 6 layers of width 384, 2 x 64 tokens",
        small_bert,
        lambda: torch.randint(1000, (2, 64)),
        models.mean_square,
    ),
}
# Two more, the first of which has more bytes to send than backward takes.
MORE_MODELS = {
    "transformer": Case(
        "TransformerEncoder of 3 layers of width 512, 4 x 64 tokens",
        lambda: models.transformer(n_layers=3),
        lambda: torch.randn(4, 64, 512),
        models.mean_square,
    ),
    "conv": Case(
        "conv net of 6 layers, 8 images of 32 x 32",
        lambda: models.pyramid((64, 128, 256, 256, 512, 256)),
        lambda: torch.randn(8, 3, 32, 32),
        models.mean_square,
    ),
}

FIGURES = {
    "fig2": Figure(title="all-reduce of a fixed total, by the size of each tensor", rounds=5),
    "fig6": Figure(
        title="parts of a step, with and without overlap",
        ways=(
            Way("local"),
            *(
                Way(who, QUARTER_MB, overlap=overlap)
                for who in CONTENDERS
                for overlap in (False, True)
            ),
        ),
        rounds=16,
        models=MODELS,
    ),
    "fig7": Figure(
        title="latency by bucket size",
        ways=(Way("local"), *(Way(who, mb) for who in CONTENDERS for mb in SIZES_MB)),
        models=MODELS,
    ),
    "fig10": Figure(
        title="latency with the reduction every 1, 2, 4 and 8 steps",
        ways=tuple(Way(who, every=every) for who in ("local", *CONTENDERS) for every in EVERY),
        rounds=3,
        steps=max(EVERY),
        models=MODELS,
    ),
    "wires": Figure(
        title="latency by the dtype in which gradients travel",
        ways=(
            Way("local"),
            *(Way("fastcomm", QUARTER_MB, dtype=dtype) for dtype in (None, "bfloat16", "int8")),
            *(Way("ddp", QUARTER_MB, dtype=dtype) for dtype in (None, "float16")),
        ),
        rounds=16,
        models=MODELS,
    ),
    "hosts": Figure(
        title="what communication adds to a step between hosts",
        ways=(
            Way("local"),
            *(Way("ddp", mb, has_views=True) for mb in BETWEEN_MB),
            *(Way("fastcomm", mb) for mb in BETWEEN_MB),
            *(Way("fastcomm", mb, dtype=dtype) for dtype in NARROW for mb in BETWEEN_MB[:-1]),
        ),
        warm_up=1,
        models=MODELS | MORE_MODELS,
    ),
}


def case_of(figure: Figure, name: str) -> Case:
    """One of the figure's own models, or any of bench/lib/models.py."""
    return figure.models[name] if name in figure.models else CASES[name]
