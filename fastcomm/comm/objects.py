"""Objects that ranks tell each other, and the user's call by which they do, for errors.

Nothing that comes from a peer can execute code: it is read as torch reads checkpoints that nobody
has to trust (`weights_only`): plain data, tensors, and the classes that `tellable` has registered.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.serialization import default_restore_location

from fastcomm.comm import forms
from fastcomm.comm.standing import again
from fastcomm.comm.transport import Transport
from fastcomm.errors import (
    FastcommError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    add_to_first_line,
)

T = TypeVar("T")
_TOLD = str, {None, str}, object  # the call, why its value cannot be told, the value
_SEAL_NBYTES = 4
_ZIP = b"PK\x03\x04"  # how the files begin that torch.save() writes


def tellable(kind: type[T]) -> type[T]:
    """Lets ranks tell each other objects of this class, a dataclass or NamedTuple of plain data.

    For good: torch has one list for the process, and safe_globals() would shorten it for all
    threads.
    """
    torch.serialization.add_safe_globals([kind])
    return kind


tellable(bytes)  # torch knows those that are not empty


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """Names the user's call that makes these collectives, where other ranks call something else."""
    try:
        yield
    except (MismatchError, PeerLostError, TimeoutError) as error:
        named = again(error)
        called = f" (in {call}, which every rank must call)"
        named.args = (add_to_first_line(str(error), called),)
        raise named from error.__cause__


def on_host(comm: Transport, result: Tensor) -> Tensor:
    """A collective's result, to be read here. Waits for the device, and raises what has ended the
    collective meanwhile: over NCCL its memory may then hold anything.
    """
    result = result.cpu()
    comm.check()
    return result


def gather_numbers(
    comm: Transport, numbers: Sequence[float], dtype: torch.dtype = torch.int64
) -> list[list[Any]]:
    """Every rank's numbers, by rank; as many on each. Waits for the device."""
    own = torch.tensor(numbers, dtype=dtype, device=comm.device)
    gathered = own.new_empty(comm.world_size * len(numbers))
    comm.all_gather_single(gathered, own)
    by_rank: list[list[Any]] = on_host(comm, gathered).view(comm.world_size, -1).tolist()
    return by_rank


def gather_objects(comm: Transport, value: Any, call: str) -> list[Any]:
    """Every rank's `value`, by rank; tensors of a device come to this rank's device. call: the
    user's, for messages.

    value: plain data and tensors, as torch.load takes them with weights_only, and what is tellable.
    Raises TypeError on every rank if one has anything else; MismatchError if one has made another
    call; FastcommError if what one has sent cannot be read.
    """

    def here(storage: Any, location: str) -> Any:
        is_of_host = location == "cpu"
        return storage if is_of_host else default_restore_location(storage, str(comm.device))

    try:
        packed = _packed((call, None, value))
    except TypeError as error:
        packed = _packed((call, str(error), None))
    with naming(call):
        rows = _gather(comm, packed)
    told = [
        forms.checked(_read(rank, row, here), _TOLD, f"what rank {rank} has sent")
        for rank, row in enumerate(rows)
    ]
    first, _, _ = told[0]
    for rank, (theirs, _, _) in enumerate(told):
        if theirs != first:
            raise MismatchError(f"rank 0 calls {first}, and rank {rank} calls {theirs}")
    for rank, (_, theirs, _) in enumerate(told):
        if theirs is not None:
            raise _refused(call, rank, theirs)
    return [value for _, _, value in told]


def gather_unequal(comm: Transport, value: Any, call: str) -> list[Any] | None:
    """None where the values of all ranks are equal, by one number of each; else as
    gather_objects(). value: plain data without tensors, which repr() tells apart.
    """
    digest = hashlib.blake2b(repr((call, value)).encode(), digest_size=7).digest()
    number = -1 - int.from_bytes(digest, "little")  # no number of bytes is negative
    with naming(call):
        numbers = _announced(comm, number)
    return None if numbers == [number] * len(numbers) else gather_objects(comm, value, call)


