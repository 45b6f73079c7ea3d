"""Many tensors in one collective, for every transport: which ones can go together, and the number
by which the ranks compare their sizes.
"""

from __future__ import annotations

import zlib
from array import array
from itertools import pairwise
from operator import le
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.collective import name_of, steps_made

_NAME = "all_reduce_coalesced"


def as_list(tensors: Any) -> list[Tensor]:
    """Raises ValueError or TypeError for what is no sequence, or has no tensors."""
    if isinstance(tensors, Tensor):
        raise TypeError(f"{_NAME} takes a sequence of tensors; got one: all_reduce takes that")
    try:
        found = list(tensors)
    except TypeError:
        raise TypeError(
            f"{_NAME} takes a sequence of tensors; got {type(tensors).__name__}"
        ) from None
    if not found:
        raise ValueError(f"{_NAME}: there are no tensors in the sequence")
    return found


def of_tensor(i: int, error: Exception) -> Exception:
    """The error, a ValueError or TypeError, as one that names tensor i."""
    return type(error)(f"{_NAME}: tensor {i}: {error}")


def check_together(dtypes: list[torch.dtype], begins: list[int], ends: list[int]) -> None:
    """Checks that the tensors have one dtype and share no memory. Raises TypeError or ValueError.

    begins, ends: of the memory of each; 0 where it has none.
    """
    if dtypes.count(dtypes[0]) < len(dtypes):
        i = next(i for i, dtype in enumerate(dtypes) if dtype != dtypes[0])
        raise TypeError(
            f"{_NAME}: tensor 0 is {name_of(dtypes[0])}, tensor {i} is {name_of(dtypes[i])}: make "
            "a call for each dtype"
        )
    # Where they share nothing, each ends before the next begins.
    if not all(map(le, sorted(ends), sorted(begins)[1:])):
        spans = sorted(zip(begins, ends, range(len(ends)), strict=True))
        i, j = next((i, j) for (_, end, i), (begin, _, j) in pairwise(spans) if begin < end)
        raise ValueError(f"{_NAME}: tensors {min(i, j)} and {max(i, j)} share memory")


def sizes(numels: list[int]) -> int:
    """How many tensors there are, and a checksum of their numbers of elements, packed as by
    steps_made(). Such a collective carries it where a bucket's carries its steps. Never 0.
    """
    return steps_made(len(numels), zlib.crc32(array("Q", numels)))
