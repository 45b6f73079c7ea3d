"""Floats of 8 bits, from their definition: torch's own casts to them differ from one version to the
next, where a number is too large.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bits of the mantissa, bias of the exponent, code of the largest number. e4m3 has no infinity: what
# is too large becomes that number.
_FORMATS = {
    torch.float8_e4m3fn: (3, 7, 0x7E),
    torch.float8_e5m2: (2, 15, 0x7B),
}
NAN, SIGN = 0x7F, 0x80


def values_of(dtype: torch.dtype) -> Tensor:
    """The positive numbers in float64, by code, and the one that would come next."""
    n_mantissa, bias, largest = _FORMATS[dtype]
    codes = torch.arange(largest + 2)
    exponent, mantissa = codes >> n_mantissa, (codes & (2**n_mantissa - 1)).double()
    is_normal = exponent > 0
    significand = mantissa / 2**n_mantissa + is_normal
    return significand * 2.0 ** (torch.where(is_normal, exponent, 1) - bias).double()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float32 to the nearest number of 8 bits, in the middle to the one of even code."""
    _, _, largest = _FORMATS[dtype]
    values, magnitude = values_of(dtype), tensor.detach().cpu().double().abs()
    middles = (values[:-1] + values[1:]) / 2
    code = torch.searchsorted(middles, magnitude)  # in the middle the smaller one
    code = code.clamp(max=largest + 1)
    is_tie = (code <= largest) & (magnitude == middles[code.clamp(max=largest)])
    code = code + (is_tie & (code % 2 == 1))
    if dtype == torch.float8_e4m3fn:
        code = code.clamp(max=largest)  # else the next code is infinity
    code = torch.where(magnitude.isnan(), NAN, code)
    code = code + SIGN * torch.signbit(tensor.detach().cpu())
    return code.to(torch.uint8).view(dtype).to(tensor.device)
