"""Wire: how the float32 numbers of a bucket travel in fewer bits, and what that has dropped.

Two codecs turn numbers into bytes and back. Halves rounds to 16 bits. Blocks rounds to 8 bits, with
one float32 scale for each block of 256 elements. With error feedback a Wire keeps what encoding has
dropped (the residual) and adds it to what is encoded at the same place in the next round. Knows no
rank and no group.

Decoding is one product of two floats, so equal bytes give equal bits on every machine.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fastcomm.collective import BLOCK_DTYPES
from fastcomm.group.call import cast

# Elements that share a scale; all that is encoded is a multiple of it. The scales are 1.6% of the
# bytes.
BLOCK = 256
_SCALE_NBYTES = 4
_TINY = torch.finfo(torch.float32).tiny  # a smaller scale would lose its own bits


class Wire:
    """The way of one bucket. dtype: of 8 or 16 bits. error_feedback: adds to what is encoded what
    was dropped at the same place the last time.
    """

    def __init__(self, dtype: torch.dtype, *, error_feedback: bool) -> None:
        self._codec: Halves | Blocks = (Blocks if dtype in BLOCK_DTYPES else Halves)(dtype)
        self._feeds_back = error_feedback
        self._residuals: dict[Hashable, Tensor] = {}

    def rows_for(self, values: Tensor) -> Tensor:
        """Memory for the bytes of these rows, a row each; uninitialised."""
        n_rows, numel = values.shape
        shape = n_rows, self._codec.nbytes_of(numel)
        return torch.empty(shape, dtype=torch.uint8, device="cpu")

    def encode(self, place: Hashable, values: Tensor, coded: Tensor) -> None:
        """Writes the bytes of `values` into `coded`. With error feedback also adds the residual of
        this place to `values`. An infinity or a NaN leaves no residual.

        place: what the values are a part of; equal in every round, and encoded once in each.
        """
        if not self._feeds_back:
            self._codec.encode(values, coded)
            return
        residual = self._residuals.get(place)
        if residual is None:
            residual = self._residuals[place] = torch.zeros_like(values)
        values.add_(residual)
        self._codec.encode(values, coded)
        self._codec.decode(coded, residual)
        torch.sub(values, residual, out=residual)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def decode(self, coded: Tensor, values: Tensor) -> None:
        """Writes what the bytes stand for into `values`."""
        self._codec.decode(coded, values)


class Halves:
    """Elements rounded to float16 or bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes_of(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, values: Tensor, coded: Tensor) -> None:
        coded.view(self._dtype).copy_(values)

    def decode(self, coded: Tensor, values: Tensor) -> None:
        cast(coded.view(self._dtype), values)


class Blocks:
    """Elements of 8 bits, then the scales of their blocks: the largest magnitude of a block becomes
    the dtype's largest number. A block with an infinity or a NaN arrives as NaNs altogether.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        self._largest = info.max

    def nbytes_of(self, numel: int) -> int:
        return numel + numel // BLOCK * _SCALE_NBYTES

    def _parts(self, coded: Tensor) -> tuple[Tensor, Tensor]:
        """The elements by blocks, and their scales."""
        n_blocks = coded.numel() // (BLOCK + _SCALE_NBYTES)
        elements, scales = coded[: n_blocks * BLOCK], coded[n_blocks * BLOCK :]
        return elements.view(self._dtype).view(-1, BLOCK), scales.view(torch.float32).unsqueeze(1)

    def encode(self, values: Tensor, coded: Tensor) -> None:
        elements, scales = self._parts(coded)
        blocks = values.view(-1, BLOCK)
        scaled = blocks.abs()
        torch.amax(scaled, 1, keepdim=True, out=scales)
        scales.div_(self._largest).clamp_(min=_TINY)
        scales.masked_fill_(~scales.isfinite(), float("nan"))
        torch.div(blocks, scales, out=scaled)
        elements.copy_(scaled if self._dtype.is_floating_point else scaled.round_())

    def decode(self, coded: Tensor, values: Tensor) -> None:
        elements, scales = self._parts(coded)
        blocks = values.view(-1, BLOCK)
        if self._dtype.is_floating_point:
            blocks.copy_(_widen_float8(elements)).mul_(scales * _FLOAT8_SHIFT)
        else:
            blocks.copy_(elements).mul_(scales)


# float8_e4m3fn's exponents are biased by 7, float16's by 15.
_FLOAT8_SHIFT = 2.0**8


def _widen_float8(elements: Tensor) -> Tensor:
    """float8_e4m3fn / _FLOAT8_SHIFT as float16, exactly, NaNs apart: sign, exponent and mantissa
    moved to their places. Many times as fast as torch's own conversion.
    """
    bits = elements.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
