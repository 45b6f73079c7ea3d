"""Calls that are no collectives, and the arithmetic on the data that arrives.

Knows no group and no thread. A reduction applies torch's operations by the tree over the
ranks. All data travels as bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastcomm.comm.collective import (
    HALVES,
    REDUCTIONS,
    addends_of_mean,
    largest_half,
    mean_of_addends,
)
from fastcomm.control.announcement import Call

ABANDON = Call("abandon")
WITHOUT_DATA = Call("all_reduce", has_data=False)


_COMBINE = {one.name: one.combine for one in REDUCTIONS}


def reduce_rows(rows: Tensor, op: str, factors: Sequence[float] | None = None) -> Tensor:
    """Reduces the rows, one after the other, but sums by the tree of kernels/shm/reduce.h; 16-bit
    floats in float32, rounded once.

    Integers wrap around, but their mean is exact, truncated towards zero. factors: of the rows,
    whose products are added then, one after the other, whatever the op.
    """
    n, dtype = len(rows), rows.dtype
    if factors is not None:
        wide = rows.to(torch.float32) if dtype in HALVES else rows
        products = (row * factor for row, factor in zip(wide, factors, strict=True))
        weighted: Tensor = functools.reduce(torch.Tensor.add_, products)
        return weighted.to(dtype)
    if op == "mean" and not dtype.is_floating_point:
        addends = (addends_of_mean(row, n) for row in rows)
        return mean_of_addends(functools.reduce(torch.Tensor.add_, addends), n).to(dtype)
    wider = torch.float32 if dtype in HALVES else dtype
    if op in ("sum", "mean"):
        total = _sum_of(rows, wider)
    else:
        total = rows[0].to(wider, copy=True)
        for row in rows[1:]:
            _COMBINE[op](total, row, out=total)
    if op == "mean":
        total.div_(n)
    return total.to(dtype)


def _sum_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if len(rows) == 1:
        return rows[0].to(dtype, copy=True)
    middle = largest_half(len(rows))
    rest = rows[middle:]
    return _sum_of(rows[:middle], dtype).add_(rest[0] if len(rest) == 1 else _sum_of(rest, dtype))


def with_one_nan(tensor: Tensor) -> Tensor:
    """Makes all NaNs alike, in place: their bits depend on how a loop was vectorised."""
    if tensor.is_floating_point():
        tensor.masked_fill_(tensor != tensor, float("nan"))
    return tensor


def cast(source: Tensor, target: Tensor) -> Tensor:
    """Copies to another dtype. Each rank does it for itself, and all get the same bits."""
    target.copy_(source)
    # There are several ways to convert a NaN, except to widen bfloat16, which is a shift.
    has_choice = target.dtype in HALVES or source.dtype == torch.float16
    return with_one_nan(target) if has_choice and source.dtype != target.dtype else target


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view as bytes, which every backend moves, whatever dtypes it knows."""
    return tensor.view(-1).view(torch.uint8)
