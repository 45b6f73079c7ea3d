"""Which gradients a reducer gives on the less common ways through autograd: checkpointing, custom
functions, gradients the user handles, a backward that fails.
"""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastcomm
from tests.support.bodies import hear_of_it
from tests.support.models import (
    Fail,
    assert_gradients,
    attached,
    backward,
    batch,
    check_backward,
    check_gradients,
    mean_gradients,
    mlp,
)
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.pairwise]

# Checkpointing


def _all_inside(model, x, reentrant):
    hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
    return checkpoint(model[2:], hidden, use_reentrant=reentrant)


def _one_inside(model, x, reentrant):
    return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)


def _checkpointed_backward(forward, reentrant):
    def run(model, rank):
        x, y = batch(rank)
        F.mse_loss(forward(model, x, reentrant), y).backward()

    return run


@pytest.mark.parametrize("forward", [_all_inside, _one_inside])
@on_ranks(2)
def test_gradients_under_reentrant_checkpointing_are_the_mean_though_a_parameter_is_not_used(
    comm, buckets, forward
):
    model = mlp()
    model.unused = nn.Parameter(torch.ones(3))
    check_gradients(
        comm,
        model,
        _checkpointed_backward(lambda model, *rest: forward(nn.Sequential(*model), *rest), True),
        **buckets,
    )


# Gradients the user handles


@on_ranks(2)
def test_a_gradient_that_a_hook_throws_away_stays_none(comm, buckets):
    model = mlp()
    model[0].bias.register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", None)
    )
    expected = mean_gradients(model, comm.world_size, backward)
    expected[1] = None
    fastcomm.Reducer(comm, **buckets).attach(model)
    backward(model, comm.rank)
    assert_gradients(model, expected)


# A backward that fails


def _fragile_backward(model, rank, fails):
    x, y = batch(rank, 9)
    F.mse_loss(model[2:](Fail.apply(model[:2](x), fails)), y).backward()


@pytest.mark.parametrize(
    "late", [0, 1], ids=["the one that fails is first", "the one that fails is last"]
)
@on_ranks(2)
def test_an_exception_on_one_rank_after_its_last_gradient_is_an_error_on_both(comm, buckets, late):
    def run(model, rank, fails):
        x, y = batch(rank)
        F.mse_loss(model(Fail.apply(x.requires_grad_(), fails)), y).backward()

    model, _, _ = attached(comm, **buckets)
    for _ in range(3):
        if comm.rank == late:
            time.sleep(0.1)
        with pytest.raises(RuntimeError) as caught:
            run(model, comm.rank, fails=comm.rank == 1)
            hear_of_it(comm)  # rank 0, if all its gradients were reduced before rank 1 failed
        assert isinstance(caught.value, fastcomm.FastcommError) == (comm.rank == 0), caught.value
        check_backward(comm, model)


@on_ranks(2)
def test_an_exception_inside_a_reentrant_checkpoint_on_one_rank_is_an_error_on_both(comm, buckets):
    model, _, _ = attached(comm, **buckets)
    x, _ = batch(comm.rank)
    with pytest.raises(RuntimeError) as caught:
        checkpoint(
            lambda x: model[2:](Fail.apply(model[:2](x), comm.rank == 1)),
            x.requires_grad_(),
            use_reentrant=True,
        ).sum().backward()
    assert isinstance(caught.value, fastcomm.FastcommError) == (comm.rank == 0), caught.value
    check_backward(comm, model)


@on_ranks(2)
def test_an_exception_in_a_backward_under_no_sync_concerns_its_rank_alone(comm, buckets):
    model, reducer, _ = attached(comm, **buckets)
    with (
        reducer.no_sync(),
        pytest.raises(RuntimeError) if comm.rank == 1 else contextlib.nullcontext(),
    ):
        _fragile_backward(model, comm.rank, fails=comm.rank == 1)
    check_backward(comm, model)
