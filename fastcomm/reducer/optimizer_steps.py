"""Before any torch.optim optimizer steps: the reducers whose parameters it owns end their rounds,
or refuse the step. So do parameters that must not be stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.errors import FastcommError


class Steppable(Protocol):
    """A reducer, as an optimizer's step sees it. number: the order of reducers, equal on all
    ranks.
    """

    number: int
    n_rounds: int

    def before_step(self, since: int | None) -> None:
        """Leaves every gradient reduced, or raises. since: n_rounds at this optimizer's last step,
        if it has made one.
        """


class _Steps:
    """One optimizer: which reducers own its parameters, and how many rounds each had ended at the
    last step.

    refusal: why it must not step, or None.
    """

    def __init__(
        self,
        parameters: tuple[tuple[int, int], ...],
        reducers: list[Steppable],
        refusal: str | None,
    ) -> None:
        self.parameters, self.refusal = parameters, refusal
        self.epoch = _epoch
        self.reducers = [weakref.ref(r) for r in sorted(reducers, key=lambda r: r.number)]
        self.seen: weakref.WeakKeyDictionary[Steppable, int] = weakref.WeakKeyDictionary()


_steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
# Parameters that must not be stepped: why, and by which other one the optimizer shows that it
# knows.
_refusals: WeakIdKeyDictionary = WeakIdKeyDictionary()
_epoch = 0  # grows when a model is attached or detached: who owns what has changed
_owner_of: Callable[[Tensor], Steppable | None]
_hook: RemovableHandle | None = None


def watch_steps(owner_of: Callable[[Tensor], Steppable | None]) -> None:
    """Installs the hook at the first call. Call again whenever a parameter gains or loses its
    reducer.
    """
    global _epoch, _owner_of, _hook
    _epoch += 1
    _owner_of = owner_of
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


def refuse_step(parameter: Tensor, why: str, successor: Tensor | None = None) -> None:
    """No optimizer may step the parameter, but one that holds its successor, too."""
    global _epoch
    _epoch += 1
    _refusals[parameter] = why, None if successor is None else weakref.ref(successor)


def refuse_replaced(
    before: Iterable[tuple[str, Tensor]], now: Sequence[tuple[str, Tensor]]
) -> None:
    """Refuses the steps of parameters that have left a model in which others have their names: an
    optimizer that holds them would train nothing.
    """
    by_name, present = dict(now), {id(parameter) for _, parameter in now}
    for name, parameter in before:
        if name in by_name and id(parameter) not in present:
            why = f"parameter {name} is not in the model any more: make the optimizer anew"
            refuse_step(parameter, why, by_name[name])


def allow_steps(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _refusals.pop(parameter, None)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    steps = _steps_of(optimizer)
    if steps.refusal is not None:
        raise FastcommError(steps.refusal)
    for reference in steps.reducers:
        reducer = reference()
        if reducer is not None:
            reducer.before_step(steps.seen.get(reducer))
            steps.seen[reducer] = reducer.n_rounds


def _steps_of(optimizer: Optimizer) -> _Steps:
    """As it was found at an earlier step, if neither the optimizer nor the reducers have changed
    since.
    """
    groups = optimizer.param_groups
    parameters = tuple((id(group["params"]), len(group["params"])) for group in groups)
    steps = _steps.get(optimizer)
    if steps is None or steps.parameters != parameters or steps.epoch != _epoch:
        held = [parameter for group in groups for parameter in group["params"]]
        owners = {_owner_of(parameter) for parameter in held}
        before = steps
        steps = _steps[optimizer] = _Steps(
            parameters, [one for one in owners if one is not None], _refusal_of(held)
        )
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
