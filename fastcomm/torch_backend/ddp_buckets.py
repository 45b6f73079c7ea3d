"""DDP's buckets in a group's own memory, where its communicator reduces them without a copy.

DDP's reducer allocates its buckets in C++, when it is made and once more before its second forward
(with lazy_bucket_allocation in each backward, on autograd's side: those stay ordinary memory).
Torch asks a backend for that memory only where DDP_DISABLE_COMM_MEM=0 is set and, up to torch 2.13,
the backend is written in C++. So this catches the operator that allocates, aten::empty, while a
reducer makes its buckets. The tensors belong to DDP: the memory goes back with the last of them.
"""

# mypy: disable-error-code="no-any-return"
# torch's stubs do not declare the reducer's methods.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from fastcomm.comm.collective import FLOATS
from fastcomm.transports.shm.memory import keep_freed_memory

Empty = Callable[[int, torch.dtype], Tensor]

_EMPTY = torch.ops.aten.empty.memory_format

_lenders: WeakKeyDictionary[dist.ProcessGroup, Empty] = WeakKeyDictionary()
# Reducers that may still make their buckets anew.
_borrowers: WeakKeyDictionary[c10d.Reducer, Empty] = WeakKeyDictionary()


def lend_memory_to_ddp(group: dist.ProcessGroup, empty: Empty) -> None:
    """From now on `empty`, given a numel and a dtype, makes this group's buckets on the CPU."""
    _lenders[group] = empty
    _make_reducers_borrow()


@functools.cache
def _make_reducers_borrow() -> None:
    reducer: Any = c10d.Reducer
    reducer.__init__ = _lending(reducer.__init__)
    reducer._rebuild_buckets = _lending_again(reducer._rebuild_buckets)


class _Lent(TorchDispatchMode):
    """Within it, buckets are allocated by `empty`."""

    def __init__(self, empty: Empty) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._empty = empty

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is _EMPTY and _is_bucket(args[0], **options):
            return self._empty(args[0][0], options["dtype"])
        return func(*args, **options)


def _is_bucket(
    shape: list[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    layout: torch.layout = torch.strided,  # torch 2.15 gives it
    **others: Any,
) -> bool:
    return (
        len(shape) == 1
        and dtype in FLOATS  # a reducer also allocates integers, for messages
        and device == torch.device("cpu")
        and layout is torch.strided
        and not others
    )


def _lending(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def lending(self: c10d.Reducer, *arguments: Any, **options: Any) -> None:
        given = (*arguments, *options.values())
        groups = [one for one in given if isinstance(one, dist.ProcessGroup)]
        empty = _lenders.get(groups[0]) if groups else None
        if empty is None:  # another backend's
            init(self, *arguments, **options)
            return
        keep_freed_memory()
        with _Lent(empty):
            init(self, *arguments, **options)
        _borrowers[self] = empty

    return lending


def _lending_again(rebuild: Callable[[c10d.Reducer], bool]) -> Callable[[c10d.Reducer], bool]:
    @functools.wraps(rebuild)
    def lending(self: c10d.Reducer) -> bool:
        empty = _borrowers.get(self)
        if empty is None:
            return rebuild(self)
        with _Lent(empty):
            is_rebuilt = rebuild(self)
        if is_rebuilt:  # it is not rebuilt twice
            del _borrowers[self]
        return is_rebuilt

    return lending
