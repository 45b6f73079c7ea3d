"""What bench/paper.py measures for each figure of "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training" (Li et al., VLDB 2020, arXiv 2006.15704): the ways of a step, the models,
what the paper found, and what we expected before anything was measured.

Numbers of the paper are here only where public text quotes them: `where` names the section, `seen`
who quotes it. What we only remember, and all values of plots, is left out, and `left_out` says so.
This file measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from lib import models
from lib.models import CASES, CUDA_CASES, Case

SIZES_MB = (0, 1, 5, 10, 25, 50)  # 0: a bucket for each gradient, as in the paper
DEFAULT_MB = 25  # of DDP and of a Reducer
# Our ResNet is a quarter of the paper's: in one bucket of 25 MB there is nothing to overlap.
QUARTER_MB = 5
EVERY = (1, 2, 4, 8)
STREAMS = (1, 3, 5)
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
    streams: int = 1
    dtype: str | None = None
    has_views: bool = False

    @property
    def name(self) -> str:
        words = [
            f"{self.bucket_mb:g} MB" if self.bucket_mb is not None else "",
            "" if self.overlap else "no overlap",
            f"every {self.every}" if self.every != 1 else "",
            f"{self.streams} streams" if self.streams != 1 else "",
            self.dtype or "",
        ]
        return ", ".join([self.who, *filter(None, words)])

    @property
    def local(self) -> Way:
        """The same step without communication."""
        return Way("local", every=self.every)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Setting(NamedTuple):
    """Of a training whose loss is looked at, in Fig. 11."""

    batch: int
    lr: float
    iterations: int


# The learning rates and batches are the paper's as we remember them: they are our settings, too.
SETTINGS = (Setting(8, 0.02, 1500), Setting(256, 0.06, 600))


@dataclass(frozen=True)
class Figure:
    title: str
    found: str  # by the paper
    numbers: tuple[Mapping[str, Any], ...]  # of the paper
    left_out: str
    expected: Mapping[str, str]  # by wire, before anything was measured
    ways: tuple[Way, ...] = ()
    hosts: tuple[int, ...] = (1, 1)  # ranks on each host of the network; in all, on shm
    rounds: int = 8
    steps: int = 1  # of each turn
    warm_up: int = 0  # steps before those: connections that have been idle close their windows
    models: Mapping[str, Case] = field(default_factory=dict)

    def paper(self) -> dict[str, Any]:
        return {"found": self.found, "numbers": list(self.numbers), "left_out": self.left_out}


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
_BUCKET_WAYS = (
    Way("local"),
    *(Way(who, mb) for who in CONTENDERS for mb in SIZES_MB),
)
_SPEEDUPS = "section 5.1; quoted in public lecture notes"

FIGURES = {
    "fig2": Figure(
        title="all-reduce of a fixed total, by the size of each tensor",
        found="The larger the tensors, the shorter the total time, over NCCL and over Gloo.",
        numbers=(
            {
                "what": "parameters in all, float32",
                "value": 60_000_000,
                "where": "section 3.2.2; quoted in public reading notes",
            },
        ),
        left_out="the times (a plot) and the size from which Gloo gains nothing more",
        expected={
            "shm": "Gloo falls until about 500,000 parameters and is flat from there. fastcomm is "
            "flat from 20,000 on, and never slower than Gloo.",
            "network": "Both are bound by the link from 100,000 parameters on, and equal within "
            "10% there. Below, each call's round trips cost Gloo more than fastcomm.",
        },
        rounds=5,
    ),
    "fig6": Figure(
        title="parts of a step, with and without overlap",
        found="Overlapping communication with backward saves time, most where the two take about "
        "as long; backward with communication is the largest part of a step.",
        numbers=tuple(
            {"what": f"speedup by overlap, {model}, {wire}", "value": value, "unit": "%"}
            | {"where": _SPEEDUPS}
            for model, wire, value in (
                ("ResNet50", "NCCL", 38.0),
                ("BERT", "NCCL", 35.2),
                ("ResNet50", "Gloo", 26.8),
                ("BERT", "Gloo", 21.5),
            )
        ),
        left_out="the lengths of the parts (a plot)",
        expected={
            "shm": "Nothing for fastcomm (within 3%): the cores that compute also move the data. "
            "At most 10% for DDP, whose threads compete with backward for the same cores.",
            "network": "10% to 25% for both, and less for the larger model: a link of 1 Gbit/s "
            "takes longer than backward.",
        },
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
        found="The best size lies between the extremes; a good one may be more than twice as fast "
        "as a bad one.",
        numbers=(
            {"what": "best size, ResNet50, NCCL", "value": [10, 25], "unit": "MB"}
            | {"where": "section 5.2; quoted publicly"},
        ),
        left_out="the latencies (a plot) and the best sizes of BERT and over Gloo",
        expected={
            "shm": "fastcomm: within 5% for all sizes but 0. DDP: 0 is the worst, by 10% or more; "
            "flat from 5 MB on.",
            "network": "0 is the worst. The best is 1 to 10 MB, and 50 MB (the whole model, so "
            "nothing overlaps) is 10% to 25% slower than that.",
        },
        ways=_BUCKET_WAYS,
        models=MODELS,
    ),
    "fig8": Figure(
        title="latency by bucket size, with twice as many ranks",
        found="As in Fig. 7. From 16 to 32 GPUs, buckets that are not small lose little.",
        numbers=(),
        left_out="the latencies (a plot)",
        expected={
            "shm": "As in Fig. 7, at twice the step: four ranks share two cores. Buckets of 0 MB "
            "lose more than those of 5 MB and more.",
            "network": "fastcomm's overhead stays that of Fig. 7, since each host's ranks reduce "
            "in memory first; Gloo's grows by a half, as more crosses each link.",
        },
        ways=_BUCKET_WAYS,
        hosts=(2, 2),
        rounds=5,
        models=MODELS,
    ),
    "fig10": Figure(
        title="latency with the reduction every 1, 2, 4 and 8 steps",
        found="Skipping synchronisation reduces the amortised overhead of communication "
        "significantly.",
        numbers=(
            {"what": "steps between reductions", "value": [1, 2, 4, 8]}
            | {"where": "Fig. 10; quoted in public reading notes"},
        ),
        left_out="the latencies (a plot) and the percentages saved at 256 GPUs",
        expected={
            "shm": "fastcomm: 5% of the step at every 8; most of it is the optimizer's, not the "
            "communication's. DDP: 15% to 30%.",
            "network": "The overhead over local falls as 1/n, for both: at every 8, half of the "
            "step or more is saved.",
        },
        ways=tuple(Way(who, every=every) for who in ("local", *CONTENDERS) for every in EVERY),
        rounds=3,
        steps=max(EVERY),
        models=MODELS,
    ),
    "fig11": Figure(
        title="loss with the reduction every 1, 2, 4 and 8 steps",
        found="Skipping synchronisation, used appropriately, does not noticeably slow down "
        "convergence.",
        numbers=(),
        left_out="the losses (a plot); rates and batches are used as remembered, unchecked",
        expected={
            "shm": "Batch 8: the four curves meet within noise. Batch 256: every 8 is uneven at "
            "first. fastcomm's losses are DDP's, to the bit.",
            "network": "As over shared memory: the wire changes no loss.",
        },
    ),
    "wires": Figure(
        title="latency by the dtype in which gradients travel",
        found="Nothing: gradient compression is left to future work.",
        numbers=(),
        left_out="",
        expected={
            "network": "fastcomm adds 0.45 of what DDP adds in float32 with bfloat16, and 0.3 with "
            "int8. DDP's hook for float16 adds 0.6: Gloo adds halves slowly.",
        },
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
        found="Nothing: its figures are of one network, and of float32.",
        numbers=(),
        left_out="",
        expected={
            "network": "Each at its best size, of what DDP adds: at 1 Gbit/s with 20 ms a round "
            "trip 0.95 to 1.0, with bfloat16 0.5, with int8 0.4; at 10 Gbit/s 1.1 to 1.2, and 0.9 "
            "in fewer bits; with four hosts 1.1, 0.6 and 0.45; with two hosts of two ranks 0.75 to "
            "0.85, 0.5 and 0.4. Of the processor's time that DDP adds: 1.0 at 1 Gbit/s, 1.1 at 10 "
            "and with four hosts, 1.2 with hosts of two.",
        },
        ways=(
            Way("local"),
            *(Way("ddp", mb, has_views=True) for mb in BETWEEN_MB),
            *(Way("fastcomm", mb) for mb in BETWEEN_MB),
            *(Way("fastcomm", mb, dtype=dtype) for dtype in NARROW for mb in BETWEEN_MB[:-1]),
        ),
        warm_up=1,
        models=MODELS | MORE_MODELS,
    ),
    "fig12": Figure(
        title="latency with 1, 3 and 5 communicators in turn",
        found="Several process groups in turn can be faster than one, most for large models on "
        "many GPUs.",
        numbers=(
            {"what": "communicators", "value": [1, 3, 5]}
            | {"where": "Fig. 12; 3 to 5 as the good choice quoted in public reading notes"},
        ),
        left_out="the latencies (a plot) and the percentages of section 5.4",
        expected={
            "nccl": "On one GPU all are equal within 2%: nothing crosses a link. On several, 3 are "
            "faster than 1 where one communicator does not fill the links.",
        },
        ways=(
            Way("local"),
            *(Way("fastcomm", streams=n) for n in STREAMS),
            Way("ddp"),
        ),
        rounds=8,
        steps=3,
        models=CUDA_CASES,
    ),
}


def case_of(figure: Figure, name: str) -> Case:
    """One of the figure's own models, or any of bench/lib/models.py."""
    return figure.models[name] if name in figure.models else CASES[name]
