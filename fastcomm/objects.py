"""Objects of all ranks: what each of them tells the others by two collectives."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from fastcomm.communicator import Communicator
from fastcomm.errors import FastcommError
from fastcomm.lifetime import again


@contextlib.contextmanager
def called_by(call: str) -> Iterator[None]:
    """Names the user's call that makes these collectives, in the errors they end with."""
    try:
        yield
    except FastcommError as error:
        named = again(error)
        named.args = (f"{error} (in {call}, which every rank must call)",)
        raise named from error


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's `value` (anything that can be pickled), by rank."""
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(comm.world_size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(sizes, torch.tensor([payload.numel()], device=comm.device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=comm.device)
    padded[: payload.numel()] = payload
    gathered = torch.empty(comm.world_size * longest, dtype=torch.uint8, device=comm.device)
    comm.all_gather_single(gathered, padded)
    rows = gathered.view(comm.world_size, longest).cpu().numpy()
    return [
        pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)
    ]
