"""Sample: whether reduced gradients in a flat buffer are still as the reduction has left them, so
that what was counted then holds.

Torch counts the writes to a tensor, and apart from them those to each gradient, which has a storage
of its own (layout.view_of). Writes that go past it, through .data or NumPy, are looked for in a
few elements of each gradient, which any scaling changes unless they are all 0: a gradient of few
rows is never known to be unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcomm.reducer.gradient_state import version_of

_PER_GRADIENT = 16


class Sample:
    """A few elements of one bucket's gradients. offsets: where the gradients begin in `flat`.
    views: these gradients; the bucket's own list, which may replace some. Takes nothing until it
    was asked once.
    """

    def __init__(self, flat: Tensor, offsets: Sequence[int], views: Sequence[Tensor]) -> None:
        self._flat, self._views = flat, views
        self._spans = [(offset, view.numel()) for offset, view in zip(offsets, views, strict=True)]
        self._places: Tensor | None = None
        self._values: Tensor | None = None
        self._versions: list[int] = []

    def take(self) -> None:
        """Notes what the reduction has left."""
        if self._places is not None:
            self._values, self._versions = self._flat[self._places], self._count_writes()

    def is_unchanged(self) -> bool:
        """Whether nobody has written to the gradients since take()."""
        if self._places is None:
            self._places = torch.cat([_places(*span) for span in self._spans])
            return False
        if self._values is None or self._count_writes() != self._versions:
            return False
        tells = bool(self._values.view(-1, _PER_GRADIENT).any(dim=1).all())
        return tells and torch.equal(self._flat[self._places], self._values)

    def _count_writes(self) -> list[int]:
        return [version_of(tensor) for tensor in (self._flat, *self._views)]


def _places(offset: int, numel: int) -> Tensor:
    """Spreads indices over one gradient; of a small one some repeat."""
    steps = torch.arange(_PER_GRADIENT, dtype=torch.int64, device="cpu")
    return offset + (steps * max(numel - 1, 0)) // (_PER_GRADIENT - 1)
