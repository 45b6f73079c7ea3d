"""What reductions should give, by torch's own arithmetic; tensors to try them on, and where to put
them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastcomm.comm.collective import CPU_DTYPES, FLOATS, HALVES, OPS
from fastcomm.comm.communicator import Communicator

__all__ = ["DTYPES", "FLOATS", "HALVES", "INTEGERS", "OPS"]

DTYPES = CPU_DTYPES
INTEGERS = tuple(dtype for dtype in DTYPES if dtype not in FLOATS)

# Where the ranks' tensors lie: all in comm.empty memory, all elsewhere, or rank 0's alone in
# comm.empty memory.
PLACES = ("comm.empty", "ordinary", "mixed")


def shards_of(dtype: torch.dtype, n: int, numel: int, seed: int = 0) -> list[Tensor]:
    """n tensors on the CPU that begin one element off any alignment. Moderate floats, so that
    products stay finite; integers of any size.
    """
    values = _random_values(dtype, 2 ** max(18, (2 * numel).bit_length()))
    begins = torch.randint(
        values.numel() - numel, (n,), generator=torch.Generator().manual_seed(seed), device="cpu"
    )
    return [torch.cat([values[:1], values[b : b + numel]])[1:] for b in begins.tolist()]


@functools.cache
def _random_values(dtype: torch.dtype, numel: int) -> Tensor:
    """Drawn once per process: drawing takes longer than any collective."""
    random = torch.Generator().manual_seed(numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=random, dtype=torch.float64, device="cpu").to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(
        limits.min, limits.max, (numel,), generator=random, dtype=dtype, device="cpu"
    )


def reduced(shards: list[Tensor], op: str) -> Tensor:
    """The reduction of the shards, sums by the tree and others shard after shard: 16-bit floats in
    float32 and rounded once, integers wrapping around.
    """
    dtype, n = shards[0].dtype, len(shards)
    if dtype in HALVES:
        return reduced([shard.float() for shard in shards], op).to(dtype)
    if op == "mean":
        return reduced(shards, "sum") / n if dtype.is_floating_point else integer_mean(shards)
    if op != "sum":
        step = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op]
        return functools.reduce(step, shards).clone()
    sums, half = [shard.clone() for shard in shards], 1
    while half < n:
        for i in range(0, n - half, 2 * half):
            sums[i] += sums[i + half]
        half *= 2
    return sums[0]


def integer_mean(shards: list[Tensor]) -> Tensor:
    """By Python's integers, which know no overflow, or by 64 bits where they are enough. Truncated
    towards zero.
    """
    n, dtype = len(shards), shards[0].dtype
    if dtype != torch.int64:
        total = functools.reduce(torch.add, [shard.long() for shard in shards])
        return torch.div(total, n, rounding_mode="trunc").to(dtype)
    totals = map(sum, zip(*(shard.flatten().tolist() for shard in shards), strict=True))
    means = [total // n if total >= 0 else -(-total // n) for total in totals]
    return torch.tensor(means, dtype=shards[0].dtype, device=shards[0].device).view(shards[0].shape)


def assert_same_bits(tensor: Tensor, expected: Tensor) -> None:
    """Equal to the last bit, but for what kind of NaN a NaN is, and the sign of zeros that minimum
    and maximum take for equal.
    """
    if tensor.dtype == expected.dtype and torch.equal(tensor, expected):
        return  # at a tenth of the cost of what follows
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


def assert_reduced(comm: Communicator, tensor: Tensor, shards: list[Tensor], op: str) -> None:
    """To the last bit where the transport adds by the tree, else to the roundings of any other
    order.
    """
    if comm.adds_by_tree:
        assert_same_bits(tensor.cpu(), reduced(shards, op))
    else:
        assert_rounded(tensor.cpu(), shards, op, roundings=comm.world_size + 1)


def assert_rounded(
    tensor: Tensor,
    shards: list[Tensor],
    op: str,
    *,
    roundings: int,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Integers, minima and maxima exactly. Floats to so many roundings to the dtype they travelled
    in, of numbers as large as the sum of all magnitudes.
    """
    if not tensor.dtype.is_floating_point or op in ("min", "max"):
        assert_same_bits(tensor, reduced(shards, op))
        return
    precision = torch.finfo(wire_dtype or tensor.dtype)
    magnitude = reduced([shard.abs().double() for shard in shards], op)
    error = (tensor.double() - reduced([shard.double() for shard in shards], op)).abs()
    excess = error - roundings * precision.eps * magnitude
    assert (excess <= 2 * precision.tiny).all(), (tensor.dtype, op, excess.max())


def placed(comm: Communicator, where: str, tensor: Tensor) -> Tensor:
    """A copy of the tensor at one of PLACES."""
    if where == "comm.empty" or (where == "mixed" and comm.rank == 0):
        return comm.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor)
    return tensor.to(comm.device, copy=True)


def check_all_reduce(
    comm: Communicator,
    numel: int = 5000,
    dtype: torch.dtype = torch.float32,
    op: str = "sum",
    where: str = "ordinary",
    seed: int = 0,
) -> None:
    """One all_reduce, to see that it is right, or only that the communicator still works."""
    shards = shards_of(dtype, comm.world_size, numel, seed)
    tensor = placed(comm, where, shards[comm.rank])
    assert comm.all_reduce(tensor, op) is None
    assert_reduced(comm, tensor, shards, op)


def check_async_collectives(comm: Communicator, numel: int = 3000) -> None:
    """One of each kind under way at a time, waited for in another order."""
    n, rank = comm.world_size, comm.rank
    shards = [shard.to(comm.device) for shard in shards_of(torch.int64, n, n * numel)]
    total, moved, part = shards[rank].clone(), shards[rank].clone(), shards[0].new_empty(numel)
    everyone = moved.new_empty(n * n * numel)
    works = [
        comm.all_reduce(total, async_op=True),
        comm.broadcast(moved, 1, async_op=True),
        comm.all_gather_single(everyone, shards[rank], async_op=True),
        comm.barrier(async_op=True),
        comm.reduce_scatter_single(part, shards[rank], "mean", async_op=True),
    ]
    for work in reversed(works):
        assert work is not None
        work.wait()
    assert_same_bits(total, reduced(shards, "sum"))
    assert_same_bits(moved, shards[1])
    assert_same_bits(everyone, torch.cat(shards))
    assert_same_bits(part, reduced(shards, "mean").view(n, numel)[rank])
