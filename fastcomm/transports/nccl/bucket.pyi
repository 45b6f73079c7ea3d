from abc import ABCMeta

from fastcomm.comm.transport import BoundBucket

# BoundBucket says what its methods take. They are not abstract in the .pyx.
class NcclBucket(BoundBucket, metaclass=ABCMeta):
    label: int
    def clear(self) -> int: ...
