"""The shared-memory transport, in what only it promises, and its C core."""

import torch

# One on every path through memory.
COLLECTIVES = {
    "barrier": lambda comm: comm.barrier(),
    "small all_reduce": lambda comm: comm.all_reduce(torch.ones(10)),
    "all_reduce in shared memory": lambda comm: comm.all_reduce(
        comm.empty(100_000, dtype=torch.float32)
    ),
    "large all_reduce": lambda comm: comm.all_reduce(torch.ones(1_000_000)),
    "async all_reduce": lambda comm: comm.all_reduce(torch.ones(100_000), async_op=True).wait(),
    "broadcast": lambda comm: comm.broadcast(torch.ones(100_000)),
    "all_gather": lambda comm: comm.all_gather_single(
        torch.ones(100_000 * comm.world_size), torch.ones(100_000)
    ),
    "reduce_scatter": lambda comm: comm.reduce_scatter_single(
        torch.ones(100_000), torch.ones(100_000 * comm.world_size)
    ),
}
