"""The kernels of the wire of 8 bits, as the host shim and as the block emulator run them: they make
the bits that kernels/wire/blocks.c makes between hosts, whatever the sizes, and write nothing
elsewhere.
"""

import ctypes

import pytest
import torch

from fastcomm.transports.cuda.blocks import covered_bits
from fastcomm.transports.group.wire import BLOCK, BlockCodec, Wire
from tests.fakes.stand_ins import stand_ins
from tests.kernels.test_frames import Emulator, built
from tests.kernels.test_kernels import THREADS, Arena, assert_same, ordinary

NBYTES = BLOCK + 4  # a block as it travels: its scale, then its elements
# Nothing, one element, less and more than a half, a block and three of them, whole packs and not.
SIZES = [0, 1, 6, 127, 128, 130, 256, 257, 511, 768, 1000]
SUM, PROD, MAX, MIN = range(4)  # NCCL's numbers


@pytest.fixture(scope="module", params=["shim", "emulator"])
def kernels(request):
    if request.param == "shim":
        return ctypes.CDLL(stand_ins().kernels)
    library = ctypes.CDLL(built("libframes.so", "-shared"))
    library.emulator_error.restype = ctypes.c_char_p
    return Emulator(library)


def _launch(kernels, name, values, blocks, n_blocks, *more, covered=None):
    arguments = [
        ctypes.c_void_p(values.data_ptr()),
        ctypes.c_void_p(blocks.data_ptr()),
        ctypes.c_uint32(n_blocks),
        ctypes.c_uint64(values.numel()),
    ]
    if name != "decode":
        if covered is None:
            covered = covered_bits(values.numel(), [values.numel()], [0])
        arguments += [ctypes.c_void_p(covered.data_ptr()), *map(ctypes.c_int, more)]
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    getattr(kernels, f"{name}_blocks")(2, THREADS, addresses)


def _encode(kernels, values, n_blocks, covered=None):
    arena = Arena(torch.uint8, [n_blocks * NBYTES], [0])
    _launch(kernels, "encode", values, arena.tensors[0], n_blocks, covered=covered)
    arena.check_guards()
    return arena.tensors[0]


def _decode(kernels, blocks, numel):
    arena = Arena(torch.float32, [numel], [0])
    _launch(kernels, "decode", arena.tensors[0], blocks, len(blocks) // NBYTES)
    arena.check_guards()
    return arena.tensors[0]


def _add(kernels, rows, own, op):
    """The result of the rank that has the row `own`."""
    n_blocks = -(-rows.shape[1] // BLOCK)
    blocks = torch.cat([_encode(kernels, row, n_blocks) for row in rows])
    blocks.view(len(rows), -1)[own] = 0x7F  # which is not read
    arena = Arena(torch.float32, [rows.shape[1]], [0])
    arena.tensors[0].copy_(rows[own])
    _launch(kernels, "add", arena.tensors[0], blocks, n_blocks, len(rows), own, op)
    arena.check_guards()
    return arena.tensors[0]


def _padded(values, n_blocks):
    return torch.cat([values, torch.zeros(n_blocks * BLOCK - values.numel())])


def _coded_between_hosts(values):
    """Whole blocks as blocks.c encodes them, each behind its scale."""
    n_blocks = values.numel() // BLOCK
    coded = torch.empty(n_blocks * NBYTES, dtype=torch.uint8)
    BlockCodec(torch.int8).encode(values, None, coded)
    elements, scales = coded.split([n_blocks * BLOCK, n_blocks * 4])
    return torch.cat([scales.view(-1, 4), elements.view(-1, BLOCK)], 1).flatten()


@pytest.mark.parametrize("numel", SIZES)
def test_the_bytes_are_those_between_hosts(kernels, numel):
    n_blocks = 5  # of which the last are behind the values' end
    values = ordinary(torch.float32, numel, numel) * 10.0 ** (torch.arange(numel) % 7 - 3)
    blocks = _encode(kernels, values, n_blocks)
    assert torch.equal(blocks, _coded_between_hosts(_padded(values, n_blocks)))
    back = torch.empty(n_blocks * BLOCK)
    coded = torch.empty(n_blocks * NBYTES, dtype=torch.uint8)
    BlockCodec(torch.int8).encode(_padded(values, n_blocks), None, coded)
    BlockCodec(torch.int8).decode(coded, back)
    assert_same(_decode(kernels, blocks, numel), back[:numel])


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(-127.0, 129.0).clamp(max=127) * 3,
        torch.arange(256.0) - 127.5,  # in the middle between two integers, most of them
        torch.full((256,), 1e-45),
        torch.full((256,), torch.finfo(torch.float32).max),
        -torch.zeros(256),
    ],
    ids=["multiples", "halves", "subnormal", "great", "minus zero"],
)
def test_what_is_rare_is_rounded_as_between_hosts(kernels, values):
    assert torch.equal(_encode(kernels, values, 1), _coded_between_hosts(values))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_block_that_is_not_finite_arrives_as_nans(kernels, bad):
    values = torch.ones(3 * BLOCK)
    values[300] = bad
    blocks = _encode(kernels, values, 3)
    assert torch.equal(blocks, _coded_between_hosts(values))
    expected = torch.ones(3, BLOCK)
    expected[1] = float("nan")
    assert_same(_decode(kernels, blocks, 3 * BLOCK), expected.flatten())


def test_what_lies_between_gradients_is_read_as_zeros(kernels):
    numels, offsets = [70, 1, 31, 600], [2, 96, 97, 160]
    values, zeroed = torch.full((763,), float("nan")), torch.zeros(763)
    for numel, offset in zip(numels, offsets, strict=True):
        for one in (values, zeroed):
            one[offset : offset + numel] = ordinary(torch.float32, numel)
    covered = covered_bits(763, numels, offsets)
    assert torch.equal(_encode(kernels, values, 3, covered), _encode(kernels, zeroed, 3))


@pytest.mark.parametrize("n_rows, own", [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_sum_has_the_bits_that_it_has_between_hosts(kernels, n_rows, own):
    rows = ordinary(torch.float32, n_rows * 3 * BLOCK).view(n_rows, -1)
    wire = Wire(torch.int8, error_feedback=False)
    coded = wire.rows_for(n_rows, 3 * BLOCK)
    for i, row in enumerate(rows):
        wire.encode(i, row, coded[i])
    expected = wire.reduce(coded, rows.clone(), own, "sum")
    assert_same(_add(kernels, rows, own, SUM), expected)


@pytest.mark.parametrize(
    "op, reduce",
    [(PROD, torch.prod), (MAX, torch.amax), (MIN, torch.amin)],
    ids=["prod", "max", "min"],
)
def test_other_ops_pass_on_what_is_not_finite(kernels, op, reduce):
    rows = (torch.arange(3000.0) * 37 % 255 - 127).view(3, 1000)
    rows[:, ::BLOCK] = 127  # so that a step is 1
    for row, at in enumerate((100, 400, 700)):
        rows[row, at] = float("nan")
    total = _add(kernels, rows, 1, op)
    assert total[[100, 400, 700]].isnan().all()
    untouched = slice(3 * BLOCK, 1000)
    assert_same(total[untouched], reduce(rows, 0)[untouched])
