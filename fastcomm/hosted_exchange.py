"""Exchange: moves and reduces the tensors of a torch.distributed group's ranks, all of which call the same method.

Only bytes travel, in two exchanges: everybody's shard of everybody, then the reduced shards. The arithmetic is done here, in rank order, so
that the results have the same bits on all ranks, 16-bit floats are added in float32 and rounded once, and any backend will do. Before each
collective the ranks announce it to each other, and what is small travels with the announcement: then there is one exchange in all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastcomm.hosted_call import Call, as_bytes, reduce_rows

CARRIED_NBYTES = 1024  # of a payload that travels with the announcement: adds nothing to speak of to a packet's way
SMALL_NBYTES = 8192  # up to here one exchange of everything is quicker than two of shards
_HEAD_NBYTES = 8 * len(Call("barrier").numbers())


class Exchange:
    """group: of torch.distributed, or one of its engines. Errors are torch's RuntimeError."""

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self.group = group
        self._rank, self._world_size = rank, world_size

    def announce(self, call: Call, payload: Tensor | None = None) -> tuple[list[Call], Tensor | None]:
        """What every rank has come to, and all ranks' payloads, a row each: those of equal calls are alike. Waits until all have come.

        payload: flat, of up to CARRIED_NBYTES.
        """
        frame = torch.zeros(_HEAD_NBYTES + CARRIED_NBYTES, dtype=torch.uint8)
        frame[:_HEAD_NBYTES].view(torch.int64).copy_(torch.tensor(call.numbers()))
        if payload is not None:
            frame[_HEAD_NBYTES : _HEAD_NBYTES + payload.nbytes] = as_bytes(payload)
        frames = frame.new_empty(self._world_size, frame.numel())
        self.all_gather(frames, frame)
        calls = [Call.of(numbers) for numbers in frames[:, :_HEAD_NBYTES].contiguous().view(torch.int64).tolist()]
        if payload is None:
            return calls, None
        return calls, frames[:, _HEAD_NBYTES : _HEAD_NBYTES + payload.nbytes].contiguous().view(payload.dtype)

    # In each, rows: what has come with the announcement, None if nothing has.

    def all_reduce(self, flat: Tensor, op: str, rows: Tensor | None = None) -> None:
        if rows is None and flat.nbytes <= SMALL_NBYTES:
            rows = flat.new_empty(self._world_size, flat.numel())
            self.all_gather(rows, flat)
        if rows is not None:
            flat.copy_(reduce_rows(rows, op))
            return
        padding = -flat.numel() % self._world_size
        whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
        part = flat.new_empty(whole.numel() // self._world_size)
        self.reduce_scatter(part, whole, op)
        self.all_gather(whole, part)
        if padding:
            flat.copy_(whole[: flat.numel()])

    def reduce_scatter(self, part: Tensor, whole: Tensor, op: str, rows: Tensor | None = None) -> None:
        if rows is not None:
            mine = rows.view(self._world_size, self._world_size, part.numel())[:, self._rank]
        else:
            mine = whole.new_empty(self._world_size, part.numel())
            if part.numel():
                self.group.alltoall_base(as_bytes(mine), as_bytes(whole), [], []).wait()
        part.copy_(reduce_rows(mine, op))

    def all_gather(self, whole: Tensor, part: Tensor, rows: Tensor | None = None) -> None:
        if rows is not None:
            whole.copy_(rows.view(-1))
        elif part.numel():
            self.group._allgather_base(as_bytes(whole), as_bytes(part)).wait()

    def broadcast(self, flat: Tensor, src: int, rows: Tensor | None = None) -> None:
        if rows is not None:
            flat.copy_(rows[src])
        elif flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank = src
            self.group.broadcast([as_bytes(flat)], options).wait()
