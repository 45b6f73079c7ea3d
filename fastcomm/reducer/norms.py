"""The norm of all gradients of a model, clipping by it, and the number of elements that are not
finite: from the flat buffers if all gradients lie there, else by torch's own functions.

Nothing here waits for the device. The reducer sees to it that the gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from fastcomm.reducer.bucket import Bucket


def norm(buckets: Sequence[Bucket]) -> Tensor:
    """The 2-norm of all gradients together, as a scalar."""
    return _norm_from(buckets, [bucket.square_sum() for bucket in buckets])


def clip_(buckets: Sequence[Bucket], max_norm: float) -> Tensor:
    """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before."""
    square_sums = [bucket.square_sum() for bucket in buckets]
    before = _norm_from(buckets, square_sums)
    if None in square_sums:
        torch.nn.utils.clip_grads_with_norm_(_with_gradient(buckets), max_norm, before)
    else:  # all gradients lie in the flat buffers
        factor = (max_norm / (before + 1e-6)).clamp(max=1)
        for bucket in buckets:
            bucket.scale_(factor)
    for bucket in buckets:
        bucket.provenance.note_scaled()
    return before


def nonfinite_count(buckets: Sequence[Bucket], device: torch.device) -> Tensor:
    """How many elements of all gradients are infinite or NaN, as an int64 scalar."""
    found = [bucket.n_nonfinite() for bucket in buckets]
    counts = [count for count in found if count is not None]
    if len(counts) < len(found):
        counts = [(~torch.isfinite(gradient)).sum() for gradient in _gradients(buckets)]
    return (
        torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=device)
    )


def _norm_from(buckets: Sequence[Bucket], square_sums: list[Tensor | None]) -> Tensor:
    known = [square_sum for square_sum in square_sums if square_sum is not None]
    if len(known) < len(square_sums):
        return _norm_of(_gradients(buckets))
    total = torch.stack(known).sum().sqrt()
    return total if any(bucket.dtype == torch.float64 for bucket in buckets) else total.float()


def _norm_of(gradients: list[Tensor]) -> Tensor:
    """As torch's get_total_norm, but in float32 for 16-bit floats, whose squares soon overflow."""
    is_half = any(gradient.dtype.itemsize < 4 for gradient in gradients)
    return torch.nn.utils.get_total_norm(
        [gradient.float() for gradient in gradients] if is_half else gradients
    )


def _with_gradient(buckets: Sequence[Bucket]) -> list[Parameter]:
    return [
        p for bucket in buckets for p in bucket.parameters if p is not None and p.grad is not None
    ]


def _gradients(buckets: Sequence[Bucket]) -> list[Tensor]:
    return [p.grad for p in _with_gradient(buckets) if p.grad is not None]
