"""Weighting: what a rank's gradients count in the next reduction, after Reducer.set_weight().

The weight of a round goes to the other ranks with its buckets; see transport.Part. Where a
round takes several batches (no_sync), .grad holds their gradients in one unit, the largest weight
so far: gradients of a batch with a smaller weight are scaled before autograd adds them, and what
stands in .grad is scaled when a larger weight comes. So nothing there is larger than a sum without
weights would be. A batch of weight 0 adds zeros, whatever its gradients are.

What an earlier reduction has left in .grad is in another unit, and refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.collective import WEIGHTED_OPS
from fastcomm.errors import FastcommError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.hooks import Untraced
from fastcomm.reducer.round import Round
from fastcomm.reducer.validation import Model

# Sums and quotients of weights are far from the ends of float64.
_LEAST, _GREATEST = 1e-30, 1e30


class Weighting(RoundExtension):
    """Keeps the weights of one reducer. Without set(), and after every round, there is none."""

    def __init__(self) -> None:
        self._hooks: list[tuple[Node, RemovableHandle]] = []
        self._model: object = None  # a weak reference
        self.forget()

    def follow(self, model: Model) -> None:
        """Lets go of the model's parameters with the module: hooks that wait for a backward keep
        them, which Python's garbage collector cannot see.
        """
        own = weakref.ref(self)

        def forget(_: object) -> None:
            weighting = own()
            if weighting is not None:
                weighting.forget()

        if isinstance(model, nn.Module):
            self._model = weakref.ref(model, forget)

    def forget(self) -> None:
        """A round has ended, or its gradients are dropped. May be called again."""
        self._of = "mean"
        self._now: float | None = None  # the weight of the batch under way
        self._before = 0.0  # of the batches before it in this round
        self._unit = 0.0  # the weight that a gradient in .grad stands for; 0 if there is none
        self._n_unsynced = 0  # see CoreFlags: when the weight under way was set
        self._drop_hooks()

    def _drop_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop()[1].remove()

    def set(self, weight: Any, of: str, buckets: Sequence[Bucket], n_unsynced: int) -> None:
        """Sets what gradients count. Raises as Reducer.set_weight. n_unsynced: of the reducer."""
        value = _number(weight)
        if of not in WEIGHTED_OPS:
            raise ValueError(f'of must be "mean" or "sum", as the losses are; got {of!r}')
        _refuse_earlier(buckets)
        if not n_unsynced or not any(b.gradients.unsynced_slots() for b in buckets):
            self.forget()  # with the gradients that zero_grad() has dropped go their weights
        elif self._now is not None and of != self._of:
            raise ValueError(
                f"of is the same for all weights of one reduction; got {self._of!r} and {of!r}"
            )
        elif n_unsynced != self._n_unsynced:
            self._end_batch()
        self._of, self._now, self._n_unsynced = of, value, n_unsynced
        self._begin_batch(value, buckets)

    def _end_batch(self) -> None:
        """The weight that was set before has been used, under no_sync()."""
        if self._now is None:
            raise FastcommError(
                "gradients have been accumulated without a weight: call set_weight() before the "
                "first backward in no_sync(), too, or drop them by zero_grad()"
            )
        self._before += self._now

    def _begin_batch(self, value: float, buckets: Sequence[Bucket]) -> None:
        self._drop_hooks()
        if value == 0:
            self._scale_what_comes(0.0, buckets)
        elif self._of == "sum":
            self._unit = 1.0
        elif value < self._unit:
            self._scale_what_comes(value / self._unit, buckets)
        else:
            if 0 < self._unit < value:
                _scale_what_is_there(self._unit / value, buckets)
            self._unit = value

    def _scale_what_comes(self, factor: float, buckets: Sequence[Bucket]) -> None:
        """Multiplies the gradients that autograd makes before it adds them to .grad."""

        def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(_product(gradient, factor) for gradient in gradients)

        for bucket in buckets:
            for parameter in bucket.parameters:
                if parameter is not None and parameter.requires_grad:
                    # A hook on the parameter itself would change what torch.autograd.grad returns.
                    node = get_gradient_edge(parameter).node
                    self._hooks.append((node, node.register_prehook(Untraced(scaled))))

    @property
    def awaits_round(self) -> bool:
        return self._now is not None

    def before_round(self, round: Round) -> None:
        """Give the round the weights that were set since the last one."""
        if self._now is not None:
            total = self._before + self._now
            scale = self._unit if total else 0.0
            round.weigh(WEIGHTED_OPS[self._of], total, scale)

    def after_round(self, round: Round) -> None:
        self.forget()


def _refuse_earlier(buckets: Sequence[Bucket]) -> None:
    """Raises FastcommError where .grad holds what an earlier reduction has left."""
    for bucket in buckets:
        i = bucket.gradients.first_earlier()
        if i >= 0:
            raise FastcommError(
                f"the gradient of parameter {bucket.names[i]} is that of an earlier reduction, "
                "which has no weight: call zero_grad() before set_weight(), on every rank"
            )


def _number(weight: Any) -> float:
    value: Any = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if not isinstance(value, Real):
        raise TypeError(f"a weight is a number or a tensor of one; got {weight!r}")
    # an int may be too large for float()
    number: float = float(value) if abs(value) <= _GREATEST else math.inf  # type: ignore[operator]
    if not (number == 0 or _LEAST <= number <= _GREATEST):
        raise ValueError(f"a weight is 0, or from {_LEAST:g} to {_GREATEST:g}; got {weight!r}")
    return number


def _product(gradient: Tensor | None, factor: float) -> Tensor | None:
    if gradient is None:
        return None
    return gradient * factor if factor else torch.zeros_like(gradient)


@torch.no_grad()
def _scale_what_is_there(factor: float, buckets: Sequence[Bucket]) -> None:
    """Multiplies the gradients that backwards in no_sync() have made."""
    gradients = []
    for bucket in buckets:
        parameters = bucket.parameters
        slots = [parameters[i] for i in bucket.gradients.unsynced_slots()]
        gradients += [p.grad for p in slots if p is not None and p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
