"""Hooks around the steps of all torch.optim optimizers. Before a step, the reducers that own the
parameters end their rounds, or refuse the step; a parameter that must not be stepped refuses it,
too. After a step, the reducers note which gradients it used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.errors import FastcommError


class Share(NamedTuple):
    """An optimizer's parameters in one bucket of a reducer, by slot. Holds the bucket's number, so
    that it keeps nothing alive.
    """

    bucket: int
    slots: list[int]


class _Bucket(Protocol):
    @property
    def parameters(self) -> Sequence[Tensor | None]: ...


def shares_in(buckets: Sequence[_Bucket], parameters: Sequence[Tensor]) -> list[Share]:
    """For each bucket, the slots that belong to these parameters."""
    wanted = {id(p) for p in parameters}
    return [
        Share(number, [i for i, p in enumerate(bucket.parameters) if id(p) in wanted])
        for number, bucket in enumerate(buckets)
    ]


class Steppable(Protocol):
    """A reducer, as an optimizer's step sees it. number: the order of reducers, equal on all
    ranks.
    """

    number: int
    n_rounds: int

    def shares_of(self, parameters: Sequence[Tensor]) -> list[Share]:
        """The parameters' shares of the reducer's buckets."""

    def before_step(self, optimizer: Optimizer, shares: list[Share], since: int | None) -> None:
        """Leaves the gradients in these shares reduced, or raises. since: n_rounds before this
        optimizer's last step, if it has made one.
        """

    def after_step(self, shares: list[Share]) -> None:
        """Notes that a step was made with the gradients in these shares, as they are now."""


class _Steps:
    """What is known of one optimizer: which reducers own its parameters, what shares of their
    buckets it has, and how many rounds each had ended before the last step.

    refusal: why it must not step, or None.
    """

    def __init__(self, groups: tuple[tuple[int, int], ...], parameters: list[Tensor]) -> None:
        self.groups, self.refusal = groups, _refusal_of(parameters)
        self.epoch = _epoch
        owners = {_owner_of(parameter) for parameter in parameters}
        reducers = sorted((one for one in owners if one is not None), key=lambda r: r.number)
        self.shares = [(weakref.ref(r), r.shares_of(parameters)) for r in reducers]
        self.before: weakref.WeakKeyDictionary[Steppable, int] = weakref.WeakKeyDictionary()
        self.seen: weakref.WeakKeyDictionary[Steppable, int] = weakref.WeakKeyDictionary()


_steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
# Parameters that must not be stepped: why, and the successor. An optimizer that holds the
# successor, too, may step.
_refusals: WeakIdKeyDictionary = WeakIdKeyDictionary()
_epoch = 0  # grows when a model is attached or detached, which changes the owners
_owner_of: Callable[[Tensor], Steppable | None]
_is_watching = False


def watch_steps(owner_of: Callable[[Tensor], Steppable | None]) -> None:
    """Installs the hooks at the first call. Call again whenever a parameter gains or loses its
    reducer.
    """
    global _epoch, _owner_of, _is_watching
    _epoch += 1
    _owner_of = owner_of
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _is_watching = True


def refuse_step(parameter: Tensor, why: str, successor: Tensor | None = None) -> None:
    """Lets no optimizer step the parameter, unless it holds the parameter's successor, too."""
    global _epoch
    _epoch += 1
    _refusals[parameter] = why, None if successor is None else weakref.ref(successor)


def refuse_replaced(
    before: Iterable[tuple[str, Tensor]], now: Sequence[tuple[str, Tensor]]
) -> None:
    """Refuses steps of parameters that have left the model and whose names other parameters have
    now: an optimizer that holds the old ones would train nothing.
    """
    by_name, present = dict(now), {id(parameter) for _, parameter in now}
    for name, parameter in before:
        if name in by_name and id(parameter) not in present:
            why = f"parameter {name} is not in the model any more: make the optimizer anew"
            refuse_step(parameter, why, by_name[name])


def allow_steps(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _refusals.pop(parameter, None)


def known_optimizers(reducers: Iterable[Steppable]) -> list[Optimizer]:
    """Those that have stepped parameters of these reducers, in the order of their first steps."""
    wanted = {id(reducer) for reducer in reducers}
    return [
        optimizer
        for optimizer, steps in _steps.items()
        if any(id(reference()) in wanted for reference, _ in steps.shares)
    ]


def _before_step(optimizer: Optimizer, *_: object) -> None:
    steps = _steps_of(optimizer)
    if steps.refusal is not None:
        raise FastcommError(steps.refusal)
    for reference, shares in steps.shares:
        reducer = reference()
        if reducer is not None:
            reducer.before_step(optimizer, shares, steps.seen.get(reducer))
            steps.before[reducer] = reducer.n_rounds


def _after_step(optimizer: Optimizer, *_: object) -> None:
    steps = _steps.get(optimizer)
    if steps is None or steps.epoch != _epoch:
        return  # a closure has attached or detached a model
    for reference, shares in steps.shares:
        reducer = reference()
        if reducer is None or reducer not in steps.before:
            continue
        steps.seen[reducer] = steps.before[reducer]
        # A closure may have ended rounds: then the gradients are not those from before the step.
        reducer.after_step(shares if reducer.n_rounds == steps.before[reducer] else [])


def _steps_of(optimizer: Optimizer) -> _Steps:
    """What is known of the optimizer, kept from an earlier step if neither the optimizer nor the
    reducers have changed since.
    """
    groups = optimizer.param_groups
    known = tuple((id(group["params"]), len(group["params"])) for group in groups)
    steps = _steps.get(optimizer)
    if steps is None or steps.groups != known or steps.epoch != _epoch:
        parameters = [parameter for group in groups for parameter in group["params"]]
        before = steps
        steps = _steps[optimizer] = _Steps(known, parameters)
        if before is not None:
            steps.seen.update(before.seen)
    return steps


def _refusal_of(held: list[Tensor]) -> str | None:
    """Why an optimizer of these parameters must not step, or None."""
    ids = {id(parameter) for parameter in held}
    for parameter in held:
        refusal: tuple[str, weakref.ref[Tensor] | None] | None = _refusals.get(parameter)
        if refusal is not None and (refusal[1] is None or id(refusal[1]()) not in ids):
            return refusal[0]
    return None
