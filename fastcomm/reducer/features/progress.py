"""Progress: how far a rank has come, as it tells the others at the end of join() and in catch_up(),
whether ranks that have come less far can go on with them, and what they load for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.amp import GradScaler

from fastcomm.comm.objects import broadcast_object, tellable
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError
from fastcomm.reducer import validation
from fastcomm.reducer.optimizer_hooks import known_optimizers

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core


class Stateful(Protocol):
    """An optimizer, a learning-rate scheduler, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@tellable
class KnownOptimizer(NamedTuple):
    """An optimizer, as a rank tells the others of it.

    name: its type.
    groups: the options of each.
    keeps_state: whether it keeps something from step to step.
    """

    name: str
    groups: list[dict[str, str]]
    keeps_state: bool
    is_given: bool

    def is_scheduled(self) -> bool:
        """Whether a scheduler has changed its learning rate."""
        return any(one.get("initial_lr", one.get("lr")) != one.get("lr") for one in self.groups)


@tellable
class Progress(NamedTuple):
    """What a rank tells the others.

    rounds: of every reducer, how many rounds have ended, and steps were made; and their record.
    states: what was given as state, by type.
    has_schedule: whether that may keep learning rates, as a scheduler does.
    optimizers: those given, and those whose steps the reducers know.
    """

    rounds: list[tuple[int, int, int]]
    states: list[str]
    has_schedule: bool
    optimizers: list[KnownOptimizer]

    @staticmethod
    def of(reducers: Sequence[Core], states: Sequence[Stateful]) -> Progress:
        given = [one for one in states if isinstance(one, torch.optim.Optimizer)]
        known = [one for one in known_optimizers(reducers) if not holds(given, one)]
        optimizers = [*given, *known]
        return Progress(
            [(reducer.n_rounds, reducer.steps.n, reducer.steps.record) for reducer in reducers],
            [type(one).__name__ for one in states],
            any(not isinstance(one, (torch.optim.Optimizer, GradScaler)) for one in states),
            [
                KnownOptimizer(
                    type(one).__name__, _options_of(one), _keeps_state(one), holds(given, one)
                )
                for one in optimizers
            ],
        )

    def left_behind(self) -> list[str]:
        """The optimizers that keep something from step to step and were not given, by type."""
        return [one.name for one in self.optimizers if one.keeps_state and not one.is_given]


def refuse_stateless(states: Iterable[object]) -> None:
    for one in states:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise TypeError(
                "state takes optimizers, schedulers and the like, with state_dict() and "
                f"load_state_dict(); got {type(one).__name__}"
            )


def load_states(
    comm: Transport, states: Sequence[Stateful], src: int, call: str, *, is_behind: bool
) -> None:
    """Loads rank src's states where this rank is behind. Collective. call: the user's."""
    own = [one.state_dict() for one in states] if comm.rank == src else None
    loaded = broadcast_object(comm, own, src, call, is_wanted=is_behind)
    if is_behind:
        for one, state in zip(states, loaded, strict=True):
            one.load_state_dict(state)


def compare(ranks: Sequence[Progress], call: str) -> None:
    """Raises MismatchError where the ranks mean different things by the call."""
    for what, row in (
        ("reducers", [len(one.rounds) for one in ranks]),
        ("state", [one.states for one in ranks]),
    ):
        if any(one != row[0] for one in row):
            shown = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(row))
            raise MismatchError(f"{call} has different {what} on the ranks: {shown}")


def why_apart(ranks: Sequence[Progress], *, is_loaded: bool) -> str | None:
    """Why the ranks would train apart after different numbers of steps, or None. is_loaded: what
    was given as state is equal by now.
    """
    steps = [[n for _, n, _ in progress.rounds] for progress in ranks]
    counts = ", ".join(f"rank {rank}: {max(n)}" for rank, n in enumerate(steps))
    advice = (
        "give join() what goes on with the steps, as join(state=[optimizer, scheduler]), or call "
        "refresh() on every rank and make a new optimizer"
    )
    behind = [name for progress in ranks for name in progress.left_behind()]
    if behind:
        return (
            f"in join() the ranks have made different numbers of steps ({counts}), and "
            f"{behind[0]} keeps state from step to step, which differs now: {advice}"
        )
    may_agree = ranks[0].has_schedule and not is_loaded
    most = max((progress.optimizers for progress in ranks), key=len)
    if not may_agree and any(_differ(progress.optimizers, most) for progress in ranks):
        return (
            f"in join() the ranks have made different numbers of steps ({counts}), and the options "
            f"of {most[0].name} differ now, as a scheduler's do: {advice}"
        )
    return None


def _differ(known: Sequence[KnownOptimizer], most: Sequence[KnownOptimizer]) -> bool:
    """Whether a rank's optimizers have other options than another rank's. One that has
    made no step may not know its own optimizers, which are behind if they are scheduled.
    """
    pairs = zip(known, most, strict=False)
    is_behind = any(one.is_scheduled() for one in most[len(known) :])
    return is_behind or any(ours[:2] != theirs[:2] for ours, theirs in pairs)


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [
        {key: validation.shown(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    return any(value is not None for state in optimizer.state.values() for value in state.values())


def holds(known: Sequence[object], one: object) -> bool:
    """Whether it is among them; some define equality by value."""
    return any(other is one for other in known)
