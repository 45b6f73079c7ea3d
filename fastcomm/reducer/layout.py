"""Where gradients lie: in which bucket, at which offset, with which strides.

Plans are pure arithmetic: equal input gives equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

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

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int


def plan_buckets(
    parameters: Sequence[tuple[int, torch.dtype, int]],
    *,
    cap_bytes: int,
    first_cap_bytes: int,
    order: Sequence[int] | None = None,
) -> tuple[BucketLayout, ...]:
    """Spreads parameters, given as (numel, dtype, itemsize) in registration order, over buckets of
    one dtype each.

    Gradients become ready in about the reverse of registration order, so buckets are filled in that
    order, or in the one given, and returned in the order in which they will be full (PyTorch
    Distributed, section 3.2.3). A bucket is closed as soon as it holds `cap_bytes`, so it exceeds
    them by less than its last parameter; the first one to be opened is closed at `first_cap_bytes`,
    so that communication starts early.
    """
    # Each with the position of its last parameter, in that order.
    full: list[tuple[int, BucketLayout]] = []
    filling: dict[torch.dtype, _Filling] = {}
    caps = iter([first_cap_bytes])
    for position, index in enumerate(order or reversed(range(len(parameters)))):
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


def equal_shards(numel: int, itemsize: int, n: int) -> tuple[int, ...]:
    """Cuts a flat buffer into n shards of the same size, at cache lines, with padding behind its
    end: the last shards may hold padding only. Returns their bounds: shard r is
    [bounds[r], bounds[r + 1]).
    """
    per_line = max(ALIGNMENT // itemsize, 1)
    shard = -(-numel // (n * per_line)) * per_line
    return tuple(range(0, n * shard + 1, shard)) if shard else (0,) * (n + 1)


def whole_shards(layout: BucketLayout, loads: list[int]) -> tuple[int, ...]:
    """Cuts between slots only, else as equal_shards. loads: how many elements each rank has of the
    buckets before; this bucket's are added.
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

    def __init__(self, dtype: torch.dtype, itemsize: int, cap_bytes: int) -> None:
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


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """The strides autograd gives to the parameter's gradient: the parameter's if that is dense."""
    if parameter.is_contiguous():
        return parameter.stride()
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def view_of(
    flat: Tensor,
    offset: int,
    size: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor on flat's memory, for a parameter or its gradient. offset: in flat's elements.
    dtype: its own, or a complex one of pairs of its elements.
    """
    if dtype is None or dtype == flat.dtype:
        dtype = flat.dtype
    else:
        offset //= 2
    # set_ and not a slice: as an autograd view a gradient would refuse detach_(), which users and
    # optimizers call.
    view = torch.empty(0, dtype=dtype, device=flat.device).set_(
        flat.untyped_storage(), offset, size, strides
    )
    # With a storage of its own: torch.save(parameter.grad) is not to write the whole bucket, nor
    # parameter.share_memory_() to move it.
    return from_dlpack(view) if view.numel() else torch.empty_like(view)


def kind_of(parameter: Tensor, dtype: torch.dtype) -> tuple[int, torch.dtype, int]:
    """A gradient of this dtype in a flat buffer: how many elements, of which dtype, of how many
    bytes. A complex one lies there as pairs of real numbers.
    """
    if dtype.is_complex:
        return 2 * parameter.numel(), dtype.to_real(), dtype.itemsize // 2
    return parameter.numel(), dtype, dtype.itemsize


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor's elements, in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def laid_out_as(view: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, or a copy of it that has the strides of its view, and no less alignment."""
    if gradient is view or view.is_sparse or gradient.is_sparse:
        return gradient
    is_alike = gradient.stride() == view.stride() and gradient.data_ptr() % ALIGNMENT == 0
    return gradient if is_alike else torch.empty_like(view).copy_(gradient)


def values_of(gradient: Tensor) -> Tensor:
    """What norms and counts look at: of a sparse gradient its values, one for each row."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values.resolve_conj()
