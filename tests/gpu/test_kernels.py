"""The kernels on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastcomm.transports.cuda.blocks import BlockKernels, covered_bits
from fastcomm.transports.cuda.multi_tensor import WIRE_DTYPES, MultiTensor
from fastcomm.transports.group.wire import BLOCK, Wire
from tests.gpu import DEVICE, ids

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run ci/gpu.sh where there is one"
)

PAIRS = [(grad, wire) for grad, wires in WIRE_DTYPES.items() for wire in wires]
# Tiles hold 2048 elements, 16-byte accesses up to 8.
NUMELS = [1, 7, 8, 31, 2047, 2048, 2049, 100_003]


def unaligned(
    numels: list[int], dtype: torch.dtype, fill: Callable[..., Tensor] = torch.randn
) -> list[Tensor]:
    """Tensors every other one of which begins where it is not 16-byte aligned."""
    torch.manual_seed(0)
    return [fill(numel + i % 2, device=DEVICE).to(dtype)[i % 2 :] for i, numel in enumerate(numels)]


def offsets_of(numels: list[int]) -> list[int]:
    """Places in a flat buffer, as a layout pads them: multiples of 64."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // 64) * 64
    return offsets


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("grad, wire", PAIRS, ids=ids)
def test_kernels_cast_as_torch_does_on_the_device(comm, grad, wire):
    tensors, offsets = unaligned(NUMELS, grad), offsets_of(NUMELS)
    multi_tensor = MultiTensor(NUMELS, offsets, grad, wire, comm.cuda)
    flat = torch.zeros(offsets[-1] + NUMELS[-1], dtype=torch.float32, device=DEVICE).to(wire)
    multi_tensor.flatten(tensors, flat)
    places = [flat[offset : offset + numel] for offset, numel in zip(offsets, NUMELS, strict=True)]
    for tensor, place in zip(tensors, places, strict=True):
        assert same_bits(place, tensor.to(wire))
    back = unaligned(NUMELS, grad, torch.zeros)
    multi_tensor.unflatten(flat, back, with_stats=True)
    for tensor, place in zip(back, places, strict=True):
        assert same_bits(tensor, place.to(grad))
    exact = sum(tensor.double().square().sum() for tensor in back)
    torch.testing.assert_close(multi_tensor.square_sum, exact, rtol=1e-5, atol=0)
    assert multi_tensor.n_nonfinite == 0


@pytest.mark.parametrize("n_tensors", [504, 505, 4001])
def test_any_number_of_tensors_is_flattened(comm, n_tensors):
    numels = [1 + i % 97 for i in range(n_tensors)]
    tensors, offsets = unaligned(numels, torch.float32), offsets_of(numels)
    flat = torch.zeros(offsets[-1] + numels[-1], device=DEVICE)
    MultiTensor(numels, offsets, torch.float32, torch.float32, comm.cuda).flatten(
        tensors, flat, 0.5
    )
    expected = torch.zeros_like(flat)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.numel()] = 0.5 * tensor
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("grad", list(WIRE_DTYPES), ids=ids)
def test_norm_counts_what_is_not_finite(comm, grad):
    tensors = unaligned(NUMELS, grad)
    tensors[4][5], tensors[7][99_999] = float("inf"), float("nan")
    multi_tensor = MultiTensor(NUMELS, offsets_of(NUMELS), grad, grad, comm.cuda)
    multi_tensor.norm(tensors)
    assert multi_tensor.n_nonfinite == 2


def test_statistics_are_the_same_to_the_bit_every_time(comm):
    tensors = unaligned(NUMELS, torch.float32)
    multi_tensor = MultiTensor(NUMELS, offsets_of(NUMELS), torch.float32, torch.float32, comm.cuda)
    found = set()
    for _ in range(20):
        multi_tensor.norm(tensors)
        found.add(multi_tensor.square_sum.item())
    assert len(found) == 1


@pytest.mark.parametrize("bad", [0.0, float("nan")])
@pytest.mark.parametrize("own", range(3))
def test_blocks_have_the_bits_that_they_have_between_hosts(comm, own, bad):
    torch.manual_seed(0)
    rows = torch.randn(3, 100 * BLOCK) * 10.0 ** (torch.arange(100 * BLOCK) // BLOCK % 9 - 4)
    rows[1, 1000] = bad
    wire = Wire(torch.int8, error_feedback=False)
    coded = wire.rows_for(3, rows.shape[1])
    for i, row in enumerate(rows):
        wire.encode(i, row, coded[i])
    total = wire.reduce(coded, rows.clone(), own, "sum")
    wire.encode(own, total, coded[own])
    wire.decode(coded[own], total)

    kernels = BlockKernels(comm.cuda)
    covered = covered_bits(rows.shape[1], [rows.shape[1]], [0]).to(DEVICE)
    on_device = rows.to(DEVICE)
    values = on_device[own].clone()
    blocks = torch.cat([kernels.encode(row, covered) for row in on_device])
    kernels.add(values, covered, blocks, own)
    kernels.decode(values, kernels.encode(values, covered))
    assert torch.equal(values.cpu().nan_to_num(nan=7e9), total.nan_to_num(nan=7e9))
