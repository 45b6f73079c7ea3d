"""Gradients that are sent in another dtype, and are too large or too great for shortcuts."""

from __future__ import annotations

import pytest
import torch

import fastcomm
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]

NUMEL = 20_000  # over shared memory read where autograd has put it, unless it is cast


@on_ranks(3)
def test_large_gradients_are_cast_to_the_wire_dtype(comm):
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    fastcomm.Reducer(comm, wire_dtype=torch.bfloat16).attach([("weight", parameter)])
    for _ in range(2):
        parameter.grad = None
        (parameter * (comm.rank + 1.001)).sum().backward()
        torch.testing.assert_close(parameter.grad, torch.full((NUMEL,), 2.001), rtol=2**-7, atol=0)


@on_ranks(3)
def test_a_mean_fits_the_wire_dtype_though_the_sum_does_not(comm):
    great = 40_000.0  # the sum of two is an infinity in float16
    parameter = torch.nn.Parameter(torch.zeros(8))
    fastcomm.Reducer(comm, wire_dtype=torch.float16).attach([("weight", parameter)])
    (parameter * great).sum().backward()
    torch.testing.assert_close(parameter.grad, torch.full((8,), great), rtol=2**-9, atol=0)
