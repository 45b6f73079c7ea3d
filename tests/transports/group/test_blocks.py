"""The codecs of 8 bits with a scale for each block, bit by bit: against torch's arithmetic and the
definition of the floats, and between instruction sets.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcomm.comm.collective import BLOCK_DTYPES
from fastcomm.transports.group.call import reduce_rows
from fastcomm.transports.group.wire import BLOCK, BlockCodec, Wire
from tests.fakes.stand_ins import compiled
from tests.support import eight_bits
from tests.support.reference import HALVES

ROOT = Path(__file__).resolve().parent.parent.parent.parent
FINFO = torch.finfo(torch.float32)
SPECIAL = (0.0, -0.0, FINFO.smallest_normal, -FINFO.max, 2.0**-149, 1.0)
BAD = (torch.inf, -torch.inf, torch.nan)

each_dtype = pytest.mark.parametrize("dtype", BLOCK_DTYPES, ids=str)


@st.composite
def values_and_residuals(draw):
    """Blocks of every magnitude, of numbers far apart; some have what is special, or not finite."""
    n_blocks, random = draw(st.integers(1, 5)), torch.Generator()
    random.manual_seed(draw(st.integers(0, 2**32)))
    exponents = torch.randint(-149, 128, (2, n_blocks, 1), generator=random)
    exponents = exponents - torch.randint(0, 14, (2, n_blocks, BLOCK), generator=random)
    both = torch.rand(2, n_blocks, BLOCK, generator=random, dtype=torch.float64) * 2 - 1
    both = (both * exponents.double().exp2()).float()
    both[0, 0, : len(SPECIAL)] = torch.tensor(SPECIAL)
    bad = draw(st.sampled_from((None, *BAD)))
    if bad is not None:
        both[0, -1, draw(st.integers(0, BLOCK - 1))] = bad
    return both.view(2, -1)


def coded_by_torch(values, dtype):
    """Elements and scales, by torch's operations one after the other."""
    blocks = values.view(-1, BLOCK)
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = (blocks.abs().amax(1, keepdim=True) / largest).clamp_(min=FINFO.smallest_normal)
    scales[~scales.isfinite()] = torch.nan
    scaled = (blocks / scales).masked_fill_(scales.isnan(), 0)
    is_float = dtype.is_floating_point
    return eight_bits.cast(scaled, dtype) if is_float else scaled.round().to(dtype), scales


def bits(tensor):
    return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


def coded_for(codec, values):
    return torch.full((codec.nbytes_of(values.numel()),), 0xAA, dtype=torch.uint8)


def check_round_trip(dtype, values, residual):
    """All that the codec does with these, beside torch."""
    codec = BlockCodec(dtype)
    numel, given_values = values.numel(), values.clone()
    for kept in (None, residual.clone()):
        fed = values if kept is None else values + kept
        elements, scales = coded_by_torch(fed, dtype)
        coded, decoded = coded_for(codec, values), torch.empty_like(values)
        codec.encode(values, kept, coded)
        assert torch.equal(bits(values), bits(given_values))
        assert torch.equal(coded[:numel], bits(elements).view(-1))
        assert torch.equal(coded[numel:].view(torch.int32), bits(scales).view(-1))
        codec.decode(coded, decoded)
        exact = (elements.double() * scales.double()).float().view(-1)  # one rounding
        assert torch.equal(bits(decoded), bits(exact))
        if kept is not None:
            dropped = (fed - decoded).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            assert torch.equal(bits(kept), bits(dropped))
        totals = residual.clone()
        codec.accumulate(coded, totals)
        numbers = totals == totals
        assert torch.equal(bits(totals)[numbers], bits(residual + decoded)[numbers])
        assert torch.equal(numbers, ~(residual + decoded).isnan())


@each_dtype
@given(values_and_residuals())
def test_what_is_coded_decoded_and_kept_has_the_bits_of_torchs_operations(dtype, both):
    check_round_trip(dtype, *both)


def nearby(dtype):
    """Every number of the dtype, every middle of two, and what comes next to each, in blocks whose
    scale is 1.
    """
    if dtype == torch.int8:
        numbers = torch.arange(-127, 127.5, 0.5)
    else:
        positive = eight_bits.values_of(dtype)[:-1].float()
        numbers = torch.cat([positive, (positive[1:] + positive[:-1]) / 2])
        numbers = torch.cat([numbers, -numbers])
    far = torch.tensor(1e9)
    numbers = torch.cat([numbers, numbers.nextafter(far), numbers.nextafter(-far)])
    largest = numbers.abs().max() if dtype == torch.int8 else torch.tensor(448.0)
    numbers = numbers[numbers.abs() <= largest.round()]
    rows = torch.nn.functional.pad(numbers, (0, -numbers.numel() % (BLOCK - 1)))
    rows = rows.view(-1, BLOCK - 1)
    return torch.cat([largest.round().expand(len(rows), 1), rows], 1).reshape(-1)


