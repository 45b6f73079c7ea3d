"""The oracle for floats of 8 bits, by numbers from their definition."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import eight_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {
    E4M3: [
        (448.0, 0x7E),
        (1e30, 0x7E),
        (-math.inf, 0xFE),
        (1.0, 0x38),
        (2.0**-9, 0x01),  # the smallest
        (2.0**-10, 0x00),  # in the middle, to zero, which is even
        (3 * 2.0**-10, 0x02),
        (-0.0, 0x80),
        (17.0, 0x58),  # between 16 and 18
        (19.0, 0x5A),  # between 18 and 20
        (math.nan, 0x7F),
    ],
    E5M2: [
        (57344.0, 0x7B),
        (61439.0, 0x7B),
        (61440.0, 0x7C),  # infinity
        (math.inf, 0x7C),
        (1.0, 0x3C),
        (2.0**-16, 0x01),
        (2.0**-17, 0x00),
        (-1.125, 0xBC),
        (1.375, 0x3E),
        (math.nan, 0x7F),
    ],
}


@pytest.mark.parametrize("dtype", CASES)
def test_a_number_is_cast_to_the_nearest_code(dtype: torch.dtype) -> None:
    numbers = torch.tensor([number for number, _ in CASES[dtype]])
    codes = eight_bits.cast(numbers, dtype).view(torch.uint8).tolist()
    assert codes == [code for _, code in CASES[dtype]]


@pytest.mark.parametrize("dtype", CASES)
def test_every_number_of_8_bits_stays_what_it_is(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    wide = codes.view(dtype).float()
    is_kept = ~wide.isnan() & (wide.isfinite() | (dtype == E5M2))
    again = eight_bits.cast(wide, dtype).view(torch.uint8)
    assert torch.equal(again[is_kept], codes[is_kept])
