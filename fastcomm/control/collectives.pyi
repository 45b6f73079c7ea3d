from abc import ABCMeta
from typing import Any

from fastcomm.comm.communicator import Communicator
from fastcomm.comm.transport import Transport

class Collectives(Transport, metaclass=ABCMeta):
    def __init__(self, *arguments: Any) -> None: ...
    all_reduce = Communicator.all_reduce
    all_reduce_coalesced = Communicator.all_reduce_coalesced
    broadcast = Communicator.broadcast
    broadcast_all = Transport.broadcast_all
    all_gather_single = Communicator.all_gather_single
    reduce_scatter_single = Communicator.reduce_scatter_single
    gather = Communicator.gather
    scatter = Communicator.scatter
    all_to_all_single = Communicator.all_to_all_single
    barrier = Communicator.barrier
    check_tensor = Transport.check_tensor
    empty = Communicator.empty
    abandon = Communicator.abandon
    close = Communicator.close
    abort = Communicator.abort
