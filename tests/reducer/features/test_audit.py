"""Reducer(audit=k): a rank whose parameters have other bits is named within k rounds."""

from __future__ import annotations

import contextlib
import signal

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import MismatchError
from fastcomm.reducer.features import audit
from fastcomm.reducer.features.audit import checksum
from fastcomm.reducer.round import Round
from tests.support.bodies import Interrupted
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = pytest.mark.usefixtures("transport")
EVERY = 5


def _train(comm, **options):
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).to(comm.device)
    caps = {"bucket_cap_mb": 1e-5}
    reducer = fastcomm.Reducer(comm, **{"audit": EVERY, **caps, **options}).attach(model)
    return model, reducer, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model, optimizer, n=1):
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()


def _flip_a_bit(tensor, bit=0):
    """Of the last element: 0 is the lowest, 23 the lowest of the exponent."""
    tensor.detach().view(-1).view(torch.int32)[-1].bitwise_xor_(1 << bit)


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(3)
def test_a_bit_that_turns_in_one_ranks_reduced_gradient_is_named(comm):
    """In the last parameters of a rank, of which few elements travel with the buckets."""
    model, reducer, optimizer = _train(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reducer.core.steps.compares = False  # what else would notice, as over NCCL nothing does
    _step(model, optimizer, EVERY + 1)
    optimizer.zero_grad()
    model(torch.ones(4, 6)).square().mean().backward()
    if comm.rank == 1:
        _flip_a_bit(model[0].weight.grad, 23)
    optimizer.step()
    with pytest.raises(MismatchError) as caught:
        _step(model, optimizer, EVERY)
    assert reducer.n_rounds == 2 * EVERY
    said = str(caught.value)
    assert "audit in round 10: parameter" in said and "is not the same on all ranks" in said
    assert "and 2 of 3 ranks agree, all but 1. A bit" in said
    assert all(parameter.grad is None for parameter in model.parameters())
    reducer.refresh()
    _step(model, optimizer, EVERY)
    reducer.check_in_sync()


@pytest.mark.transports("shm", "nccl")
@on_ranks(2)
def test_of_two_ranks_none_is_the_culprit(comm):
    model, reducer, optimizer = _train(comm)
    reducer.core.steps.compares = False
    _step(model, optimizer, EVERY - 1)
    if comm.rank == 0:
        _flip_a_bit(model[2].bias)
        _flip_a_bit(model[2].weight)
    with pytest.raises(MismatchError, match=r"all ranks \(nor are 1 more\), and no majority"):
        _step(model, optimizer)


@pytest.mark.transports(*EVERY_TRANSPORT)
@on_ranks(2)
def test_ranks_that_agree_hear_nothing_and_compare_in_every_kth_round(comm):
    model, reducer, optimizer = _train(comm)
    n_compared = []
    compare = audit.Audit._compare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit.Audit, "_compare", lambda *a: n_compared.append(1) or compare(*a))
        _step(model, optimizer, 2 * EVERY + 1)
    assert len(n_compared) == 2 and reducer.n_rounds == 2 * EVERY + 1


@pytest.mark.transports("shm")
@on_ranks(2)
def test_inside_a_join_nobody_compares(comm):
    model, reducer, optimizer = _train(comm)
    with reducer.join(state=[optimizer]):  # rank 1 alone comes to the round that is due
        _step(model, optimizer, EVERY - 1 + 2 * comm.rank)
    _step(model, optimizer, EVERY)
    reducer.check_in_sync()


def _interrupt(*_):
    raise Interrupted


@pytest.mark.transports("shm")
@pytest.mark.parametrize("where", ["before it", "behind it", "in the round"])
@pytest.mark.parametrize("flips", [False, True])
@on_ranks(2)
def test_a_signal_does_not_part_the_ranks(comm, where, flips):
    """On rank 0, beside the comparison or in the round before it."""
    model, reducer, optimizer = _train(comm)
    reducer.core.steps.compares = False
    _step(model, optimizer, EVERY - 1)
    if flips and comm.rank == 0:
        _flip_a_bit(model[2].bias)
    before = signal.signal(signal.SIGUSR1, _interrupt)
    kind, name = audit.Audit, "_compare"
    if where == "in the round":
        kind, name = Round, "_settle_or_drop"
    original = getattr(kind, name)
    seen = []

    def interrupted(*args):
        if where != "behind it":
            interrupt_once()
        value = original(*args)
        interrupt_once()
        return value

    def interrupt_once():
        if not seen:
            seen.append(1)
            signal.raise_signal(signal.SIGUSR1)

    try:
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 0:
                patch.setattr(kind, name, interrupted)
                expected = Interrupted
            else:
                expected = MismatchError if flips else ()
            with pytest.raises(expected) if expected else contextlib.nullcontext():
                _step(model, optimizer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    if flips:
        assert all(parameter.grad is None for parameter in model.parameters())
        reducer.refresh()
    elif comm.rank == 0:
        optimizer.step()
    _step(model, optimizer, EVERY)
    reducer.check_in_sync()


@pytest.mark.transports("shm")
@on_ranks(2)
def test_another_audit_on_another_rank_is_refused(comm):
    with pytest.raises(ValueError, match="audit must be at least 1, or None; got 0"):
        fastcomm.Reducer(comm, audit=0)
    model, reducer, _ = _train(comm)
    with pytest.raises(MismatchError, match="audit"):
        _train(comm, audit=EVERY + comm.rank)
    assert reducer.core.model() is model


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_no_turned_bit_leaves_the_checksum_alone(dtype):
    tensor = torch.randn(4, 6).to(dtype).t()
    before, octets = checksum(tensor), tensor.t().view(torch.uint8)
    for bit in range(8):
        octets[-1, -1] ^= 1 << bit
        assert checksum(tensor) != before
        octets[-1, -1] ^= 1 << bit
    assert checksum(tensor) == before
