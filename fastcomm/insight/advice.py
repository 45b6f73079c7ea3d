"""Answers what bucket size, how often to synchronise and which wire, by the model of a step.

A plan of buckets is the reducer's business: it comes as a function of the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fastcomm.insight.machine import Machine
from fastcomm.insight.step_model import LocalStep, Plan, Prediction, predict_on, seconds_every

DEFAULT_CAP_MB = 25.0
# The default where the CPU moves data between hosts: what is left when backward ends waits for the
# link, and a bucket costs little beside it.
NETWORK_CAP_MB = 10.0
CAPS_MB = (1.0, 2.0, 5.0, 10.0, DEFAULT_CAP_MB, 50.0, 100.0, 200.0)
# A choice must gain this part of the step: what is predicted is not known better.
WORTHWHILE = 0.02
CHEAP = 0.05  # a part of the step that communication may take
EVERY = (1, 2, 4, 8, 16, 32)

Planner = Callable[[float], Plan]  # the buckets of this size, in MiB


class Choice(NamedTuple):
    """What was chosen, and what the step takes with it and with the default, in seconds."""

    cap_mb: float
    seconds: float
    default_s: float

    @property
    def gain(self) -> float:
        """What part of the default's step it saves."""
        return 1 - self.seconds / self.default_s if self.default_s else 0.0


def distinct_caps(
    plan: Planner, caps: Iterable[float] = CAPS_MB, default: float = DEFAULT_CAP_MB
) -> list[float]:
    """Drops caps that give an identical plan. Keeps of these the default, else the smallest."""
    found: dict[tuple[tuple[int, ...], ...], float] = {}
    for cap in (default, *caps):
        found.setdefault(tuple(tuple(bucket) for bucket in plan(cap)), cap)
    return sorted(found.values())


def choose_cap(predicted: dict[float, float], default: float = DEFAULT_CAP_MB) -> Choice:
    """predicted: seconds of a step by size, the default's among them. Keeps the default unless
    another one saves more than the model's own error.
    """
    best = min(predicted, key=lambda cap: (predicted[cap], abs(cap - default)))
    if predicted[best] > (1 - WORTHWHILE) * predicted[default]:
        best = default
    return Choice(best, predicted[best], predicted[default])


def sweep(machine: Machine, ranks: int, step: LocalStep, plan: Planner) -> dict[float, Prediction]:
    """Predictions by size."""
    return {cap: predict_on(machine, ranks, step, plan(cap)) for cap in distinct_caps(plan)}


def sync_every(prediction: Prediction, step: LocalStep, candidates: Sequence[int] = EVERY) -> int:
    """The fewest backwards per synchronisation with which communication takes at most CHEAP of
    them; the largest candidate if none does. step: see seconds_every.
    """
    for every in candidates:
        quiet = seconds_every(prediction._replace(seconds=step.seconds), step, every)
        if seconds_every(prediction, step, every) <= quiet / (1 - CHEAP):
            return every
    return candidates[-1]


def wire_gain(machine: Machine, ranks: int, step: LocalStep, plan: Plan) -> float:
    """What part of the step a 16-bit wire saves for 32-bit gradients. The casts are not counted:
    they are fused with the copies that are made anyway. In shared memory there is no wire to save:
    casting moves about as much as it spares.
    """
    if machine.algorithm == "direct":
        return 0.0
    whole = predict_on(machine, ranks, step, plan).seconds
    return 1 - predict_on(machine, ranks, step.on_wire(0.5), plan).seconds / whole
