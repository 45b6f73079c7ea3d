"""The CUDA kernels' arithmetic, as the host shim runs it: every pair of dtypes in both directions
bit by bit against torch's own casts (ours, to 8 bits), for sizes and alignments of all kinds, and
that nothing is written elsewhere (ci/sanitize.sh runs the same kernels under the sanitizers).
"""

import ctypes

import numpy as np
import pytest
import torch

from fastcomm.transports.cuda.multi_tensor import NAMES, WIRE_DTYPES
from tests.fakes.stand_ins import stand_ins
from tests.support import eight_bits

DTYPES = {name: dtype for dtype, name in NAMES.items()}
GRADS = [NAMES[grad] for grad in WIRE_DTYPES]
PAIRS = [(NAMES[grad], NAMES[wire]) for grad, wires in WIRE_DTYPES.items() for wire in wires]
CAPACITIES = (504, 4000)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TILE = 2048  # MT_TILE
THREADS = 256  # 32 * MT_WARPS
TILES = np.dtype([("offset", "<u8"), ("start", "<u4"), ("tensor", "<u2"), ("numel", "<u2")])
STATS = np.dtype([("square_sum", "<f8"), ("n_nonfinite", "<u8")])

SIZES = [1, 7, 8, 31, 100, 2047, 2048, 2049, 5000, 3 * TILE]
GUARD = 0xA5


@pytest.fixture(scope="session")
def kernels():
    """The kernels as a library of plain C++."""
    return ctypes.CDLL(stand_ins().kernels)


