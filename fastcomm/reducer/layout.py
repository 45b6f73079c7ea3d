"""Plans which gradient lies in which bucket, at which offset. Pure arithmetic: no tensors, no
ranks; equal input gives equal plans.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# bytes: a cache line, so that two ranks never write to the same one; more than any vector load
# needs
ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies in a flat buffer. `offset` and `numel` count elements."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one flat buffer of `numel` elements, padding included, in the order in which
    gradients are expected.
    """

    dtype: Hashable
    slots: tuple[Slot, ...]
    numel: int


def plan_buckets(
    parameters: Sequence[tuple[int, Hashable, int]], *, cap_bytes: int, first_cap_bytes: int
) -> tuple[BucketLayout, ...]:
    """Spreads parameters, given as (numel, dtype, itemsize) in registration order, over buckets of
    one dtype each.

    Gradients become ready in about the reverse of registration order, so buckets are filled in that
    order and returned in the order in which they will be full (PyTorch Distributed, section 3.2.3).
    A bucket is closed as soon as it holds `cap_bytes`, so it exceeds them by less than its last
    parameter; the first one to be opened is closed at `first_cap_bytes`, so that communication
    starts early.
    """
    # Each with the position of its last parameter, in reverse order of registration.
    full: list[tuple[int, BucketLayout]] = []
    filling: dict[Hashable, _Filling] = {}
    caps = iter([first_cap_bytes])
    for position, index in enumerate(reversed(range(len(parameters)))):
        numel, dtype, itemsize = parameters[index]
        bucket = filling.get(dtype)
        if bucket is None:
            bucket = filling[dtype] = _Filling(dtype, itemsize, next(caps, cap_bytes))
        bucket.add(index, numel, position)
        if bucket.numel * itemsize >= bucket.cap_bytes:
            full.append((position, bucket.layout()))
            del filling[dtype]
    full.extend((bucket.last_position, bucket.layout()) for bucket in filling.values())
    return tuple(layout for _, layout in sorted(full, key=lambda entry: entry[0]))


def equal_shares(numel: int, itemsize: int, n: int) -> tuple[int, ...]:
    """Cuts a flat buffer into n shares of the same size, at cache lines, with padding behind its
    end: the last shares may hold padding only. Returns their bounds: share r is
    [bounds[r], bounds[r + 1]).
    """
    per_line = max(ALIGNMENT // itemsize, 1)
    share = -(-numel // (n * per_line)) * per_line
    return tuple(range(0, n * share + 1, share)) if share else (0,) * (n + 1)


def whole_shares(layout: BucketLayout, loads: list[int]) -> tuple[int, ...]:
    """As equal_shares, but no slot is cut. loads: how many elements each rank has of the buckets
    before; this bucket's are added.
    """
    n = len(loads)
    goal = (sum(loads) + layout.numel) / n
    bounds, rank = [0], 0
    for slot in layout.slots:
        # the next rank's from here on, where more than half of the slot is beyond this rank's part
        while rank < n - 1 and loads[rank] + slot.numel / 2 > goal:
            bounds.append(slot.offset)
            rank += 1
        loads[rank] += slot.numel
    return (*bounds, *[layout.numel] * (n + 1 - len(bounds)))


class _Filling:
    """A bucket that still takes parameters."""

    def __init__(self, dtype: Hashable, itemsize: int, cap_bytes: int) -> None:
        self.dtype = dtype
        self.cap_bytes = cap_bytes
        self.numel = 0
        self.last_position = 0
        self._alignment = max(ALIGNMENT // itemsize, 1)
        self._slots: list[Slot] = []

    def add(self, index: int, numel: int, position: int) -> None:
        self._slots.append(Slot(index, self.numel, numel))
        self.numel += -(-numel // self._alignment) * self._alignment
        self.last_position = position

    def layout(self) -> BucketLayout:
        return BucketLayout(self.dtype, tuple(self._slots), self.numel)
