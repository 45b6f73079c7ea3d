"""What the backend "fastcomm" leaves to Gloo: the same results."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from process_groups import gloo, ranks, start, world  # noqa: F401 (the fixture)
from ranks import on_ranks
from torch import Tensor

LAYOUTS = {
    "flat": lambda: torch.zeros(6),
    "matrix": lambda: torch.zeros(2, 3),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "with gaps": lambda: torch.zeros(2, 6)[:, ::2],
    "scalar": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0),
}
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def _numbers(layout: str, dtype: torch.dtype, salt: int = 0) -> Tensor:
    tensor = LAYOUTS[layout]()
    tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return tensor.copy_(((torch.arange(tensor.numel()) * 3 + 5 * salt) % 7 + 1).view(tensor.shape))


def _outcome(call) -> object:
    """What a collective leaves in a tensor, or that it raises."""
    try:
        return call().tolist()
    except (RuntimeError, ValueError):
        return "an error"


def _reduce_scatter(group, rank: int, layout: str, dtype: torch.dtype, op) -> Tensor:
    output = _numbers(layout, dtype)
    parts = [_numbers(layout, dtype, rank + to) for to in range(group.size())]
    dist.reduce_scatter(output, parts, op, group=group)
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_list_is_reduced_bit_by_bit_as_by_gloo(comm, layout):
    for dtype in (torch.int64, torch.int8):
        for op in BITWISE:
            arguments = comm.rank, layout, dtype, op
            ours = _outcome(partial(_reduce_scatter, world(), *arguments))
            assert ours == _outcome(partial(_reduce_scatter, gloo(), *arguments)), (dtype, op)


@pytest.mark.parametrize("layout", ["flat", "scalar"])
@on_ranks(2)
def test_bits_of_floats_are_an_error_as_over_gloo(comm, layout):
    world()
    with pytest.raises(RuntimeError, match="non-integral"):
        _reduce_scatter(world(), comm.rank, layout, torch.float32, dist.ReduceOp.BAND)
    with pytest.raises(RuntimeError, match="non-integral"):
        _reduce_scatter(gloo(), comm.rank, layout, torch.float32, dist.ReduceOp.BAND)


@on_ranks(2)
def test_scalars_are_reduced_and_scattered(comm):
    """Over Gloo alone this ends the process."""
    world()
    bits, total = torch.tensor(0), torch.tensor(0, dtype=torch.int8)
    dist.reduce_scatter_tensor(bits, torch.tensor([1, 4]) << comm.rank, dist.ReduceOp.BOR)
    dist.reduce_scatter_tensor(total, torch.tensor([3, 5], dtype=torch.int8))
    assert bits.item() == (3, 12)[comm.rank] and total.item() == (6, 10)[comm.rank]
    with pytest.raises(RuntimeError):
        dist.reduce_scatter_tensor(total, torch.tensor(3, dtype=torch.int8))
