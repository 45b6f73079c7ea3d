"""all_reduce_hook: fastcomm as the communication hook of torch's DistributedDataParallel, for those
who keep DDP.

    ddp.register_comm_hook(fastcomm.HookState(comm), fastcomm.all_reduce_hook)

DDP gathers the gradients; the hook scales, casts and reduces. Works with all of DDP's options, on
CPU and CUDA.
"""

# Not `from __future__ import annotations`: DDP compares the annotations of hooks with types.

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from fastcomm.comm.communicator import Communicator, Work
from fastcomm.comm.standing import again
from fastcomm.errors import FastcommError


class HookState:
    """The state of all_reduce_hook, which averages: one for each DistributedDataParallel.

    comm: a communicator of the same ranks as the process group of DDP, on the device of the model.
    wire_dtype: reduce in this dtype (torch.bfloat16, torch.float16); the gradients keep their own.
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
        """The tensor that is reduced for DDP's bucket `index`: its buffer, or memory of ours in the
        wire dtype, kept from step to step.
        """
        if self.wire_dtype is None or self.wire_dtype == buffer.dtype:
            return buffer
        wire = self._wires.get(index)
        # DDP cuts new buckets after the first step.
        if wire is None or wire.numel() != buffer.numel():
            wire = self._wires[index] = self.comm.empty(buffer.numel(), dtype=self.wire_dtype)
        return wire


class _Reduction:
    """A bucket under way, and the future that DDP waits for."""

    def __init__(self, state: HookState, buffer: Tensor, wire: Tensor, work: Work) -> None:
        self._state = state
        self._buffer = buffer
        self._wire = wire
        self._work = work
        self.future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def finish(self) -> None:
        """Puts the result into DDP's buffer. On CUDA it does so on a stream of its own, without
        blocking the host; the future records an event on that stream.
        """
        try:
            with torch.cuda.stream(self._state._stream):  # None: no change
                self._work.wait()
                if self._wire is not self._buffer:
                    self._buffer.copy_(self._wire)
                self.future.set_result(self._buffer)
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
    reduction = _Reduction(state, buffer, wire, work)
    state._under_way.append(reduction)
    while state._under_way and (
        state._stream is not None or bucket.is_last() or state._under_way[0].is_completed()
    ):
        state._under_way.popleft().finish()
    return reduction.future
