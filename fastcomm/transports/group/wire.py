"""Wire: how the float32 numbers of a bucket travel in fewer bits, and what that has dropped.

Two codecs turn numbers into bytes and back. Halves rounds to 16 bits. BlockCodec rounds to 8 bits,
with one float32 scale for each block of 256 elements. With error feedback a Wire keeps what
encoding has dropped (the residual) and adds it to what is encoded under the same key in the next
round. Knows no rank and no group.

Decoding is one product of two floats, so equal bytes give equal bits on every machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from fastcomm.comm.collective import BLOCK_DTYPES
from fastcomm.transports.group.blocks import BlockCodec
from fastcomm.transports.group.call import cast, reduce_rows


class Wire:
    """Encodes and decodes one bucket. dtype: of 8 or 16 bits. error_feedback: adds to what is
    encoded what was dropped under the same key the last time.
    """

    def __init__(self, dtype: torch.dtype, *, error_feedback: bool) -> None:
        self._codec: Halves | BlockCodec
        self._codec = BlockCodec(dtype) if dtype in BLOCK_DTYPES else Halves(dtype)
        self._feeds_back = error_feedback
        self._residuals: dict[Hashable, Tensor] = {}

    def rows_for(self, values: Tensor) -> Tensor:
        """Memory for the bytes of these rows, a row each; uninitialised."""
        n_rows, numel = values.shape
        shape = n_rows, self._codec.nbytes_of(numel)
        return torch.empty(shape, dtype=torch.uint8, device="cpu")

    def encode(self, key: Hashable, values: Tensor, coded: Tensor) -> None:
        """Writes the bytes of `values` into `coded`; with error feedback those of the sum with the
        residual of this key. An infinity or a NaN leaves no residual.

        key: what the values are a part of; equal in every round, and encoded once in each.
        """
        residual = self._residuals.get(key)
        if residual is None and self._feeds_back:
            residual = self._residuals[key] = torch.zeros_like(values)
        self._codec.encode(values, residual, coded)

    def decode(self, coded: Tensor, values: Tensor) -> None:
        """Writes what the bytes stand for into `values`."""
        self._codec.decode(coded, values)

    def reduce(
        self,
        coded: Tensor,
        rows: Tensor,
        own: int,
        op: str,
        factors: Sequence[float] | None = None,
    ) -> Tensor:
        """Reduces rows, one after the other: what `coded` stands for, but for row `own`, which has
        not travelled. The result may lie in `rows`, whose contents are lost. factors: see
        call.reduce_rows.
        """
        others = [i for i in range(len(rows)) if i != own]
        if isinstance(self._codec, Halves) or op not in ("sum", "mean") or factors is not None:
            for i in others:
                self._codec.decode(coded[i], rows[i])
            return reduce_rows(rows, op, factors)
        in_order = range(len(rows)) if own > 1 else [own, *others]  # two may be added either way
        total = rows[in_order[0]]
        if own > 1:
            self._codec.decode(coded[0], total)
        for i in in_order[1:]:
            if i == own:
                total.add_(rows[own])
            else:
                self._codec.accumulate(coded[i], total)
        return total.div_(len(rows)) if op == "mean" else total


class Halves:
    """Elements rounded to float16 or bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes_of(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, residual: Tensor | None, coded: Tensor) -> None:
        halves = coded.view(self._dtype)
        if residual is None:
            halves.copy_(values)
            return
        residual.add_(values)
        halves.copy_(residual)
        residual.sub_(halves)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def decode(self, coded: Tensor, values: Tensor) -> None:
        cast(coded.view(self._dtype), values)