class Arena:
    """Tensors in one piece of memory, each `past` elements after an address aligned to 64 bytes,
    with guard bytes around them.
    """

    def __init__(self, dtype, numels, pasts):
        itemsize = dtype.itemsize
        self.starts, nbytes = [], 64
        for numel, past in zip(numels, pasts, strict=True):
            self.starts.append(nbytes + past * itemsize)
            nbytes = (self.starts[-1] + numel * itemsize + 64 + 63) // 64 * 64
        memory = torch.full((nbytes + 64,), GUARD, dtype=torch.uint8)
        self.memory = memory[-memory.data_ptr() % 64 :][:nbytes]
        self.is_guard = torch.ones(nbytes, dtype=torch.bool)
        self.tensors = []
        for start, numel in zip(self.starts, numels, strict=True):
            self.is_guard[start : start + numel * itemsize] = False
            self.tensors.append(self.memory[start : start + numel * itemsize].view(dtype))
        self.offsets = [start // itemsize for start in self.starts]

    def pointer(self):
        return ctypes.c_void_p(self.memory.data_ptr())

    def check_guards(self):
        assert (self.memory[self.is_guard] == GUARD).all(), "written beside a tensor"


def tiles_of(offsets, numels):
    rows = [
        (offset + start, start // TILE, number, min(TILE, numel - start))
        for number, (offset, numel) in enumerate(zip(offsets, numels, strict=True))
        for start in range(0, numel, TILE)
    ]
    return np.array(rows, dtype=TILES)


def launch(kernels, name, tensors, tiles, *arguments, n_blocks=3):
    """Calls a kernel as cuLaunchKernel would: with the addresses of its arguments. The capacity
    ends its name.
    """
    pointers = (ctypes.c_void_p * int(name.rpartition("_")[2]))(
        *[tensor.data_ptr() for tensor in tensors]
    )
    arguments = [
        pointers,
        ctypes.c_void_p(tiles.ctypes.data),
        ctypes.c_uint32(len(tiles)),
        *arguments,
    ]
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    getattr(kernels, name)(n_blocks, THREADS, addresses)


class Statistics:
    """Where unflatten and norm leave their results; stale ones are there already."""

    def __init__(self, n_blocks=3):
        self.records = np.full(1 + n_blocks, -1, dtype=STATS)
        self.ticket = ctypes.c_uint32(0)

    def arguments(self):
        return ctypes.c_void_p(self.records.ctypes.data), ctypes.c_void_p(
            ctypes.addressof(self.ticket)
        )

    @property
    def square_sum(self):
        return float(self.records["square_sum"][0])

    @property
    def n_nonfinite(self):
        return int(self.records["n_nonfinite"][0])


NO_STATISTICS = (ctypes.c_void_p(None), ctypes.c_void_p(None))


def flatten(kernels, grads, flat, grad, wire, scale=1.0, capacity=504, n_blocks=3, divisor=None):
    tiles = tiles_of(flat.offsets, [tensor.numel() for tensor in grads])
    launch(
        kernels,
        f"flatten_{grad}_{wire}_{capacity}",
        grads,
        tiles,
        flat.pointer(),
        ctypes.c_double(scale),
        ctypes.c_void_p(None if divisor is None else divisor.data_ptr()),
        n_blocks=n_blocks,
    )


def unflatten(
    kernels, flat, grads, grad, wire, scale=1.0, capacity=504, n_blocks=3, statistics=None
):
    tiles = tiles_of(flat.offsets, [tensor.numel() for tensor in grads])
    where = statistics.arguments() if statistics else NO_STATISTICS
    launch(
        kernels,
        f"unflatten_{wire}_{grad}_{capacity}",
        grads,
        tiles,
        flat.pointer(),
        ctypes.c_double(scale),
        *where,
        n_blocks=n_blocks,
    )


def norm(kernels, grads, grad, capacity=504, n_blocks=3):
    statistics = Statistics(n_blocks)
    tiles = tiles_of([0] * len(grads), [tensor.numel() for tensor in grads])
    launch(
        kernels, f"norm_{grad}_{capacity}", grads, tiles, *statistics.arguments(), n_blocks=n_blocks
    )
    return statistics


def bits(tensor):
    return tensor.view(BITS[tensor.dtype.itemsize])


def assert_same(actual, expected):
    """The same bits, but for those of NaNs."""
    assert actual.dtype == expected.dtype
    different = (bits(actual) != bits(expected)) & ~(
        torch.isnan(actual.double()) & torch.isnan(expected.double())
    )
    where = different.nonzero().flatten()[:5]
    assert not len(where), (
        f"at {where.tolist()}: {actual[where].tolist()} instead of {expected[where].tolist()}"
    )


def cast(tensor, dtype, scale):
    """What torch makes of it, calculating in float32, or in float64 where one of the two is. To 8
    bits we cast ourselves.
    """
    wide = torch.float64 if torch.float64 in (tensor.dtype, dtype) else torch.float32
    scaled = tensor.to(wide) * torch.tensor(scale, dtype=wide)
    return eight_bits.cast(scaled, dtype) if dtype.itemsize == 1 else scaled.to(dtype)


def ordinary(dtype, numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_kind_of_number(dtype):
    """All numbers of a dtype of 8 or 16 bits; of a larger one random bits, and all around where
    rounding to a smaller one changes.
    """
    n_bits = 8 * dtype.itemsize
    if n_bits <= 16:
        return torch.arange(2**n_bits).to(BITS[dtype.itemsize]).view(dtype)
    random = torch.randint(
        -(2**63), 2**63 - 1, (20_000,), generator=torch.Generator().manual_seed(1)
    )
    halves = torch.arange(2**16).to(torch.int16).view(torch.float16).to(dtype)
    # Two more binary digits than a half has, one of them on both sides: the ties of all smaller
    # dtypes.
    near = torch.cat(
        [
            halves * factor
            for factor in (
                1,
                1 + 2**-11,
                1 - 2**-11,
                1 + 2**-11 + 2**-22,
                2.0**100,
                2.0**-100,
                2.0**-15,
            )
        ]
    )
    return torch.cat([random.view(dtype), near, torch.nextafter(near, torch.full_like(near, 1e30))])


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 2.0**-12], ids=["unscaled", "a third", "2^-12"])
@pytest.mark.parametrize("grad, wire", PAIRS)
def test_flatten_casts_as_torch_does(kernels, grad, wire, scale):
    numbers = every_kind_of_number(DTYPES[grad])
    flat = Arena(DTYPES[wire], [numbers.numel()], [0])
    flatten(kernels, [numbers], flat, grad, wire, scale)
    assert_same(flat.tensors[0], cast(numbers, DTYPES[wire], scale))
    flat.check_guards()


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 2.0**-12], ids=["unscaled", "a third", "2^-12"])
@pytest.mark.parametrize("grad, wire", PAIRS)
def test_unflatten_casts_as_torch_does(kernels, grad, wire, scale):
    numbers = every_kind_of_number(DTYPES[wire])
    flat = Arena(DTYPES[wire], [numbers.numel()], [0])
    flat.tensors[0].copy_(numbers)
    back = Arena(DTYPES[grad], [numbers.numel()], [0])
    unflatten(kernels, flat, back.tensors, grad, wire, scale)
    assert_same(back.tensors[0], cast(numbers, DTYPES[grad], scale))
    back.check_guards()


