from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastcomm.insight.recorder import Recorder
from fastcomm.reducer.provenance import Provenance

class RoundFlags:
    has_callback: bool

class ReducerFlags:
    _is_synchronizing: bool
    steps_alone: bool
    _overlap: bool
    _round: RoundFlags | None
    _n_unsynced: int
    recorder: Recorder | None

class Counter:
    @property
    def ready(self) -> list[bool]: ...
    n_pending: int
    first: int
    provenance: Provenance
    def count_anew(self, n: int) -> None: ...

class GradientHook:
    def __init__(
        self, reducer: ReducerFlags, bucket: Counter, i: int, note_stream: Callable[[], None] | None
    ) -> None: ...
    def __call__(self, parameter: Tensor) -> None: ...

class EndOfBackward:
    def __init__(
        self, when_through: Callable[[], None], when_dropped: Callable[[], None]
    ) -> None: ...
    def __call__(self) -> None: ...

class Untraced:
    def __init__(self, function: Callable[..., Any]) -> None: ...
    def __call__(self, *arguments: Any) -> Any: ...

def displaced(views: list[Tensor], addresses: list[int]) -> list[int]: ...
