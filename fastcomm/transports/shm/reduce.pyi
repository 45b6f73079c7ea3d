from torch import Tensor

from fastcomm.comm.collective import Op

def reduce_shards(buffers: list[Tensor], op: Op = "sum") -> bool: ...