@pytest.mark.parametrize("grad", GRADS)
def test_unscaled_copies_keep_every_bit(kernels, grad):
    numbers = every_kind_of_number(DTYPES[grad])
    flat = Arena(DTYPES[grad], [numbers.numel()], [0])
    flatten(kernels, [numbers], flat, grad, grad)
    assert torch.equal(bits(flat.tensors[0]), bits(numbers))
    back = Arena(DTYPES[grad], [numbers.numel()], [0])
    unflatten(kernels, flat, back.tensors, grad, grad)
    assert torch.equal(bits(back.tensors[0]), bits(numbers))


# Aligned, misaligned by the same, and by different numbers of elements, which may still be the same
# in bytes.
PASTS = [(0, 0), (1, 1), (3, 3), (7, 7), (8, 8), (0, 1), (5, 0), (2, 4), (3, 6)]


@pytest.mark.parametrize("past_grad, past_flat", PASTS)
@pytest.mark.parametrize("grad, wire", PAIRS)
def test_sizes_and_alignments_go_there_and_back(kernels, grad, wire, past_grad, past_flat):
    capacity = CAPACITIES[past_grad % 2]
    grads = Arena(DTYPES[grad], SIZES, [past_grad] * len(SIZES))
    flat = Arena(DTYPES[wire], SIZES, [past_flat] * len(SIZES))
    for seed, tensor in enumerate(grads.tensors):
        tensor.copy_(ordinary(tensor.dtype, tensor.numel(), seed))
    flatten(kernels, grads.tensors, flat, grad, wire, 0.5, capacity)
    for tensor, place in zip(grads.tensors, flat.tensors, strict=True):
        assert_same(place, cast(tensor, place.dtype, 0.5))
    flat.check_guards()
    back = Arena(DTYPES[grad], SIZES, [past_grad] * len(SIZES))
    unflatten(kernels, flat, back.tensors, grad, wire, 2.0, capacity)
    for tensor, place in zip(back.tensors, flat.tensors, strict=True):
        assert_same(tensor, cast(place, tensor.dtype, 2.0))
    back.check_guards()
    flat.check_guards()


