from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.collective import Op
from fastcomm.comm.transport import Transport
from fastcomm.comm.who import Process
from fastcomm.errors import FastcommError
from fastcomm.transports.shm.bucket import ShmBucket
from fastcomm.transports.shm.ring import ShmWork

class ShmCommunicator(Transport):
    timeout: timedelta
    processes: tuple[Process, ...]
    def __init__(
        self, rank: int, world_size: int, local_rank: int, bootstrap: Any, timeout: timedelta
    ) -> None: ...
    @property
    def failure(self) -> FastcommError | None: ...
    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor: ...
    def empty_for_all(self, numel: int, *, dtype: torch.dtype) -> Tensor: ...
    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> ShmWork | None: ...
    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Op = "sum", *, async_op: bool = False
    ) -> ShmWork | None: ...
    def broadcast(
        self, tensor: Tensor, src: int = 0, *, async_op: bool = False
    ) -> ShmWork | None: ...
    def broadcast_all(self, tensors: list[Tensor], src: int = 0, *, label: int = 0) -> None: ...
    def all_gather_single(
        self, out: Tensor, inp: Tensor, *, async_op: bool = False
    ) -> ShmWork | None: ...
    def reduce_scatter_single(
        self, out: Tensor, inp: Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> ShmWork | None: ...
    def gather(
        self, out: Tensor | None, inp: Tensor, dst: int = 0, *, async_op: bool = False
    ) -> ShmWork | None: ...
    def scatter(
        self, out: Tensor, inp: Tensor | None, src: int = 0, *, async_op: bool = False
    ) -> ShmWork | None: ...
    def all_to_all_single(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> ShmWork | None: ...
    def barrier(self, *, async_op: bool = False) -> ShmWork | None: ...
    def bind_bucket(
        self,
        flat: Tensor,
        views: list[Tensor],
        offsets: list[int],
        *,
        wire_dtype: torch.dtype | None,
        label: int,
        lane: int = 0,
        bounds: tuple[int, ...] | None = None,
        error_feedback: bool = False,
    ) -> ShmBucket: ...
    def all_gather_v(self, flat: Tensor, bounds: tuple[int, ...], *, label: int = 0) -> ShmWork: ...
    def note_settled(self) -> None: ...
    def check(self) -> None: ...
    def check_tensor(self, tensor: Tensor) -> None: ...
    def abandon(self, *, in_any_case: bool = False) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
