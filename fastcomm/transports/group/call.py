"""What the ranks of a torch.distributed group announce to each other before a collective, and the
arithmetic on the data that arrives.

Knows no group and no thread. A Call is a row of numbers on the network and a sentence in an error.
A reduction applies torch's operations in rank order. All data travels as bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastcomm.comm.collective import (
    BLOCK_DTYPES,
    BUCKET_OPS,
    CPU_DTYPES,
    HALVES,
    REDUCTIONS,
    SHADOW,
    SKIP,
    WEIGHTED_OPS,
    addends_of_mean,
    mean_of_addends,
)
from fastcomm.comm.words import Called, called
from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from fastcomm.postmortem.flight_recorder import Entry, FlightRecorder
    from fastcomm.transports.group.shards import Transfer

SENT_DTYPES = (*CPU_DTYPES, *BLOCK_DTYPES)
KINDS = (
    "barrier",
    "all_reduce",
    "broadcast",
    "all_gather_single",
    "reduce_scatter_single",
    "gather",
    "scatter",
    "all_to_all_single",
    "abandon",
    SHADOW,
)


# Call.numbers() are below these, but for the weights'.
_ENDS = (
    *(len(KINDS), 2**63, len(CPU_DTYPES), len(SENT_DTYPES), len(BUCKET_OPS)),
    *(2**15, 2**63, 2**63),  # a rank, a label, a step
)


@dataclass(frozen=True)
class Call:
    """A collective as the ranks announce it to each other. It must be equal on all of them, but for
    the weight: see transport.Part.
    """

    kind: str
    numel: int = 0
    dtype: torch.dtype = torch.uint8
    wire: torch.dtype = torch.uint8
    op: str = "sum"
    root: int = 0
    label: int = 0
    step: int = 0
    weight: float = field(default=0.0, compare=False)
    scale: float = field(default=0.0, compare=False)

    def numbers(self) -> list[int]:
        *values, weight, scale = astuple(self)
        dtypes = CPU_DTYPES, SENT_DTYPES
        codes: tuple[tuple[Any, ...], ...] = (KINDS, (), *dtypes, BUCKET_OPS, (), (), ())
        numbers = [
            choices.index(value) if choices else value
            for choices, value in zip(codes, values, strict=True)
        ]
        return [*numbers, *struct.unpack("qq", struct.pack("dd", weight, scale))]

    @staticmethod
    def of(numbers: Sequence[int], rank: int) -> Call:
        """The call of these numbers(), which the rank has announced. Raises FastcommError if they
        are of none.
        """
        if not all(0 <= number < end for number, end in zip(numbers, _ENDS, strict=False)):
            raise FastcommError(f"rank {rank} has announced {numbers}, which is no collective")
        kind, numel, dtype, wire, op, root, label, step, *bits = numbers
        dtypes = CPU_DTYPES[dtype], SENT_DTYPES[wire]
        weight, scale = struct.unpack("dd", struct.pack("qq", *bits))
        return Call(KINDS[kind], numel, *dtypes, BUCKET_OPS[op], root, label, step, weight, scale)

    @property
    def shard_key(self) -> tuple[object, ...]:
        """Equal on ranks whose shards of the call fit each other."""
        return self.kind, self.numel, self.dtype, self.wire, self.label

    def noted(self, flight: FlightRecorder) -> Entry:
        has_op = self.kind in ("all_reduce", "reduce_scatter_single")
        entry = flight.note(
            self.kind,
            self.dtype if self.numel else None,
            self.numel,
            op=self.op if has_op else None,
            root=self.root,
            label=self.label,
            step=self.step,
        )
        entry.lane = -1  # several are under way at once
        return entry

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def admits_shadows(self) -> bool:
        """Whether ranks without data can take part: see Transport.follow."""
        is_bucket = self.kind == "all_reduce" and self.label != 0
        return is_bucket and self.op in ("mean", SKIP, *WEIGHTED_OPS.values())

    def __str__(self) -> str:
        return str(self.called())

    def called(self) -> Called:
        """The same for messages."""
        if self.kind in ("barrier", "abandon", SHADOW):
            return Called(self.kind, self.kind)
        return called(
            self.kind,
            self.numel,
            self.dtype,
            op=self.op if self.kind in ("all_reduce", "reduce_scatter_single") else None,
            root=self.root,
            wire=self.wire,
            label=self.label,
            step=self.step,
        )


@dataclass(frozen=True)
class GatheredCalls:
    """The calls that all ranks have announced under one index.

    calls: by rank.
    payloads: a row for each rank, or None.
    n_fused: of the calls behind, from the first on, all ranks have so many: they are fused.
    have_begun: by rank, whether it has begun to send its data.
    index: of the announcement, from 1.
    begun: this rank's transfer, if it has begun to send its data, else None.
    """

    calls: list[Call]
    payloads: Tensor | None
    n_fused: int
    have_begun: list[bool]
    index: int
    begun: Transfer | None


ABANDON = Call("abandon")
WITHOUT_DATA = Call(SHADOW)


_COMBINE = {one.name: one.combine for one in REDUCTIONS}


def with_votes(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls as they are compared: a vote to skip goes with any op."""
    is_skipped = any(call.op == SKIP for call in calls)
    return [replace(call, op=SKIP) for call in calls] if is_skipped else calls


def factors_of(calls: Sequence[Call]) -> list[float] | None:
    """By what each rank's tensor is multiplied before it is added, where ranks do not count alike:
    they have weights, or no data. The rule of weigh() in kernels/shm/protocol.c: change both.
    """
    has_weights = any(call.op in WEIGHTED_OPS.values() for call in calls)
    if not has_weights and WITHOUT_DATA not in calls:
        return None
    weights = [
        (call.weight, call.scale) if has_weights else (float(call != WITHOUT_DATA),) * 2
        for call in calls
    ]
    total = sum(weight for weight, _ in weights)
    return [scale / total if total else 0.0 for _, scale in weights]


def reduce_rows(rows: Tensor, op: str, factors: Sequence[float] | None = None) -> Tensor:
    """Reduces the rows, one after the other; 16-bit floats in float32, rounded once.

    Integers wrap around, but their mean is exact, truncated towards zero. factors: of the rows,
    whose products are added then, whatever the op.
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
    total = rows[0].to(torch.float32 if dtype in HALVES else dtype, copy=True)
    for row in rows[1:]:
        _COMBINE[op](total, row, out=total)
    if op == "mean":
        total.div_(n)
    return total.to(dtype)


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
