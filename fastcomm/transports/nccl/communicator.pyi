from abc import ABCMeta
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.communicator import Work
from fastcomm.comm.transport import Transport
from fastcomm.transports.nccl.bucket import NcclBucket

# Transport says what its methods take. They are not abstract in the .pyx.
class NcclCommunicator(Transport, metaclass=ABCMeta):
    timeout: timedelta
    begun_after: int
    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        bootstrap: Any,
        timeout: timedelta,
        device: torch.device,
        neighbours: list[int],
    ) -> None: ...
    @property
    def buckets(self) -> list[NcclBucket]: ...
    def add_up(self, numbers: Tensor) -> Work: ...
    def is_captured(self) -> bool: ...
