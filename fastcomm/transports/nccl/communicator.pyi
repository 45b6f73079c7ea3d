from abc import ABCMeta

from torch import Tensor

from fastcomm.comm.communicator import Work
from fastcomm.comm.transport import Transport
from fastcomm.control.collectives import Collectives
from fastcomm.transports.nccl.bucket import NcclBucket

class NcclCommunicator(Collectives, metaclass=ABCMeta):
    begun_after: int
    @property
    def buckets(self) -> list[NcclBucket]: ...
    def add_up(self, numbers: Tensor) -> Work: ...
    def is_captured(self) -> bool: ...
    bind_bucket = Transport.bind_bucket
    all_gather_v = Transport.all_gather_v
    check = Transport.check
