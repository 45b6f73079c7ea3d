"""Whose turn it is, and what calls take on the host's clock. For the GPU's clock see cuda_clock.py.

Contenders take turns in every round, so that a drift of the machine's speed meets all of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence


def order_of(contenders: Sequence[str], number: int) -> list[str]:
    """Of round `number`: the first one moves on by one in each round, so none is always first."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def slowest(answers: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """answers: times by rank, round and contender. Those of the slowest rank, by round and
    contender.
    """
    return [
        [max(times) for times in zip(*rows, strict=True)] for rows in zip(*answers, strict=True)
    ]


def time_fresh_calls(
    call: Callable[[], object], prepare: Callable[[], object], n_calls: int
) -> list[int]:
    """As time_calls, with a `prepare` before each call that does not count."""
    clock = time.perf_counter_ns
    nanoseconds = [0] * n_calls
    for index in range(n_calls):
        prepare()
        start = clock()
        call()
        nanoseconds[index] = clock() - start
    return nanoseconds


def time_calls(call: Callable[[], object], n_calls: int) -> list[int]:
    """Nanoseconds of each of `n_calls` calls, one after the other, with no barrier between them."""
    clock = time.perf_counter_ns
    stamps = [0] * (n_calls + 1)
    stamps[0] = clock()
    for index in range(1, n_calls + 1):
        call()
        stamps[index] = clock()
    return [end - start for start, end in itertools.pairwise(stamps)]