@pytest.mark.parametrize("divisor, scale", [(8.0, 0.25), (0.0, 0.0)])
@pytest.mark.parametrize("grad, wire", PAIRS)
def test_flatten_divides_the_scale_by_a_number_in_memory(kernels, grad, wire, divisor, scale):
    """By 0 the scale is 0, and not an infinity."""
    tensor = ordinary(DTYPES[grad], 3000)
    flat = Arena(DTYPES[wire], [3000], [0])
    total = torch.tensor(divisor, dtype=torch.float64)
    flatten(kernels, [tensor], flat, grad, wire, 2.0, divisor=total)
    assert_same(flat.tensors[0], cast(tensor, DTYPES[wire], scale))


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("grad", GRADS)
def test_flatten_scales_in_place(kernels, grad, past):
    flat = Arena(DTYPES[grad], SIZES, [past] * len(SIZES))
    for tensor in flat.tensors:
        tensor.copy_(ordinary(tensor.dtype, tensor.numel()))
    before = [tensor.clone() for tensor in flat.tensors]
    flatten(kernels, flat.tensors, flat, grad, grad, 0.1)
    for tensor, original in zip(flat.tensors, before, strict=True):
        assert_same(tensor, cast(original, tensor.dtype, 0.1))
    flat.check_guards()


# Statistics


@pytest.mark.parametrize("grad, wire", PAIRS)
def test_unflatten_finds_the_square_sum_of_what_it_writes(kernels, grad, wire):
    flat = Arena(DTYPES[wire], SIZES, [1] * len(SIZES))
    for seed, tensor in enumerate(flat.tensors):
        tensor.copy_(ordinary(tensor.dtype, tensor.numel(), seed))
    back = Arena(DTYPES[grad], SIZES, [1] * len(SIZES))
    statistics = Statistics()
    unflatten(kernels, flat, back.tensors, grad, wire, 1 / 3, statistics=statistics)
    exact = sum(float(tensor.double().square().sum()) for tensor in back.tensors)
    assert statistics.square_sum == pytest.approx(exact, rel=1e-13 if grad == "f64" else 1e-6)
    assert statistics.n_nonfinite == 0


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("grad", GRADS)
def test_norm_finds_the_square_sum(kernels, grad, past, capacity):
    grads = Arena(DTYPES[grad], SIZES, [past] * len(SIZES))
    for seed, tensor in enumerate(grads.tensors):
        tensor.copy_(ordinary(tensor.dtype, tensor.numel(), seed))
    before = grads.memory.clone()
    statistics = norm(kernels, grads.tensors, grad, capacity)
    exact = sum(float(tensor.double().square().sum()) for tensor in grads.tensors)
    assert statistics.square_sum == pytest.approx(exact, rel=1e-13 if grad == "f64" else 1e-6)
    assert statistics.n_nonfinite == 0
    assert torch.equal(grads.memory, before)


@pytest.mark.parametrize("position", [0, 1, 30, 2047, 2048, 4999])
@pytest.mark.parametrize("grad", GRADS)
def test_non_finite_elements_are_counted_wherever_they_are(kernels, grad, position):
    values = ordinary(DTYPES[grad], 5000)
    for number in (float("inf"), float("-inf"), float("nan")):
        values[position] = number
        assert norm(kernels, [values], grad).n_nonfinite == 1
        flat = Arena(DTYPES[grad], [5000], [0])
        flat.tensors[0].copy_(values)
        statistics = Statistics()
        unflatten(kernels, flat, [torch.empty_like(values)], grad, grad, statistics=statistics)
        assert statistics.n_nonfinite == 1
        assert not np.isfinite(statistics.square_sum)


@pytest.mark.parametrize("grad", GRADS)
def test_all_non_finite_numbers_are_counted_and_no_others(kernels, grad):
    numbers = every_kind_of_number(DTYPES[grad])
    assert norm(kernels, [numbers], grad).n_nonfinite == int((~torch.isfinite(numbers)).sum())


def test_what_overflows_by_the_cast_back_is_counted(kernels):
    flat = Arena(torch.float32, [3000], [0])
    flat.tensors[0].fill_(65504.0)
    flat.tensors[0][1234] = 65520.0  # rounds to infinity as float16
    statistics = Statistics()
    unflatten(
        kernels, flat, [torch.empty(3000, dtype=torch.float16)], "f16", "f32", statistics=statistics
    )
    assert statistics.n_nonfinite == 1
