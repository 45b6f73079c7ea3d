"""One rank's step without communication, for the model of a step: how long its parts take, and when
each gradient is ready.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from lib.models import Case
from torch import Tensor, nn

from fastcomm.insight.step_model import Gradient, LocalStep
from fastcomm.reducer.layout import plan_buckets


class Profile(NamedTuple):
    """Seconds. ready_s: of each parameter's gradient, in the model's order, since the backward's
    begin. sizes: their elements.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    ready_s: Sequence[float]
    sizes: Sequence[int]

    def step(self) -> LocalStep:
        """As the model of a step takes it, of float32 gradients."""
        gradients = (
            Gradient(4 * numel, ready_s)
            for numel, ready_s in zip(self.sizes, self.ready_s, strict=True)
        )
        return LocalStep(tuple(gradients), self.backward_s, self.forward_s, self.optimizer_s)

    def plan(self, cap_mb: float) -> list[list[int]]:
        """The buckets that a Reducer makes with this size."""
        layouts = plan_buckets(
            [(numel, torch.float32, 4) for numel in self.sizes],
            cap_bytes=int(cap_mb * 2**20),
            first_cap_bytes=int(min(cap_mb, 1) * 2**20),
        )
        return [[slot.index for slot in layout.slots] for layout in layouts]


class Stopwatch:
    """Times the steps of one model, gradient by gradient."""

    def __init__(self, case: Case, model: nn.Module, batch: Tensor) -> None:
        self._case, self._model, self._batch = case, model, batch
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._ready: dict[int, float] = {}
        for i, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._note(i))

    def _note(self, i: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._ready[i] = time.perf_counter()

        return note

    def step(self) -> Profile:
        self._optimizer.zero_grad()
        began = time.perf_counter()
        loss = self._case.loss(self._model, self._batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self._optimizer.step()
        ended = time.perf_counter()
        ready = [self._ready.get(i, backward) - forward for i in range(len(self._parameters))]
        sizes = [parameter.numel() for parameter in self._parameters]
        return Profile(forward - began, backward - forward, ended - backward, ready, sizes)


def median_of(profiles: Sequence[Profile]) -> Profile:
    """Of every time the median."""
    return Profile(
        statistics.median(one.forward_s for one in profiles),
        statistics.median(one.backward_s for one in profiles),
        statistics.median(one.optimizer_s for one in profiles),
        [statistics.median(times) for times in zip(*(p.ready_s for p in profiles), strict=True)],
        profiles[0].sizes,
    )
