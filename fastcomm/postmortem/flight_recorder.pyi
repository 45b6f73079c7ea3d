from typing import Protocol
from weakref import WeakValueDictionary

import torch

from fastcomm.comm.who import Process
from fastcomm.errors import FastcommError

class Activity(Protocol):
    def in_words(self) -> str: ...

class Entry:
    number: int
    lane: int
    epoch: int
    kind: str
    dtype: torch.dtype | None
    numel: int
    op: str | None
    root: int
    label: int
    fingerprint: int
    posted_ns: int
    started_ns: int
    ended_ns: int
    error: str | None
    def start(self) -> None: ...
    def end(self, error: FastcommError | None = None) -> None: ...

class FlightRecorder:
    epoch: int
    channel: tuple[int, int] | None
    backend: str
    rank: int
    pids: tuple[int, ...]
    names: dict[int, str]
    activities: WeakValueDictionary[str, Activity]
    def __init__(self, backend: str, rank: int, processes: tuple[Process, ...]) -> None: ...
    def note(
        self,
        kind: str,
        dtype: torch.dtype | None,
        numel: int,
        number: int = 0,
        op: str | None = None,
        root: int = 0,
        label: int = 0,
        fingerprint: int = 0,
    ) -> Entry: ...
    def entries(self) -> list[Entry]: ...

def living() -> list[FlightRecorder]: ...
