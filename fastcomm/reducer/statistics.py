"""The norm of all gradients of a model, clipping by it, and the number of elements that are not
finite: from the flat buffers if all gradients lie there, else by torch's own functions.

Nothing here waits for the device. The reducer sees to it that the gradients are reduced. Where each
rank has its shards only, the ranks add up what they find: one collective of one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from fastcomm.comm.collective import as_pairs
from fastcomm.comm.objects import naming
from fastcomm.comm.transport import Transport
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.layout import laid_out_as, values_of


def norm(buckets: Sequence[Bucket], comm: Transport, call: str = "grad_norm()") -> Tensor:
    """The 2-norm of all gradients together, as a scalar. call: the user's."""
    sharded = _in_shards(buckets)
    if sharded is not None:
        square_sum = _norm_of(sharded, comm.device).double() ** 2
        with naming(call):
            comm.all_reduce(square_sum)
        return _as_gradients(square_sum.sqrt(), buckets)
    square_sums = [bucket.square_sum() for bucket in buckets]
    known = [square_sum for square_sum in square_sums if square_sum is not None]
    if len(known) < len(square_sums):
        return _norm_of(_gradients(buckets), comm.device)
    return _as_gradients(torch.stack(known).sum().sqrt(), buckets)


def clip_(buckets: Sequence[Bucket], max_norm: float, comm: Transport) -> Tensor:
    """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before."""
    before = norm(buckets, comm, "clip_grad_norm_()")
    factor = (max_norm / (before + 1e-6)).clamp(max=1)
    sharded = _in_shards(buckets)
    if sharded is not None:
        if sharded:  # torch refuses an empty list
            torch._foreach_mul_(sharded, factor)
    elif comm.has_streams or not factor >= 1:  # on a device nobody waits for it
        for bucket in buckets:
            bucket.scale_(factor)
    for bucket in buckets:
        bucket.gradients.note_scaled()
    return before


def nonfinite_count(buckets: Sequence[Bucket], comm: Transport) -> Tensor:
    """How many elements of all gradients are infinite or NaN, as an int64 scalar."""
    sharded = _in_shards(buckets)
    if sharded is not None:
        count = _count_nonfinite(sharded, comm.device)
        with naming("nonfinite_count()"):
            comm.all_reduce(count)
        return count
    found = [bucket.n_nonfinite_now() for bucket in buckets]
    counts = [count for count in found if count is not None]
    if len(counts) < len(found):
        return _count_nonfinite(_gradients(buckets), comm.device)
    return torch.stack(counts).sum()


def n_nonfinite_in_result(buckets: Sequence[Bucket], comm: Transport) -> int:
    """How many elements the round that ends has left infinite or NaN, on all ranks together. Waits
    for the device; collective where ranks have their shards only.
    """
    counts = [bucket.n_nonfinite_in_result() for bucket in buckets]
    known = [count for count in counts if count is not None]
    # On the CPU calls of torch are what this costs.
    total = _total(known, comm.device) if comm.has_streams else sum(map(int, known))
    unknown = [b for b, count in zip(buckets, counts, strict=True) if count is None]
    if unknown:
        parts = [bucket.reduced_part() for bucket in unknown]
        here = _count_nonfinite([p for p in parts if not screened(p).isfinite()], comm.device)
        if _in_shards(buckets) is not None:
            comm.all_reduce(here)
        total = total + here
    return int(total)


def screened(tensor: Tensor) -> Tensor:
    """A scalar that is not finite if an element is not, and seldom otherwise (if a sum overflows):
    quicker to compute than a count.
    """
    is_half = tensor.is_floating_point() and tensor.dtype.itemsize < 4
    return tensor.detach().sum(dtype=torch.float32 if is_half else None)


def _count_nonfinite(gradients: list[Tensor], device: torch.device) -> Tensor:
    parts = [as_pairs(gradient) for gradient in gradients]
    return _total([(~torch.isfinite(part)).sum() for part in parts], device)


def _total(counts: list[Tensor], device: torch.device) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack(counts).sum() if counts else zero


def _in_shards(buckets: Sequence[Bucket]) -> list[Tensor] | None:
    """The reduced gradients in this rank's shards; None where every rank has all."""
    shards = [bucket.shard for bucket in buckets if bucket.shard is not None]
    if not shards or shards[0].keeps_gradients:
        return None
    return [gradient for shard in shards for gradient in shard.gradients()]


def _as_gradients(total: Tensor, buckets: Sequence[Bucket]) -> Tensor:
    """In float32, unless some gradients are float64."""
    return total if any(bucket.dtype == torch.float64 for bucket in buckets) else total.float()


def _norm_of(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Returns torch's get_total_norm, but on the device also if there are none, and in float32 for
    16-bit floats, whose squares soon overflow.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.nn.utils.get_total_norm(
        [gradient.float() if gradient.dtype.itemsize < 4 else gradient for gradient in gradients]
    )


def _gradients(buckets: Sequence[Bucket]) -> list[Tensor]:
    """The gradients, in the model's order; of sparse ones their values. All ranks have them in the
    same layout, so that they add in the same order: a 0 stands for one that is missing here, since
    another rank may have zeros.
    """
    slots = [
        (i, p, view)
        for bucket in buckets
        for i, p, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True)
        if p is not None
    ]
    return [
        torch.zeros((), dtype=view.dtype, device=view.device)
        if p.grad is None
        else values_of(laid_out_as(view, p.grad))
        for _, p, view in sorted(slots, key=itemgetter(0))
    ]
