"""In words, why a gradient is not what its bucket was planned for. Reads no data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def misfit_in_slot(parameter: Parameter, gradient: Tensor, view: Tensor) -> str | None:
    """Why the gradient does not fit its slot."""
    if gradient.layout is not torch.strided:
        return (
            "is sparse, and was to be dense at attach(): name the parameter in "
            "Reducer(sparse_parameters=[...]) on every rank, or use sparse=False"
        )
    return misfit(parameter, gradient, view, view.device)


def misfit(
    parameter: Parameter, gradient: Tensor, like: Tensor, device: torch.device
) -> str | None:
    """Why the gradient is not what was planned for: of like's shape and dtype, on the device."""
    if gradient.shape != like.shape or parameter.shape != like.shape:
        was, now = tuple(like.shape), tuple(gradient.shape)
        return (
            f"has shape {now}, and had {was} at attach(): call refresh() on every rank after "
            "changing a parameter's shape"
        )
    if gradient.dtype != like.dtype or parameter.dtype not in (like.dtype, gradient.dtype):
        return (
            f"is {gradient.dtype}, and was {like.dtype} at attach(): call refresh() on every rank "
            "after changing a parameter's dtype"
        )
    if gradient.device != device:
        return (
            f"is on {gradient.device}, and was on {device} at attach(): call refresh() on "
            "every rank after moving the model"
        )
    return None