def broadcast_object(comm: Transport, value: Any, src: int, call: str, *, is_wanted: bool) -> Any:
    """Returns rank src's `value`, its tensors on the CPU, or None on a rank that does not want it.
    Values and errors as in gather_objects().
    """
    payload, trouble = b"", None
    if comm.rank == src:
        try:
            payload = _packed(value)
        except TypeError as error:
            trouble = str(error)
    announced = gather_objects(comm, (len(payload), trouble), call)[src]
    nbytes, theirs = forms.checked(announced, (int, {None, str}), f"what rank {src} has sent")
    if theirs is not None:
        raise _refused(call, src, theirs)
    data = _room(comm, {src: nbytes})
    if comm.rank == src:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    comm.broadcast(data, src)
    return _read(src, on_host(comm, data).numpy().tobytes(), "cpu") if is_wanted else None


def _refused(call: str, rank: int, trouble: str) -> TypeError:
    return TypeError(f"{call}: rank {rank} cannot tell the other ranks: {trouble}")


def _gather(comm: Transport, packed: bytes) -> list[bytes]:
    payload = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    nbytes = _announced(comm, payload.numel())
    gathered = _room(comm, dict(enumerate(nbytes)))
    padded = torch.zeros(max(nbytes), dtype=torch.uint8, device=comm.device)
    padded[: payload.numel()] = payload
    comm.all_gather_single(gathered, padded)
    rows = on_host(comm, gathered).view(comm.world_size, -1).numpy()
    return [row[:size].tobytes() for row, size in zip(rows, nbytes, strict=True)]


def _announced(comm: Transport, number: int) -> list[int]:
    """Every rank's number, by rank: a digest, which is negative, or how many bytes it has. Raises
    MismatchError where only some have a digest.
    """
    by_rank = [theirs for (theirs,) in gather_numbers(comm, [number])]
    by_rank[comm.rank] = number
    for rank, theirs in enumerate(by_rank):
        if (theirs < 0) != (number < 0):
            raise MismatchError(
                f"rank {rank} has announced an object of {theirs} bytes: it makes another call"
            )
    return by_rank


def _room(comm: Transport, announced: Mapping[int, int]) -> Tensor:
    """Memory for what ranks have announced, in bytes by rank; all of them as long as the longest.
    Raises FastcommError for a number that cannot be right.
    """
    longest = max(announced, key=lambda rank: announced[rank])
    rank = next((rank for rank, nbytes in announced.items() if nbytes <= 0), longest)
    nbytes = announced[rank]
    try:
        if nbytes <= 0:
            raise ValueError("there are none of that size")
        return torch.empty(len(announced) * nbytes, dtype=torch.uint8, device=comm.device)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise FastcommError(
            f"rank {rank} has announced an object of {nbytes} bytes: {error}"
        ) from error


def _packed(value: Any) -> bytes:
    """The bytes of a value that other ranks can read; see gather_objects(). Raises TypeError for
    one that they would refuse, also for one that cannot be saved.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getbuffer()), map_location="meta", weights_only=True)
    except Exception as error:  # objects may raise anything, and the other ranks must hear of it
        name = _not_plain(error)
        if name is None:
            raise TypeError(f"{type(error).__name__}: {error}") from error
        raise TypeError(
            f"{name} is not plain data, and could execute code there: if it cannot, call "
            f"torch.serialization.add_safe_globals([{name}]) on every rank"
        ) from error
    return _sealed(file.getvalue())


def _sealed(saved: bytes) -> bytes:
    """With a checksum before it, by which _read() finds that it has arrived as it was."""
    return zlib.crc32(saved).to_bytes(_SEAL_NBYTES, "little") + saved


def _not_plain(error: Exception) -> str | None:
    """The class or function that torch has refused to read."""
    refused = re.search(r"GLOBAL (\S+) was", str(error))
    return None if refused is None else refused[1]


def _read(rank: int, packed: bytes, map_location: Any) -> Any:
    saved = packed[_SEAL_NBYTES:]
    # Of the formats that torch reads, only this one knows how long each of its tensors is.
    if _sealed(saved) != packed or not saved.startswith(_ZIP):
        raise FastcommError(f"what rank {rank} has sent is cut off, or was changed on its way")
    try:
        return torch.load(io.BytesIO(saved), map_location=map_location, weights_only=True)
    except Exception as error:  # the bytes may be anything
        what = _not_plain(error) or error
        raise FastcommError(f"rank {rank} has sent {what}, which is not plain data") from error
