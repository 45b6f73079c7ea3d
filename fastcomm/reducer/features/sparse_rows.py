"""The rows of sparse gradients: how they lie in a message, and how those of all ranks are added.

Pure arithmetic on tensors: knows no ranks but by their order. Complex values are pairs of real
numbers here.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def nbytes_of(sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> int:
    """How long a rank's message is. sizes: of each gradient, how many rows, and how many numbers
    in a row. dtype: on the wire.
    """
    return sum(n * (_INDEX_NBYTES + width * dtype.itemsize) for n, width in sizes)


def rows_in(message: Tensor, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Rows]:
    """The rows of each gradient, on the memory of a message: all indices, and then all values."""
    middle = sum(n for n, _ in sizes) * _INDEX_NBYTES
    indices = message[:middle].view(torch.int64).split([n for n, _ in sizes])
    values = message[middle : nbytes_of(sizes, dtype)].view(dtype)
    parts = values.split([n * width for n, width in sizes])
    rows = zip(indices, parts, sizes, strict=True)
    return [Rows(index, part.view(size)) for index, part, size in rows]


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
