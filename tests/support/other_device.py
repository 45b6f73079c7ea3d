"""Host memory as two devices, for scripts that should run wherever torch sees CUDA: the host's, and
that of comm.device.

A tensor is on the device if it was made there, or moved there, by a torch.device, as comm.device
is one; tensors that name no device are on the host. As on a GPU, an operation takes no tensors of
both, fastcomm refuses those of the host, and moving one makes a copy. What
fastcomm itself makes counts as neither.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastcomm.comm.gradient_slot import use_exchange_table

HOST = torch.device("meta")  # what a tensor of the host says: not what the communicator asks for
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_BETWEEN_DEVICES = ("__get__", "__set__", "__getitem__", "__setitem__", "copy_", "to")
_BETWEEN_DEVICES += ("_has_compatible_shallow_copy_type",)  # module.to()
_OWN = ("fastcomm.", "torch.optim.")  # make tensors of the host for themselves


class OtherDevice(TorchFunctionMode):
    """In the block, memory is that of two devices."""

    def __init__(self) -> None:
        super().__init__()
        use_exchange_table(False)  # fastcomm asks torch in Python, where this hears of it
        self._known: dict[int, tuple[Any, bool]] = {}  # by address: the memory, whether it is there

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        places = [self._is_there(one) for one in tensors]
        if places == [False] and func in (Tensor.device.__get__, Tensor.is_cpu.__get__):
            return HOST if func == Tensor.device.__get__ else False
        name = func.__name__
        if name not in _BETWEEN_DEVICES:
            # a single number goes with tensors of any device
            mixed = {self._is_there(one) for one in tensors if one.dim() > 0}
            assert not mixed >= {True, False}, (
                f"{name} takes tensors of comm.device and of the host: move all to comm.device"
            )
        out = func(*args, **kwargs)
        asked = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        is_there = next((place for place in places if place is not None), None)
        if isinstance(asked, torch.device):
            if name == "to" and not is_there:
                out = out.clone()
            is_there = True
        elif name in _FACTORIES:
            is_own = sys._getframe(1).f_globals["__name__"].startswith(_OWN)
            is_there = None if is_own else False
        for tensor in _tensors(out) if is_there is not None else ():
            self._known.setdefault(_address(tensor), (tensor.untyped_storage(), is_there))
        return out

    def _is_there(self, tensor: Tensor) -> bool | None:
        return self._known.get(_address(tensor), (None, None))[1]


def _tensors(values: Any) -> list[Tensor]:
    """Those with memory, which those have not that torch.compile traces with."""
    plain = (one for one in tree_leaves(values) if type(one) in (Tensor, Parameter))
    return [one for one in plain if one.layout is torch.strided and not one.is_meta]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
