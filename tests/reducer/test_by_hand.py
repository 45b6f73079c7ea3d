"""reduce(), for gradients that no backward has made; check_in_sync(), for ranks to be compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import MismatchError
from tests.support.models import (
    assert_gradients,
    attached,
    backward,
    check_backward,
    convnet,
    mean_gradients,
    mlp,
)
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.pairwise]

# reduce()


def _by_hand(model: nn.Module, rank: int) -> None:
    for k, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 2.0**rank + k)


@on_ranks(2)
def test_reduce_passes_through_the_wire_dtype(comm, buckets):
    def run(model, rank):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1 + 2.0**-12)  # bfloat16 has no more than 8 bits

    model, reducer, _ = attached(comm, wire_dtype=torch.bfloat16, **buckets)
    run(model, comm.rank)
    reducer.reduce()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


@on_ranks(2)
def test_reduce_after_backward_leaves_the_mean_a_mean(comm, buckets):
    model, reducer, _ = attached(comm, **buckets)
    expected = mean_gradients(model, comm.world_size, backward)
    backward(model, comm.rank)
    reducer.reduce()
    assert_gradients(model, expected)
    backward(model, comm.rank)
    assert_gradients(model, [2 * gradient for gradient in expected])


# check_in_sync()


def _trained(comm, make: Callable[[], nn.Module] = mlp):
    model, reducer, _ = attached(comm, make())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _by_hand(model, 0)  # the same on all ranks
    reducer.reduce()
    optimizer.step()
    return model, reducer, optimizer


@on_ranks(2, 3)
def test_ranks_in_sync_pass(comm):
    model, reducer, optimizer = _trained(comm, convnet)
    reducer.check_in_sync()
    reducer.check_in_sync(optimizer)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = float("nan")  # the same bits on all ranks
    reducer.check_in_sync(optimizer)


def _refused(reducer, words: str, optimizer=None) -> None:
    for _ in range(2):  # on every rank, and as often as it is asked
        with pytest.raises(MismatchError, match=words):
            reducer.check_in_sync(optimizer)


@on_ranks(2, 3)
def test_a_parameter_that_differs_is_named_with_its_rank(comm):
    model, reducer, _ = _trained(comm)
    if comm.rank == 1:
        with torch.no_grad():
            model[2].weight[3, 5] += 1e-6
            model[4].bias[0] += 1
    _refused(reducer, r"(?s)^(?!.*4\.bias).*2\.weight.*rank.*1")
    with torch.no_grad():
        model.load_state_dict(mlp().state_dict())
    reducer.check_in_sync()
    check_backward(comm, model)


@on_ranks(2)
def test_a_buffer_that_differs_is_named(comm):
    model, reducer, _ = _trained(comm, convnet)
    model[1].running_mean[0] += comm.rank
    _refused(reducer, r"(?s)1\.running_mean.*rank.*1")
    reducer.sync_buffers()
    reducer.check_in_sync()


@on_ranks(2)
def test_what_is_no_optimizer_is_an_error_on_all_ranks(comm):
    _, reducer, optimizer = _trained(comm)
    with pytest.raises(
        AttributeError if comm.rank == 1 else fastcomm.FastcommError,
        match="param_groups" if comm.rank == 1 else "rank 1 cannot compare its model: Attribute",
    ):
        reducer.check_in_sync(optimizer if comm.rank == 0 else object())
    reducer.check_in_sync(optimizer)


@on_ranks(2)
def test_optimizer_state_that_differs_is_named(comm):
    model, reducer, optimizer = _trained(comm)
    if comm.rank == 1:
        optimizer.state[model[2].weight]["exp_avg"][0, 0] += 1
    reducer.check_in_sync()  # the model alone is in sync
    _refused(reducer, r"(?s)(exp_avg.*2\.weight|2\.weight.*exp_avg).*rank.*1", optimizer)


@on_ranks(2)
def test_a_learning_rate_that_differs_is_named(comm):
    _, reducer, optimizer = _trained(comm)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + comm.rank)
    words = r"optimizer\.state_dict\(\) on every rank"
    _refused(reducer, rf"(?s)\blr\b.*rank.*1.*equal values.*rank 0's {words}", optimizer)
