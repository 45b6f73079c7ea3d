"""Sample: whether reduced gradients in a flat buffer are still as the reduction has left them, so
that what was counted then holds.

Torch counts the writes to a tensor, of all its views together. Writes that go past it, through
.data or NumPy, are looked for in a few elements of each gradient, which any scaling changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PER_GRADIENT = 16


class Sample:
    """Of one bucket. offsets: where the gradients, of which views are given, begin in `flat`. Takes
    nothing until it was asked once.
    """

    def __init__(self, flat: Tensor, offsets: Sequence[int], views: Sequence[Tensor]) -> None:
        self._flat = flat
        self._spans = [(offset, view.numel()) for offset, view in zip(offsets, views, strict=True)]
        self._places: Tensor | None = None
        self._values: Tensor | None = None
        self._version = -1

    def take(self) -> None:
        """The reduction is over."""
        if self._places is not None:
            self._values, self._version = self._flat[self._places], self._flat._version

    def is_unchanged(self) -> bool:
        """Since take()."""
        if self._places is None:
            self._places = torch.cat([_places(*span) for span in self._spans])
            return False
        if self._values is None or self._flat._version != self._version:
            return False
        return torch.equal(self._flat[self._places], self._values)


def _places(offset: int, numel: int) -> Tensor:
    """Elements all over one gradient."""
    n = min(numel, _PER_GRADIENT)
    return offset + (torch.arange(n, device="cpu") * (numel - 1)) // max(n - 1, 1)
