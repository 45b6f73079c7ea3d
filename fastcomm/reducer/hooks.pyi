from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastcomm.insight.recorder import Recorder
from fastcomm.reducer.gradients import Gradients

class RoundFlags:
    has_callback: bool

class CoreFlags:
    reduces_backwards: bool
    steps_alone: bool
    overlap: bool
    round: RoundFlags | None
    n_unsynced: int
    recorder: Recorder | None

class Counter:
    @property
    def ready(self) -> list[bool]: ...
    n_pending: int
    first: int
    gradients: Gradients
    def expect_gradients(self, n: int) -> None: ...

class GradientHook:
    def __init__(
        self, core: CoreFlags, bucket: Counter, i: int, note_stream: Callable[[], None] | None
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
