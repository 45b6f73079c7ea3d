"""Objects that ranks tell each other, and the user's call by which they do, for errors."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.lifetime import again
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError, PeerLostError, TimeoutError


@contextlib.contextmanager
def called_by(call: str) -> Iterator[None]:
    """Names the user's call that makes these collectives, where other ranks call something else."""
    try:
        yield
    except (MismatchError, PeerLostError, TimeoutError) as error:
        named = again(error)
        named.args = (f"{error} (in {call}, which every rank must call)",)
        raise named from error.__cause__


def on_host(comm: Transport, result: Tensor) -> Tensor:
    """A collective's result, to be read here. Waits for the device, and raises what has ended the
    collective meanwhile: over NCCL its memory may then hold anything.
    """
    result = result.cpu()
    comm.check()
    return result


def gather_objects(comm: Transport, value: Any, call: str) -> list[Any]:
    """Every rank's `value` (anything that can be pickled), by rank. call: the user's, for messages.
    Raises MismatchError on every rank if one of them has made another call.
    """
    with called_by(call):
        told = _gather(comm, pickle.dumps((call, value)))
    first, _ = told[0]
    for rank, (theirs, _) in enumerate(told):
        if theirs != first:
            raise MismatchError(f"rank 0 calls {first}, and rank {rank} calls {theirs}")
    return [value for _, value in told]


def _gather(comm: Transport, pickled: bytes) -> list[Any]:
    payload = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    sizes = torch.empty(comm.world_size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(sizes, torch.tensor([payload.numel()], device=comm.device))
    sizes = on_host(comm, sizes)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=comm.device)
    padded[: payload.numel()] = payload
    gathered = torch.empty(comm.world_size * longest, dtype=torch.uint8, device=comm.device)
    comm.all_gather_single(gathered, padded)
    rows = on_host(comm, gathered).view(comm.world_size, longest).numpy()
    return [
        pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)
    ]
