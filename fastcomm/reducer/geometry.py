"""Where a parameter's elements lie: its strides, and tensors of its shape on flat memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack


def strides_of(parameter: Tensor) -> tuple[int, ...]:
    """The strides autograd gives to the parameter's gradient: the parameter's if that is dense."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def view_of(flat: Tensor, offset: int, size: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """A tensor on flat's memory, for a parameter or its gradient."""
    # set_ and not a slice: as an autograd view a gradient would refuse detach_(), which users and
    # optimizers call.
    view = torch.empty(0, dtype=flat.dtype, device=flat.device).set_(
        flat.untyped_storage(), offset, size, strides
    )
    # With a storage of its own, so that torch.save(parameter.grad) does not write the whole bucket.
    return from_dlpack(view) if view.numel() else view


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view of a dense tensor's elements, in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
