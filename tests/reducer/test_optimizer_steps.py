"""What an optimizer's step asks of the reducers of its parameters: here of stand-ins for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fastcomm.reducer import optimizer_hooks
from fastcomm.reducer.optimizer_hooks import SteppedSlots, StepRecord


class Reducer:
    """Of one parameter. Its hash decides where it stands in a set."""

    skipped = False

    def __init__(self, number: int, order: int, steps: list[str]) -> None:
        self.number, self._order, self._steps = number, order, steps
        self.n_rounds, self.steps = 10 * number, StepRecord()

    def __hash__(self) -> int:
        return self._order

    def slots_of(self, parameters: list[Tensor]) -> list[SteppedSlots]:
        return [SteppedSlots(0, [self.number])]

    def before_step(self, optimizer: torch.optim.Optimizer, stepped: list[SteppedSlots]) -> None:
        self._steps.append(f"before {self.number}")

    def after_step(self, stepped: list[SteppedSlots]) -> None:
        self._steps.append(f"after {self.number}" if stepped else f"after {self.number}, no slots")


@pytest.fixture
def steps() -> list[str]:
    return []


@pytest.fixture
def reducers(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Reducer]]:
    """By number. A set has them the other way round."""
    reducers = [Reducer(number, 3 - number, steps) for number in range(3)]
    owners: dict[int, Reducer] = {}
    for one in reducers:
        one.parameter = torch.nn.Parameter(torch.zeros(1))
        one.parameter.grad = torch.ones(1)
        owners[id(one.parameter)] = one
    monkeypatch.setattr(optimizer_hooks, "owner_of", lambda p: owners.get(id(p)))
    optimizer_hooks.watch_steps()
    yield reducers
    monkeypatch.undo()
    optimizer_hooks.watch_steps()


def sgd(*reducers: Reducer) -> torch.optim.SGD:
    return torch.optim.SGD([one.parameter for one in reducers], lr=0.1)


def test_a_step_ends_rounds_in_the_order_of_reducers_which_is_that_of_all_ranks(reducers, steps):
    sgd(*reversed(reducers)).step()
    assert steps[:3] == ["before 0", "before 1", "before 2"]
    assert steps[3:] == ["after 0", "after 1", "after 2"]


def test_a_round_that_ends_within_a_step_is_not_stepped_by_it(reducers, steps):
    def closure():
        reducers[1].n_rounds += 1

    sgd(reducers[1]).step(closure)
    assert steps == ["before 1", "after 1, no slots"]
