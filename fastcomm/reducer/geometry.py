"""Where a parameter's elements lie: its strides, and tensors of its shape on flat memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """The strides autograd gives to the parameter's gradient: the parameter's if that is dense."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def view_of(
    flat: Tensor,
    offset: int,
    size: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor on flat's memory, for a parameter or its gradient. offset: in flat's elements.
    dtype: its own, or a complex one of pairs of its elements.
    """
    if dtype is None or dtype == flat.dtype:
        dtype = flat.dtype
    else:
        offset //= 2
    # set_ and not a slice: as an autograd view a gradient would refuse detach_(), which users and
    # optimizers call.
    view = torch.empty(0, dtype=dtype, device=flat.device).set_(
        flat.untyped_storage(), offset, size, strides
    )
    # With a storage of its own, so that torch.save(parameter.grad) does not write the whole bucket.
    return from_dlpack(view) if view.numel() else view


def kind_of(parameter: Tensor, dtype: torch.dtype) -> tuple[int, torch.dtype, int]:
    """A gradient of this dtype in a flat buffer: how many elements, of which dtype, of how many
    bytes. A complex one lies there as pairs of real numbers.
    """
    if dtype.is_complex:
        return 2 * parameter.numel(), dtype.to_real(), dtype.itemsize // 2
    return parameter.numel(), dtype, dtype.itemsize


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor's elements, in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
