"""Predicts a training step: forward, a backward whose gradients become ready one after the other,
the reduction of buckets beside it, and the optimizer.

One network, or one memory, carries the buckets in the order of the plan; the last one is launched
when the backward has ended, as Reducer does it. Where communicating takes cores that compute, it
delays the rest of the backward by that much, so it hides nothing. Pure arithmetic: measures
nothing, knows no reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastcomm.comm.objects import tellable
from fastcomm.insight.collectives import Cost
from fastcomm.insight.machine import Machine

Plan = Sequence[Sequence[int]]  # buckets, each of indices into LocalStep.gradients, in launch order


@tellable
class Gradient(NamedTuple):
    """nbytes: on the wire. ready_s: when it is ready, counted from the backward's begin."""

    nbytes: float
    ready_s: float


@tellable
@dataclass(frozen=True)
class LocalStep:
    """One rank's step without communication, in seconds."""

    gradients: tuple[Gradient, ...]
    backward_s: float
    forward_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def nbytes(self) -> float:
        return sum(gradient.nbytes for gradient in self.gradients)

    def crowded(self, factor: float) -> LocalStep:
        """The same step where everything computed takes `factor` times as long."""
        return LocalStep(
            tuple(Gradient(g.nbytes, g.ready_s * factor) for g in self.gradients),
            self.backward_s * factor,
            self.forward_s * factor,
            self.optimizer_s * factor,
        )

    def on_wire(self, factor: float) -> LocalStep:
        """With gradients of `factor` times the bytes: 0.5 for a 16-bit wire."""
        smaller = tuple(Gradient(g.nbytes * factor, g.ready_s) for g in self.gradients)
        return replace(self, gradients=smaller)

    def lasting(self, parts: Mapping[str, float]) -> LocalStep:
        """With other durations of "forward", "backward" and "optimizer"; gradients become ready at
        the same parts of the backward.
        """
        backward_s = parts.get("backward", self.backward_s)
        factor = backward_s / self.backward_s if self.backward_s else 1.0
        return LocalStep(
            tuple(Gradient(g.nbytes, g.ready_s * factor) for g in self.gradients),
            backward_s,
            parts.get("forward", self.forward_s),
            parts.get("optimizer", self.optimizer_s),
        )


class BucketPrediction(NamedTuple):
    """The times of one bucket, counted from the step's begin: when its last gradient was ready, and
    when its reduction began and ended.
    """

    nbytes: float
    ready_s: float
    start_s: float
    end_s: float


class Prediction(NamedTuple):
    """seconds: the whole step. local_s: the same without communication. exposed_s: what is waited
    for after the backward. delay_s: what communication has taken from the cores during it.
    """

    seconds: float
    local_s: float
    exposed_s: float
    delay_s: float
    buckets: tuple[BucketPrediction, ...]

    @property
    def communication_s(self) -> float:
        """What communication adds to the step."""
        return self.seconds - self.local_s


def predict(
    step: LocalStep,
    plan: Plan,
    cost: Callable[[float], Cost],
    *,
    delays_compute: bool = False,
    overlap: bool = True,
) -> Prediction:
    """The step with these buckets, each of which costs `cost(nbytes)`.

    delays_compute: the core seconds of a bucket delay the gradients that come after it.
    overlap: buckets are launched as they become full; else all at the end of the backward.
    """
    end_of_compute = step.forward_s + step.backward_s
    delay = free = 0.0
    times = []
    for number, bucket in enumerate(plan):
        is_early = overlap and number < len(plan) - 1
        full = max((step.gradients[i].ready_s for i in bucket), default=0.0)
        ready = (step.forward_s + full if is_early else end_of_compute) + delay
        nbytes = sum(step.gradients[i].nbytes for i in bucket)
        seconds, core_seconds = cost(nbytes)
        start = max(ready, free)
        free = start + seconds
        times.append(BucketPrediction(nbytes, ready, start, free))
        if delays_compute and is_early:
            delay += core_seconds
    end_of_backward = end_of_compute + delay
    exposed = max(0.0, free - end_of_backward)
    seconds = end_of_backward + exposed + step.optimizer_s
    return Prediction(seconds, step.seconds, exposed, delay, tuple(times))


def predict_on(
    machine: Machine, ranks: int, step: LocalStep, plan: Plan, *, overlap: bool = True
) -> Prediction:
    """Predicts for so many ranks of a machine. step: as one rank makes it with its own core."""
    crowding = machine.crowding(ranks)

    return predict(
        step.crowded(crowding),
        plan,
        lambda nbytes: machine.all_reduce(nbytes, ranks).crowded(crowding),
        delays_compute=machine.delays_compute(ranks),
        overlap=overlap,
    )


def predict_sharded(machine: Machine, ranks: int, step: LocalStep, plan: Plan) -> Prediction:
    """A step of which each rank's optimizer makes its shard only: gradients are reduce-scattered
    beside the backward, and after the optimizer all parameters are gathered.
    """
    crowding = machine.crowding(ranks)
    own = step.crowded(crowding)
    reduced = predict(
        replace(own, optimizer_s=own.optimizer_s / ranks),
        plan,
        lambda nbytes: machine.reduce_scatter(nbytes, ranks).crowded(crowding),
        delays_compute=machine.delays_compute(ranks),
    )
    gather = sum(
        machine.all_gather(bucket.nbytes, ranks).crowded(crowding).seconds
        for bucket in reduced.buckets
    )
    return reduced._replace(seconds=reduced.seconds + gather, local_s=own.seconds)


def seconds_every(prediction: Prediction, step: LocalStep, every: int) -> float:
    """The mean of `every` backwards of which the last one is reduced and stepped, the others being
    accumulated under no_sync(). step: what `prediction` is of, on its machine.
    """
    quiet = step.forward_s + step.backward_s
    return ((every - 1) * quiet + prediction.seconds) / every
