import threading
from collections.abc import Callable

from fastcomm.transports.cuda.driver import Device

class Lane:
    def __init__(self, device: Device) -> None: ...
    def connect(
        self,
        identifier: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        look: Callable[[], None],
    ) -> None: ...
    def split_from(
        self, other: Lane, rank: int, timeout_s: float, look: Callable[[], None]
    ) -> None: ...
    def close(
        self, timeout_s: float, forget: Callable[[int], None], memory: object
    ) -> object | None: ...
    def begin_abort(self, memory: object, all_begun: threading.Event | None) -> object | None: ...
