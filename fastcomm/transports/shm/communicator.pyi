from abc import ABCMeta

from fastcomm.comm.transport import Transport
from fastcomm.control.collectives import Collectives

class ShmCommunicator(Collectives, metaclass=ABCMeta):
    bind_bucket = Transport.bind_bucket
    all_gather_v = Transport.all_gather_v
    check = Transport.check
