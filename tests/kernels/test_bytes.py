"""Conversions to and from 8 bits: those that GPUs from compute capability 8.9 on have instructions
for give what the kernels compute on others, and what the formats' definition says. The instructions
are emulated by the rules of the PTX ISA: see host_shim.h.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from tests.fakes import stand_ins
from tests.support import eight_bits

SOURCE = Path(__file__).with_name("bytes.cpp")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
WAYS = {"computed": (), "by instructions": ("-DFASTCOMM_BYTE_INSTRUCTIONS",)}


@pytest.fixture(scope="module")
def libraries():
    """By way: the conversions as a library of plain C++."""
    return {way: ctypes.CDLL(_compiled(way, *options)) for way, options in WAYS.items()}


def _compiled(way, *options):
    name = f"lib{way.replace(' ', '_')}.so"
    return stand_ins.compiled(name, *stand_ins.host_kernels_compiler(), *options, SOURCE)


def _all_numbers():
    """Every bfloat16, and a number between each and the next one. So all floats: the middles where
    rounding changes are bfloat16s, and what lies between two neighbours is rounded alike.
    """
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return torch.cat([upper | lower for lower in (0, 1, 0x8000, 0xFFFF)]).view(torch.float32)


def _convert(library, name, values, dtype):
    out = torch.empty(values.numel(), dtype=dtype)
    function = getattr(library, name)
    function(*(ctypes.c_void_p(x.data_ptr()) for x in (values, out)), ctypes.c_size_t(out.numel()))
    return out


@pytest.mark.parametrize("how", ["", "_singly"], ids=["in a pack", "singly"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_float_is_rounded_as_the_format_says(libraries, name, way, how):
    values, dtype = _all_numbers(), DTYPES[name]
    codes = _convert(libraries[way], f"f32_to_{name}{how}", values, dtype)
    expected = eight_bits.cast(values, dtype)
    is_nan = values.isnan()
    # the sign of a NaN is the device's own matter: its products lose it
    assert codes.float()[is_nan].isnan().all()
    found, wanted = codes.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(found[~is_nan], wanted[~is_nan])


@pytest.mark.parametrize("how", ["", "_singly"], ids=["in a pack", "singly"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_byte_has_the_value_the_format_says(libraries, name, way, how):
    codes = torch.arange(256, dtype=torch.uint8)
    values = _convert(libraries[way], f"{name}_to_f32{how}", codes, torch.float32)
    expected = codes.view(DTYPES[name]).float()
    is_nan = expected.isnan()
    assert torch.equal(values.isnan(), is_nan)
    assert torch.equal(values[~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))
