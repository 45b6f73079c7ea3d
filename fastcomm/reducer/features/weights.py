"""Weighting: what a rank's gradients count in the next reduction, after Reducer.set_weight().

The weight of a round goes to the other ranks with its buckets; see transport.Part. Where a
round takes several batches (no_sync), .grad holds their gradients in one unit, the largest weight
so far: gradients of a batch with a smaller weight are scaled before autograd adds them, and what
stands in .grad is scaled when a larger weight comes. So nothing there is larger than a sum without
weights would be. A batch of weight 0 adds zeros, whatever its gradients are.

What an earlier reduction has left in .grad is in the unit of one weight, whatever that is. It
counts once if this rank has one weight for means in the round; otherwise the round is refused.
"""

from __future__ import annotations

import functools
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
from fastcomm.reducer.layout import values_of
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
        self._n_unsynced = 0  # see ReducerFlags: when the weight under way was set
        # By name, gradients of earlier reductions to which this round's were added: whether they
        # are not zeros, such as zero_grad(set_to_none=False) leaves.
        self._earlier: dict[str, Tensor] = {}
        self._drop_hooks()

    def _drop_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop()[1].remove()

    def set(self, weight: Any, of: str, buckets: Sequence[Bucket], n_unsynced: int) -> None:
        """Sets what gradients count from now on. Raises as Reducer.set_weight. n_unsynced: of the
        reducer.
        """
        value = _number(weight)
        if of not in WEIGHTED_OPS:
            raise ValueError(f'of must be "mean" or "sum", as the losses are; got {of!r}')
        if not n_unsynced or not any(b.gradient_state.unsynced_slots() for b in buckets):
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
        self._refuse_added_to_earlier()
        self._before += self._now

    def end_of_backward(self, round: Round) -> None:
        """Raise FastcommError if the round would count gradients of an earlier reduction by the
        wrong weight.
        """
        if round.part.scale != round.part.weight:
            self._refuse_added_to_earlier()

    def _refuse_added_to_earlier(self) -> None:
        for name, stands in self._earlier.items():
            if stands:
                raise FastcommError(
                    "gradients of several weights, or of losses that are sums, were added to those "
                    f"of an earlier reduction, which have another unit, in parameter {name}: call "
                    "zero_grad() before the first backward of a reduction, on every rank"
                )

    def _begin_batch(self, value: float, buckets: Sequence[Bucket]) -> None:
        self._drop_hooks()
        self._watch_earlier(buckets)
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

    def _watch_earlier(self, buckets: Sequence[Bucket]) -> None:
        """Notes where autograd adds to the gradients of an earlier reduction."""
        for bucket in buckets:
            for i, parameter in enumerate(bucket.parameters):
                if parameter is None or not parameter.requires_grad:
                    continue
                if bucket.gradient_state.is_earlier(i):
                    node = get_gradient_edge(parameter).node
                    note = functools.partial(self._note_earlier, bucket, i)
                    self._hooks.append((node, node.register_prehook(Untraced(note))))

    def _note_earlier(self, bucket: Bucket, i: int, _: object) -> None:
        parameter = bucket.parameters[i]
        # zero_grad() may have dropped it since
        if parameter is not None and bucket.gradient_state.is_earlier(i):
            assert parameter.grad is not None  # for the type checker
            self._earlier[bucket.names[i]] = values_of(parameter.grad).any()

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
    def is_set(self) -> bool:
        """Whether the round that is open, or comes next, has a weight."""
        return self._now is not None

    def before_round(self, round: Round) -> None:
        """Give the round the weights that were set since the last one."""
        if self._now is not None:
            total = self._before + self._now
            scale = self._unit if total else 0.0
            round.weigh(WEIGHTED_OPS[self._of], total, scale)

    def after_round(self, round: Round) -> None:
        self.forget()

    def dropped(self) -> None:
        self.forget()


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
        slots = [parameters[i] for i in bucket.gradient_state.unsynced_slots()]
        gradients += [p.grad for p in slots if p is not None and p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
