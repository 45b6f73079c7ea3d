"""Many tensors in one collective, for every transport: which tensors can be, and the number by which
the ranks compare their sizes.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
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
    """The error, a ValueError or TypeError, of one that is about tensor number i."""
    return type(error)(f"{_NAME}: tensor {i}: {error}")


def checked_together(tensors: Any, check: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The tensors as `check` returns each, which raises TypeError or ValueError for one that is not
    taken. Raises these also for what cannot go together.
    """
    found = as_list(tensors)
    checked: list[Tensor] = []
    for i, tensor in enumerate(found):
        try:
            checked.append(check(tensor))
        except (TypeError, ValueError) as error:
            raise of_tensor(i, error) from None
    starts = [(flat.data_ptr(), flat.nbytes) for flat in checked]
    spans = [(begin, begin + nbytes, i) for i, (begin, nbytes) in enumerate(starts) if nbytes]
    check_together([tensor.dtype for tensor in found], spans)
    return checked


def check_together(dtypes: Sequence[torch.dtype], spans: list[tuple[int, int, int]]) -> None:
    """Checks that the tensors have one dtype and share no memory. Raises TypeError or ValueError.

    spans: of each that has elements, where its memory begins and ends, and its number.
    """
    if dtypes.count(dtypes[0]) < len(dtypes):
        i = next(i for i, dtype in enumerate(dtypes) if dtype != dtypes[0])
        raise TypeError(
            f"{_NAME}: tensor 0 is {name_of(dtypes[0])}, tensor {i} is {name_of(dtypes[i])}: make "
            "a call for each dtype"
        )
    for (_, end, i), (begin, _, j) in pairwise(sorted(spans)):
        if begin < end:
            raise ValueError(f"{_NAME}: tensors {min(i, j)} and {max(i, j)} share memory")


def sizes(numels: Sequence[int]) -> int:
    """How many tensors there are, and a checksum of their numbers of elements, packed as
    steps_made() does it: without a label this number of a collective stands for them. Never 0.
    """
    return steps_made(len(numels), zlib.crc32(array("Q", numels)))
