"""How a call ended on a rank, and how a test says so."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """An exception as it was on its rank. `types` names its class and all base classes,
    `builtins.OSError` for example.
    """

    types: tuple[str, ...]
    message: str
    traceback: str

    @property
    def type(self) -> str:
        """The class name alone."""
        return self.types[0].rpartition(".")[2]

    def is_a(self, expected: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
        wanted = expected if isinstance(expected, tuple) else (expected,)
        return any(_type_name(one) in self.types for one in wanted)


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank.

    kind      "returned", "raised", "died" (the process ended before it answered) or "hung" (no
              answer in time; it was killed)
    value     what the body returned
    failure   what it raised
    exitcode  of the process, as in multiprocessing: -9 for SIGKILL; None while it is alive
    stacks    of a rank that hung: the stacks of all its threads
    """

    rank: int
    kind: str
    value: Any = None
    failure: Failure | None = None
    exitcode: int | None = None
    stacks: str = ""

    def is_a(self, expected: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
        """Whether this rank raised `expected`."""
        return self.failure is not None and self.failure.is_a(expected)

    def __str__(self) -> str:
        if self.kind == "returned":
            return f"rank {self.rank} returned {_shorten(repr(self.value))}"
        if self.failure is not None:
            return (
                f"rank {self.rank} raised {self.failure.type}: "
                f"{self.failure.message}\n{self.failure.traceback}"
            )
        if self.kind == "died":
            return f"rank {self.rank} died with exit code {self.exitcode}"
        return (
            f"rank {self.rank} had not answered and was killed; its "
            f"stacks:\n{self.stacks or '(none)'}"
        )


class RankError(AssertionError):
    """A body did not return on every rank. `outcomes` holds what happened on each."""

    def __init__(self, body: Callable[..., Any], outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        lines = [f"{body.__name__} on {len(outcomes)} ranks:"]
        told: dict[str, int] = {}
        for outcome in outcomes:
            text = str(outcome).removeprefix(f"rank {outcome.rank} ")
            lines.append(
                f"rank {outcome.rank}: as rank {told[text]}" if text in told else str(outcome)
            )
            told.setdefault(text, outcome.rank)
        super().__init__("\n".join(lines))


def values_of(outcomes: Sequence[Outcome], *others: int) -> list[Any]:
    """What the body returned on every rank but those others, as it must have done."""
    remaining = [outcome for outcome in outcomes if outcome.rank not in others]
    assert all(outcome.kind == "returned" for outcome in remaining), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in remaining]


def described(error: BaseException) -> Failure:
    types = tuple(_type_name(one) for one in type(error).__mro__)
    return Failure(
        types,
        str(error),
        "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    )


def _type_name(one: type) -> str:
    return f"{one.__module__}.{one.__qualname__}"


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
