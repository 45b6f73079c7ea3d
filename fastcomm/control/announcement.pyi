from typing import NamedTuple

import torch

from fastcomm.comm.words import Called
from fastcomm.postmortem.flight_recorder import Entry, FlightRecorder

class Call:
    kind: str
    op: str
    dtype: torch.dtype
    wire: torch.dtype
    numel: int
    root: int
    label: int
    fingerprint: int
    nbytes: int
    shard_key: tuple[object, ...]

    def __init__(self, kind: str, *values: object, **options: object) -> None: ...
    @staticmethod
    def of(packed: bytes, world_size: int) -> Call: ...
    def packed(self) -> bytes: ...
    def is_like(self, other: Call) -> bool: ...
    def noted(self, flight: FlightRecorder) -> Entry: ...
    def called(self) -> Called: ...

class Verdict(NamedTuple):
    is_agreed: bool
    wanted: Call | None
    is_skipped: bool
    factors: list[float] | None

def conclude(calls: list[Call]) -> Verdict: ...
