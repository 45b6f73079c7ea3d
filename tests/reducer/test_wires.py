"""Gradients that are sent in another dtype, and are too large or too great for shortcuts."""

from __future__ import annotations

import pytest
import torch

import fastcomm
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT, TRANSPORTS_OVER_TORCH

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


# With a scale for each block, and with error feedback

BLOCK_DTYPES = (torch.int8, torch.float8_e4m3fn)
over_torch = pytest.mark.transports(*TRANSPORTS_OVER_TORCH)
in_blocks = pytest.mark.transports(*TRANSPORTS_OVER_TORCH, "nccl")  # int8, there without feedback
# Of the largest gradient: the most that rounding it changes.
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.bfloat16: 2**-8}


def _with_small_ones(scale=1.0):
    """Gradients of which int8 drops all but the first of each block."""
    return torch.cat([torch.full((1,), 127.0), torch.full((255,), 0.25)]).repeat(20) * scale


def _reduce(parameter, gradient):
    parameter.grad = None
    (parameter * gradient).sum().backward()
    return parameter.grad


@over_torch
@on_ranks(2)
def test_what_a_round_has_dropped_arrives_in_the_next_one_that_reduces(comm):
    parameter = torch.nn.Parameter(torch.zeros(20 * 256))
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8, error_feedback=True)
    reducer.attach([("weight", parameter)])
    first = _reduce(parameter, _with_small_ones()).clone()
    with reducer.no_sync():
        parameter.grad = None
        (parameter * 0).sum().backward()
        assert (parameter.grad == 0).all()
    parameter.grad = None
    second = _reduce(parameter, torch.zeros(20 * 256))
    assert (first.view(-1, 256)[:, 1:] == 0).all()
    torch.testing.assert_close(first + second, _with_small_ones(), rtol=0.02, atol=0)


@over_torch
@on_ranks(2)
def test_refresh_and_attach_forget_what_was_dropped(comm):
    parameter = torch.nn.Parameter(torch.zeros(20 * 256))
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8, error_feedback=True)
    named = [("weight", parameter)]
    reducer.attach(named)
    _reduce(parameter, _with_small_ones())
    reducer.refresh()
    assert (_reduce(parameter, torch.zeros(20 * 256)) == 0).all()
    _reduce(parameter, _with_small_ones())
    reducer.detach()
    reducer.attach(named)
    assert (_reduce(parameter, torch.zeros(20 * 256)) == 0).all()


@in_blocks
@on_ranks(2)
def test_a_parameter_that_one_rank_lacks_gets_the_mean_over_a_narrow_wire(comm):
    used, unused = torch.nn.Parameter(torch.zeros(300)), torch.nn.Parameter(torch.zeros(300))
    none = torch.nn.Parameter(torch.zeros(3))
    feeds_back = comm.feeds_back_errors
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8, error_feedback=feeds_back)
    reducer.attach([("used", used), ("unused", unused), ("none", none)])
    loss = (used * 1e20).sum()
    if comm.rank == 0:
        loss = loss + (unused * 2e20).sum()
    loss.backward()
    torch.testing.assert_close(unused.grad, torch.full((300,), 1e20))
    assert none.grad is None


@in_blocks
@pytest.mark.parametrize("wire_dtype", STEP, ids=str)
@on_ranks(2)
def test_a_nan_is_over_with_its_round(comm, wire_dtype):
    model = torch.nn.Linear(8, 4)  # 4 elements, and a gap before the others
    feeds_back = comm.feeds_back_errors
    reducer = fastcomm.Reducer(comm, wire_dtype=wire_dtype, error_feedback=feeds_back).attach(model)
    bad = [0.0, float("nan") if comm.rank else 0.0, 0.0]
    counts = []
    for step in range(3):
        model.zero_grad()
        (model(torch.ones(2, 8)).sum() + model.weight[0, 0] * bad[step]).backward()
        counts.append(int(reducer.nonfinite_count()))
    assert counts[0] == counts[2] == 0 < counts[1]
