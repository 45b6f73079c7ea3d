from abc import ABCMeta
from datetime import timedelta
from typing import Any

from fastcomm.comm.transport import Transport

# Transport says what its methods take. They are not abstract in the .pyx.
class ShmCommunicator(Transport, metaclass=ABCMeta):
    timeout: timedelta
    def __init__(
        self, rank: int, world_size: int, local_rank: int, bootstrap: Any, timeout: timedelta
    ) -> None: ...
