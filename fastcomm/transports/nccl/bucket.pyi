from abc import ABCMeta

from torch import Tensor

from fastcomm.comm.communicator import Work
from fastcomm.comm.transport import BoundBucket

class NcclWeight:
    def __init__(self, scale: float, total: Tensor, adding_up: Work) -> None: ...

# BoundBucket says what its methods take. They are not abstract in the .pyx.
class NcclBucket(BoundBucket, metaclass=ABCMeta):
    label: int
    def clear(self) -> int: ...
