"""all_reduce_hook: fastcomm as the communication hook of torch's DistributedDataParallel, for those
who keep DDP.

    ddp.register_comm_hook(fastcomm.HookState(comm), fastcomm.all_reduce_hook)

DDP gathers the gradients; the hook scales, casts and reduces. Works with all of DDP's options, on
CPU and CUDA.
"""

# Not `from __future__ import annotations`: DDP compares the annotations of hooks with types.

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastcomm.comm.communicator import Communicator, Work
from fastcomm.comm.standing import again
from fastcomm.errors import FastcommError


class HookState:
    """The state of all_reduce_hook. Make one for each DistributedDataParallel.

    comm: a communicator of the same ranks as the process group of DDP, on the device of the model.
    wire_dtype: the dtype in which gradients travel (torch.bfloat16, torch.float16).
    """

    def __init__(self, comm: Communicator, *, wire_dtype: torch.dtype | None = None) -> None:
        if wire_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                "wire_dtype must be torch.bfloat16, torch.float16 or torch.float32; got "
                f"{wire_dtype!r}"
            )
        self.comm = comm
        self.wire_dtype = wire_dtype
        self._under_way: deque[_Reduction] = deque()
        self._wires: dict[int, Tensor] = {}  # by bucket
        self._stream = torch.cuda.Stream(comm.device) if comm.device.type == "cuda" else None

    def _wire_of(self, index: int, buffer: Tensor) -> Tensor:
        """What is reduced: DDP's buffer, or memory in the wire dtype, kept from step to step."""
        if self.wire_dtype is None or self.wire_dtype == buffer.dtype:
            return buffer
        wire = self._wires.get(index)
        # DDP cuts new buckets after the first step.
        if wire is None or wire.numel() != buffer.numel():
            wire = self._wires[index] = self.comm.empty(buffer.numel(), dtype=self.wire_dtype)
        return wire


class _Reduction(NamedTuple):
    """A bucket under way, and the future that DDP waits for."""

    buffer: Tensor
    wire: Tensor
    work: Work
    future: torch.futures.Future[Tensor]

    def finish(self, stream: torch.cuda.Stream | None) -> None:
        """Puts the result into DDP's buffer: on the stream, where the future records an event."""
        try:
            with torch.cuda.stream(stream):  # None: no change
                self.work.wait()
                if self.wire is not self.buffer:
                    self.buffer.copy_(self.wire)
                self.future.set_result(self.buffer)
        except Exception as error:
            # A copy: the frames of what is raised hold the future, and the backward's graph. No
            # garbage collector sees that circle.
            kept = again(error) if isinstance(error, FastcommError) else error
            self.future.set_exception(kept)  # type: ignore[arg-type]  # torch declares it wrongly
            raise


def all_reduce_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Reduces one bucket over state.comm. Raises what the communicator raises, out of backward().

    Over shared memory nothing moves by itself: each call moves the earlier buckets forward, and the
    last one completes them.
    """
    if bucket.index() == 0:
        state._under_way.clear()  # left by a backward that raised
    buffer = bucket.buffer()
    wire = state._wire_of(bucket.index(), buffer)
    if wire is not buffer:  # scaled and cast in one pass
        torch.mul(buffer, 1.0 / state.comm.world_size, out=wire)
    work = state.comm.all_reduce(wire, "mean" if wire is buffer else "sum", async_op=True)
    assert work is not None  # for the type checker: async_op was asked for
    future = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
    state._under_way.append(_Reduction(buffer, wire, work, future))
    while state._under_way and (
        state._stream is not None or bucket.is_last() or state._under_way[0].work.is_completed()
    ):
        state._under_way.popleft().finish(state._stream)
    return future
