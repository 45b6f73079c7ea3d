"""Torch's work on the CPU as work of CUDA streams, for ranks over the stand-ins.

Torch runs its operations on the host here, where the stand-in for the driver does not see them. In
the block of a TorchStreams, each operation counts as work of the stream that is current, which
reads and writes the bytes of its tensors, and each new tensor lies in a block of the stand-in's
caching allocator, which belongs to that stream. What is not ordered then is a race, and fails the
test: see cuda_order.h. What the host does to tensors by other ways than torch's operations
and tolist() is not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_void_p, py_object
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.dlpack import from_dlpack

from tests.fakes.stand_ins import loaded

_NON_BLOCKING = 1
# They change what a tensor is a view of, and no bytes.
_METADATA = (torch.ops.aten.set_, torch.ops.aten.resize_)
# The host waits for what they return.
_WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)
_CAPSULE = b"dltensor"


class TorchStreams(TorchDispatchMode):
    """comm: its current stream is this one's. n: how many streams there are; the first is current
    in the beginning.
    """

    def __init__(self, comm: Any, n: int = 1) -> None:
        super().__init__()
        self._cuda = loaded("cuda")
        self._cuda.stand_in_block.restype = c_void_p
        self._device = comm.cuda
        with comm.cuda.selected():
            self.streams = [self._new_stream() for _ in range(n)]
        self.current = self.streams[0]
        comm.cuda.raw_stream = lambda index: self.current
        comm.cuda.record_stream = self.record

    def __enter__(self) -> TorchStreams:
        super().__enter__()
        self._selected = self._device.selected()  # as torch's work on a device does
        self._selected.__enter__()
        Tensor.tolist = lambda tensor: self._list_of(tensor)  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        del Tensor.tolist  # that of the base class is back
        self._selected.__exit__(None, None, None)
        super().__exit__(*error)

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Makes it the current stream in the block, as torch.cuda.stream does."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def wait_for(self, stream: int) -> None:
        """Orders the current stream after what the other one has been given so far."""
        event = c_void_p()
        assert self._cuda.cuEventCreate(byref(event), 2) == 0
        assert self._cuda.cuEventRecord(event, c_void_p(stream)) == 0
        assert self._cuda.cuStreamWaitEvent(c_void_p(self.current), event, 0) == 0
        assert self._cuda.cuEventDestroy_v2(event) == 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _METADATA:
            return out
        written = list(_written(func, args, kwargs or {}))
        read = _tensors((args, kwargs))
        known = {one.untyped_storage().data_ptr() for one in (*read, *written)}
        made = {id(one) for one in _tensors(out) if one.untyped_storage().data_ptr() not in known}
        if not made and not written and packet not in _WAITING and _tensors(out):
            return out  # a view
        name = str(packet)
        for one in read:
            self._touch(name, one, False)
        for one in written:
            self._touch(name, one, True)
        if packet in _WAITING:
            self._wait()
        return tree_map(lambda one: self._moved(name, one) if id(one) in made else one, out)

    def _wait(self) -> None:
        self._cuda.stand_in_wait_for_stream(c_size_t(self.current))

    def _moved(self, name: str, tensor: Tensor) -> Tensor:
        """A new tensor in a block of the current stream's, and so with an end that is noticed."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return tensor
        managed = self._cuda.stand_in_block(c_size_t(self.current), c_size_t(storage.nbytes()))
        new_capsule: Callable[..., Any] = ctypes.PYFUNCTYPE(
            py_object, c_void_p, ctypes.c_char_p, c_void_p
        )(("PyCapsule_New", ctypes.pythonapi))
        block = from_dlpack(new_capsule(managed, _CAPSULE, None)).untyped_storage()
        block.copy_(storage)
        moved = torch.empty(0, dtype=tensor.dtype).set_(
            block, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        self._touch(name, moved, True)
        return moved

    def _touch(self, name: str, tensor: Tensor, is_write: bool) -> None:
        if tensor.numel() == 0:
            return
        extent = 1 + sum(
            (n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
        self._cuda.stand_in_touch(
            c_size_t(self.current),
            name.encode(),
            c_void_p(tensor.data_ptr()),
            c_size_t(extent * tensor.itemsize),
            c_int(is_write),
        )

    def _list_of(self, tensor: Tensor) -> Any:
        """tolist(), which is no operation of torch's, with what it does on a device."""
        for one in _tensors(tensor):
            self._touch("tolist", one, False)
            self._wait()
        return super(Tensor, tensor).tolist()

    def record(self, tensor: Tensor) -> None:
        """Notes that the current stream uses the tensor, as its record_stream does."""
        self._cuda.stand_in_record_stream(c_void_p(tensor.data_ptr()), c_size_t(self.current))

    def _new_stream(self) -> int:
        stream = c_void_p()
        assert self._cuda.cuStreamCreateWithPriority(byref(stream), _NON_BLOCKING, 0) == 0
        assert stream.value is not None
        return stream.value


def _tensors(values: Any) -> list[Tensor]:
    """Those with memory that streams touch."""
    leaves = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [one for one in leaves if one.is_cpu and one.layout is torch.strided]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
