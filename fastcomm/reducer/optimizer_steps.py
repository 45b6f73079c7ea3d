"""Before any torch.optim optimizer steps: the reducers whose parameters it owns end their rounds,
or refuse the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


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
    """

    def __init__(self, parameters: tuple[tuple[int, int], ...], reducers: list[Steppable]) -> None:
        self.parameters = parameters
        self.epoch = _epoch
        self.reducers = [weakref.ref(r) for r in sorted(reducers, key=lambda r: r.number)]
        self.seen: weakref.WeakKeyDictionary[Steppable, int] = weakref.WeakKeyDictionary()


_steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
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


def _before_step(optimizer: Optimizer, *_: object) -> None:
    steps = _steps_of(optimizer)
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
        owners = {_owner_of(parameter) for group in groups for parameter in group["params"]}
        before = steps
        steps = _steps[optimizer] = _Steps(parameters, [one for one in owners if one is not None])
        if before is not None:
            steps.seen.update(before.seen)
    return steps
