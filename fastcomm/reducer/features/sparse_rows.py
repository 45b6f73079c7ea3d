"""The rows of sparse gradients: how they lie in a message, and how those of all ranks are added.

Pure arithmetic on tensors: knows no ranks but by their order. Complex values are pairs of real
numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastcomm.comm.collective import HALVES, as_pairs

_INDEX_NBYTES = 8


class Rows(NamedTuple):
    """The rows of one gradient. indices: ascending, each once, int64 of shape (n,). values: of
    shape (n, numbers in a row).
    """

    indices: Tensor
    values: Tensor


def rows_of(gradient: Tensor) -> Rows:
    """Reads a sparse tensor. Entries of the same row are added."""
    gradient = gradient.detach().coalesce()
    indices = gradient.indices()
    row = torch.zeros_like(indices[0])
    for size, index in zip(gradient.shape, indices, strict=False):  # of the sparse dimensions
        row = row * size + index
    values = as_pairs(gradient.values().resolve_conj())
    return Rows(row, values.reshape(len(row), values.shape[1:].numel()))


def sparse_of(rows: Rows, size: torch.Size, n_sparse: int, dtype: torch.dtype) -> Tensor:
    """The coalesced sparse tensor of these rows: of shape `size`, whose first n_sparse dimensions
    are sparse.
    """
    index, indices = rows.indices, []
    for extent in reversed(size[:n_sparse]):
        indices.append(index % extent)
        index = index // extent
    values = rows.values.to(dtype.to_real() if dtype.is_complex else dtype)
    shape = len(rows.indices), *size[n_sparse:]
    if dtype.is_complex:
        values = torch.view_as_complex(values.reshape(*shape, 2))
    return torch.sparse_coo_tensor(
        torch.stack(indices[::-1]),
        values.reshape(shape),
        size,
        dtype=dtype,
        device=values.device,
        is_coalesced=True,
        check_invariants=False,
    )


class Section(NamedTuple):
    """The place of one gradient's rows in a message. numel: of a row. dtype: on the wire."""

    begin: int
    n_rows: int
    numel: int
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Indices begin at multiples of their size."""
        nbytes = self.n_rows * (_INDEX_NBYTES + self.numel * self.dtype.itemsize)
        return self.begin + math.ceil(nbytes / _INDEX_NBYTES) * _INDEX_NBYTES

    def rows(self, message: Tensor) -> Rows:
        """On the memory of the message, which is of bytes."""
        middle = self.begin + self.n_rows * _INDEX_NBYTES
        last = middle + self.n_rows * self.numel * self.dtype.itemsize
        values = message[middle:last].view(self.dtype).view(self.n_rows, self.numel)
        return Rows(message[self.begin : middle].view(torch.int64), values)


def sections_of(
    begin: int, kinds: Iterable[tuple[int, int, torch.dtype]]
) -> tuple[list[Section], int]:
    """The places of a rank's rows, one after the other, and where they end. kinds: of each
    gradient how many rows, how many numbers in a row, and their dtype on the wire.
    """
    sections = []
    for n_rows, numel, dtype in kinds:
        sections.append(Section(begin, n_rows, numel, dtype))
        begin = sections[-1].end
    return sections, begin


def added(parts: Sequence[Rows], factors: Sequence[float] | None, divisor: int) -> Rows:
    """The sum of all ranks' rows, in float32 if they are 16-bit floats. Each row is added in the
    order of the ranks, so that it has the same bits everywhere.

    parts, factors: by rank. divisor: of the sum.
    """
    indices, places = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    like = parts[0].values
    wide = torch.float32 if like.dtype in HALVES else like.dtype
    total = torch.zeros(len(indices), like.shape[1], dtype=wide, device=like.device)
    begin = 0
    for i, part in enumerate(parts):
        end = begin + len(part.indices)
        factor = 1 if factors is None else factors[i]
        # no row comes twice from one rank, so threads of a device do not race for it
        total.index_add_(0, places[begin:end], part.values.to(wide), alpha=factor)
        begin = end
    return Rows(indices, total if divisor == 1 else total.div_(divisor))
