"""Objects that ranks tell each other, and the user's call by which they do, for errors.

Nothing that comes from a peer can execute code: it is read as torch reads checkpoints that nobody
has to trust (`weights_only`).
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.serialization import default_restore_location

from fastcomm.comm.lifetime import again
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, MismatchError, PeerLostError, TimeoutError

_PLAIN = (bytes, frozenset)  # what weights_only does not know, but is plain data, too


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


def gather_objects(comm: Transport, value: Any, call: str, kinds: Sequence[type] = ()) -> list[Any]:
    """Every rank's `value`, by rank. call: the user's, for messages.

    value: plain data and tensors, as torch.load takes them with weights_only; kinds: the other
    classes in it. Raises TypeError on every rank if one has anything else; MismatchError if one has
    made another call; FastcommError if what one has sent cannot be read.
    """
    packed, trouble = b"", None
    try:
        packed = _packed(value, kinds)
    except TypeError as error:
        trouble = str(error)
    with called_by(call):
        rows = _gather(comm, _packed((call, trouble, packed)))
    told = [_read(comm, rank, row) for rank, row in enumerate(rows)]
    first, _, _ = told[0]
    for rank, (theirs, _, _) in enumerate(told):
        if theirs != first:
            raise MismatchError(f"rank 0 calls {first}, and rank {rank} calls {theirs}")
    for rank, (_, theirs, _) in enumerate(told):
        if theirs is not None:
            raise _refused(call, rank, theirs)
    return [_read(comm, rank, row, kinds) for rank, (_, _, row) in enumerate(told)]


def broadcast_object(comm: Transport, value: Any, src: int, call: str, *, is_wanted: bool) -> Any:
    """Returns rank src's `value`, or None on a rank that does not want it. Values and errors as in
    gather_objects().
    """
    payload, trouble = b"", None
    if comm.rank == src:
        try:
            payload = _packed(value)
        except TypeError as error:
            trouble = str(error)
    about = gather_objects(comm, (len(payload), trouble), call)[src]
    if about[1] is not None:
        raise _refused(call, src, about[1])
    data = torch.zeros(about[0], dtype=torch.uint8)
    if comm.rank == src:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    data = data.to(comm.device)
    comm.broadcast(data, src)
    return _read(comm, src, on_host(comm, data).numpy().tobytes()) if is_wanted else None


def _refused(call: str, rank: int, trouble: str) -> TypeError:
    return TypeError(f"{call}: rank {rank} cannot tell the other ranks: {trouble}")


def _gather(comm: Transport, packed: bytes) -> list[bytes]:
    payload = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    sizes = torch.empty(comm.world_size, dtype=torch.int64, device=comm.device)
    comm.all_gather_single(sizes, torch.tensor([payload.numel()], device=comm.device))
    sizes = on_host(comm, sizes)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=comm.device)
    padded[: payload.numel()] = payload
    gathered = torch.empty(comm.world_size * longest, dtype=torch.uint8, device=comm.device)
    comm.all_gather_single(gathered, padded)
    rows = on_host(comm, gathered).view(comm.world_size, longest).numpy()
    return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]


def _packed(value: Any, kinds: Sequence[type] = ()) -> bytes:
    """The bytes of a value that other ranks can read; see gather_objects(). Raises TypeError for
    one that they would refuse.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        with torch.serialization.safe_globals([*_PLAIN, *kinds]):
            torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        name = _not_plain(error)
        if name is None:
            raise TypeError(str(error)) from error
        raise TypeError(
            f"{name} is not plain data, and could execute code there: if it cannot, call "
            f"torch.serialization.add_safe_globals([{name}]) on every rank"
        ) from error
    return file.getvalue()


def _not_plain(error: Exception) -> str | None:
    """The class or function that torch has refused to read."""
    refused = re.search(r"GLOBAL (\S+) was", str(error))
    return None if refused is None else refused[1]


def _read(comm: Transport, rank: int, packed: bytes, kinds: Sequence[type] = ()) -> Any:
    """What a rank has sent. Tensors of a device come to this rank's."""

    def here(storage: Any, location: str) -> Any:
        is_of_host = location == "cpu"
        return storage if is_of_host else default_restore_location(storage, str(comm.device))

    try:
        with torch.serialization.safe_globals([*_PLAIN, *kinds]):
            return torch.load(io.BytesIO(packed), map_location=here, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        what = _not_plain(error) or error
        raise FastcommError(f"rank {rank} has sent {what}, which is not plain data") from error
