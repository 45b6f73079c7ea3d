"""What a collective takes, by the alpha-beta-gamma model: alpha for each message, beta for each
byte that travels, gamma for each byte that is added (Thakur, Rabenseifner and Gropp, 2005).

Formulas only. Every one is 0 for one rank.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """What two ranks, or two hosts, are connected by.

    latency_s: alpha, of a message, or of a round of flags in shared memory.
    bytes_per_s: 1 / beta, each way. In shared memory, what one rank reads and writes.
    reduce_bytes_per_s: 1 / gamma, of what one rank adds.
    core_share: for what part of the time a collective keeps a core busy.
    """

    latency_s: float
    bytes_per_s: float
    reduce_bytes_per_s: float = math.inf
    core_share: float = 0.0

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0 or self.reduce_bytes_per_s <= 0:
            raise ValueError(f"a link has a latency of 0 or more, and positive rates; got {self}")
        if not 0 <= self.core_share <= 1:
            raise ValueError(f"core_share must be between 0 and 1; got {self.core_share}")

    def times(self, links: int) -> Link:
        """So many of them side by side."""
        return replace(self, bytes_per_s=self.bytes_per_s * links)


class Cost(NamedTuple):
    """What a collective takes: seconds in all, and for how many of them it keeps one of the cores
    busy that also compute.
    """

    seconds: float
    core_seconds: float = 0.0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.core_seconds + other.core_seconds)

    def crowded(self, factor: float) -> Cost:
        """The same where what needs a core takes `factor` times as long, as computing does."""
        busy = factor * self.core_seconds
        return Cost(self.seconds + busy - self.core_seconds, busy)


# Of each algorithm: how many alphas its two halves take, reduce-scatter and all-gather, by ranks.
_ROUNDS: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    # shared memory: flags go up once before and once after the ranks read each other's buffers
    "direct": (lambda p: 1, lambda p: 1),
    "ring": (lambda p: p - 1, lambda p: p - 1),
    # NCCL's two binary trees, pipelined: all links are busy, and the steps are as deep as a tree
    "tree": (lambda p: math.ceil(math.log2(p)), lambda p: math.ceil(math.log2(p))),
    # fastcomm's over a group: announce, send all shards at once; send the reduced shard to all
    "exchange": (lambda p: 2, lambda p: 1),
}
ALGORITHMS = (*_ROUNDS, "hierarchical")


def reduce_scatter(algorithm: str, link: Link, nbytes: float, ranks: int) -> Cost:
    """Each of `ranks` ranks gets its shard of the sum of all buffers of `nbytes`."""
    if ranks == 1:
        return Cost(0.0)
    others = (ranks - 1) / ranks * nbytes
    # A rank copies what others reduce into its flat buffer, and reads its shard of all buffers.
    moved = 2 * others + nbytes if algorithm == "direct" else others
    seconds = _ROUNDS[algorithm][0](ranks) * link.latency_s + moved / link.bytes_per_s
    return _on(link, seconds + others / link.reduce_bytes_per_s)


def all_gather(algorithm: str, link: Link, nbytes: float, ranks: int) -> Cost:
    """Every rank gets all shards of a buffer of `nbytes`."""
    if ranks == 1:
        return Cost(0.0)
    # In shared memory a rank writes its shard into every buffer.
    moved = nbytes if algorithm == "direct" else (ranks - 1) / ranks * nbytes
    return _on(link, _ROUNDS[algorithm][1](ranks) * link.latency_s + moved / link.bytes_per_s)


def _on(link: Link, seconds: float) -> Cost:
    return Cost(seconds, seconds * link.core_share)


class MeasuredCosts:
    """The costs of an all-reduce that were measured at a few sizes: between two of them on a line,
    outside of them on the nearest line.

    points: (nbytes, cost), ascending, at least two.
    """

    def __init__(self, points: Sequence[tuple[int, Cost]]) -> None:
        if len(points) < 2:
            raise ValueError(f"a line needs two points; got {len(points)}")
        self.points = tuple(points)
        self._sizes = [nbytes for nbytes, _ in points]

    def __call__(self, nbytes: float) -> Cost:
        i = min(max(bisect.bisect(self._sizes, nbytes), 1), len(self.points) - 1)
        (low, before), (high, after) = self.points[i - 1 : i + 1]
        part = (nbytes - low) / (high - low)
        # Noise may let a line fall: nothing costs less than the smallest size that was measured.
        least = self.points[0][1]
        return Cost(
            *(
                max(floor, a + part * (b - a))
                for floor, a, b in zip(least, before, after, strict=True)
            )
        )
