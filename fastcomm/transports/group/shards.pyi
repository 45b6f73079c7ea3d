from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcomm.control.announcement import Call
from fastcomm.transports.group.wire import Wire

CHUNK_NBYTES: int
AHEAD: int
PAYLOAD_NBYTES: int
MOST_FUSED: int

def tag_of(index: int, call: Call) -> int: ...

class GroupPair:
    def __init__(self, rank: int, up: Any, down: Any) -> None: ...

class Announcement:
    index: int
    begun: Transfer | None
    calls: list[Call]
    payloads: Tensor | None
    n_fused: int
    have_begun: tuple[int, ...]

class Announcer:
    group: Any
    def __init__(self, world_size: int) -> None: ...
    def __len__(self) -> int: ...
    def is_over(self) -> bool: ...
    def has_come(self) -> bool: ...
    def take(self) -> Announcement: ...
    def announce(self, work: Any, behind: Sequence[Call] = ()) -> None: ...

class Transfer:
    payload: Tensor | None
    fusable: Tensor | None
    def __init__(self, move: Callable[..., None]) -> None: ...
    def can_begin(self, op: str) -> bool: ...
    def prepare(self, op: str, factors: Sequence[float] | None = None) -> None: ...
    def begin(self, tag: int) -> None: ...
    def steps(
        self, op: str, payloads: Tensor | None, factors: Sequence[float] | None
    ) -> Iterator[None]: ...
    def drain(self) -> None: ...

class FusedTransfer(Transfer):
    def __init__(self, flats: Sequence[Tensor], fused: Tensor, inner: Transfer) -> None: ...

class TwoExchanges(Transfer):
    def __init__(
        self, exchange: Any, flat: Tensor, dtype: torch.dtype, numel: int | None = None
    ) -> None: ...
    def begin(self, tag: int, to: int | None = None) -> None: ...

class CodedExchanges(TwoExchanges):
    def __init__(
        self,
        exchange: Any,
        flat: Tensor,
        views: Sequence[Tensor],
        offsets: Sequence[int],
        wire: Wire,
    ) -> None: ...
