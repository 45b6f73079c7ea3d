"""The shared-memory transport, in what only it promises, and its C core."""

import functools

import torch

from tests.support.collective_checks import CALLS


def _large(call, comm):
    call(comm, torch.ones(100_000 * comm.world_size))


# One on every path through memory.
COLLECTIVES = {
    "barrier": lambda comm: comm.barrier(),
    "small all_reduce": lambda comm: comm.all_reduce(torch.ones(10)),
    "all_reduce in shared memory": lambda comm: comm.all_reduce(
        comm.empty(100_000, dtype=torch.float32)
    ),
    "async all_reduce": lambda comm: comm.all_reduce(torch.ones(100_000), async_op=True).wait(),
    **{f"large {name}": functools.partial(_large, call) for name, call in CALLS.items()},
}