@each_dtype
def test_every_number_and_what_is_next_to_the_middles_is_rounded_to_the_nearest(dtype):
    for scale in (1, 7, 61):  # a product with the reciprocal of most is no tie
        values = nearby(dtype) * scale
        check_round_trip(dtype, values, torch.zeros_like(values))


@each_dtype
def test_flushed_subnormals_change_no_normal_number(dtype):
    values = nearby(dtype)
    codec = BlockCodec(dtype)
    coded, coded_flushing = coded_for(codec, values), coded_for(codec, values)
    decoded, decoded_flushing = torch.empty_like(values), torch.empty_like(values)
    codec.encode(values, None, coded)
    codec.decode(coded, decoded)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    codec.encode(values, None, coded_flushing)
    codec.decode(coded, decoded_flushing)
    torch.set_flush_denormal(False)
    assert torch.equal(coded, coded_flushing)
    assert torch.equal(bits(decoded), bits(decoded_flushing))


# Instruction sets


@pytest.fixture(scope="module")
def plain():
    """The codecs for any processor of this kind, which trap where C leaves a result undefined."""
    options = ["-std=gnu11", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT}/kernels"]
    checks = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    source = f"{ROOT}/kernels/wire/blocks.c"
    compiler = os.environ.get("CC", "gcc")
    return ctypes.CDLL(
        compiled("plain_blocks.so", compiler, *options, *checks, "-DFASTCOMM_NO_CLONES", source)
    )


@each_dtype
@settings(max_examples=20)
@given(both=values_and_residuals())
def test_all_instruction_sets_give_the_same_bits(plain, dtype, both):
    values, residual = both
    codec, n_blocks = BlockCodec(dtype), values.numel() // BLOCK
    head = ctypes.c_int(BLOCK_DTYPES.index(dtype)), ctypes.c_size_t(n_blocks)

    def parts(coded):
        start = coded.data_ptr()
        return ctypes.c_void_p(start), ctypes.c_void_p(start + values.numel())

    def pointer(tensor):
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

    for kept, kept_plain in ((None, None), (residual.clone(), residual.clone())):
        coded, coded_plain = coded_for(codec, values), coded_for(codec, values)
        codec.encode(values, kept, coded)
        plain.wire_encode(*head, pointer(values), pointer(kept_plain), *parts(coded_plain))
        assert torch.equal(coded, coded_plain)
        assert kept is None or torch.equal(bits(kept), bits(kept_plain))
    decoded, decoded_plain = torch.empty_like(values), torch.empty_like(values)
    codec.decode(coded, decoded)
    plain.wire_decode(*head, *parts(coded), pointer(decoded_plain))
    assert torch.equal(bits(decoded), bits(decoded_plain))
    codec.accumulate(coded, decoded)
    plain.wire_accumulate(*head, *parts(coded), pointer(decoded_plain))
    assert torch.equal(bits(decoded), bits(decoded_plain))


# Sums over ranks, and arguments


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", (*BLOCK_DTYPES, *HALVES), ids=str)
def test_rows_have_the_same_sum_wherever_the_own_one_stands(dtype, op):
    wire = Wire(dtype, error_feedback=False)
    for n in (2, 3, 5):
        for own in range(n):
            rows = torch.randn(n, BLOCK, generator=torch.Generator().manual_seed(n))
            rows *= torch.rand(n, 1, generator=torch.Generator().manual_seed(own)) * 1e3
            coded = wire.rows_for(*rows.shape)
            expected = rows.clone()
            for i in range(n):
                if i != own:
                    wire.encode(i, rows[i], coded[i])
                    wire.decode(coded[i], expected[i])
                    rows[i] = torch.nan
            if dtype in HALVES or op == "max":
                total = reduce_rows(expected, op)
            else:
                total = functools.reduce(torch.add, expected) / (n if op == "mean" else 1)
            assert torch.equal(wire.reduce(coded, rows, own, op), total)


@each_dtype
def test_a_codec_refuses_what_does_not_fit_together(dtype):
    codec, values = BlockCodec(dtype), torch.zeros(BLOCK)
    coded = coded_for(codec, values)
    for others in (
        (values.double(), None, coded),
        (values, torch.zeros(2 * BLOCK), coded),
        (values, torch.zeros(2 * BLOCK)[::2], coded),
        (values, values.to("meta"), coded),
        (values, None, coded[:-1]),
        (values, None, coded.view(torch.int8)),
        (torch.zeros(BLOCK + 1), None, coded),
    ):
        with pytest.raises(ValueError, match="contiguous, on the CPU"):
            codec.encode(*others)
    for move in (codec.decode, codec.accumulate):
        with pytest.raises(ValueError, match="contiguous, on the CPU"):
            move(coded, torch.zeros(BLOCK, dtype=torch.float16))
