"""Which gradients a reducer gives, after one backward or several, with no_sync, and for parameters
that a backward does not reach.

The oracle is a replica of every rank's model in this process alone, averaged by hand.
"""

from __future__ import annotations

import pytest
import torch

import fastcomm
from tests.support.models import (
    Heads,
    assert_gradients,
    attached,
    backward,
    check_gradients,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
)
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*EVERY_TRANSPORT),
    pytest.mark.pairwise,
]

# Plain backwards


@on_ranks(1, 2, 3, 4)
def test_gradients_are_the_mean_over_ranks(comm, buckets):
    check_gradients(comm, mlp(), backward, **buckets)


@pytest.mark.parametrize(
    "wire_dtype, precision",
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
    ids=["bfloat16", "float16"],
)
@on_ranks(2, 3)
def test_a_wire_dtype_costs_one_rounding_before_and_one_after_the_sum(
    comm, buckets, wire_dtype, precision
):
    model = mlp()
    expected = mean_gradients(model, comm.world_size, backward)
    sizes = mean_gradients(model, comm.world_size, _backward_then_abs)
    fastcomm.Reducer(comm, wire_dtype=wire_dtype, **buckets).attach(model)
    backward(model, comm.rank)
    for gradient, exact, size in zip(gradients(model), expected, sizes, strict=True):
        assert gradient.dtype == torch.float32
        # The last term: float16 has subnormals below 2**-14.
        assert ((gradient - exact).abs() <= 1.01 * precision * (size + exact.abs()) + 2**-24).all()


def _backward_then_abs(model, rank):
    backward(model, rank)
    for parameter in model.parameters():
        parameter.grad.abs_()


# Several backwards


# no_sync


@on_ranks(2)
def test_backward_under_no_sync_leaves_local_gradients(comm, buckets):
    model = mlp()
    local = mean_gradients(model, 1, lambda model, _: backward(model, comm.rank))
    reducer = fastcomm.Reducer(comm, **buckets).attach(model)
    with reducer.no_sync():
        backward(model, comm.rank)
    assert_gradients(model, local)


@on_ranks(2)
def test_no_sync_around_the_forward_alone_still_reduces(comm, buckets):
    model, reducer, _ = attached(comm, **buckets)
    expected = mean_gradients(model, comm.world_size, backward)
    with reducer.no_sync():
        loss = loss_of(model, comm.rank)
    loss.backward()
    assert_gradients(model, expected)


@on_ranks(2)
def test_no_sync_inside_no_sync_ends_with_the_outer_one(comm, buckets):
    model = mlp()
    local = mean_gradients(model, 1, lambda model, _: backward(model, comm.rank))
    reducer = fastcomm.Reducer(comm, **buckets).attach(model)
    with reducer.no_sync():
        with reducer.no_sync():
            pass
        backward(model, comm.rank)
    assert_gradients(model, local)


@on_ranks(2)
def test_gradients_of_no_sync_are_reduced_though_the_next_backward_does_not_use_the_parameter(
    comm, buckets
):
    def two_steps(model, rank):
        loss_of(model, rank, 0, rank).backward()
        loss_of(model, rank, 1, 0).backward()

    model, reducer, _ = attached(comm, Heads(), **buckets)
    expected = mean_gradients(model, comm.world_size, two_steps)
    with reducer.no_sync():
        loss_of(model, comm.rank, 0, comm.rank).backward()
    loss_of(model, comm.rank, 1, 0).backward()
    assert_gradients(model, expected)


# Parameters that a backward does not reach


@on_ranks(2)
def test_parameters_unused_here_keep_what_they_had_accumulated(comm, buckets):
    def run(model, rank):
        loss_of(model, rank, 0, 0, 1).backward()
        loss_of(model, rank, 1, rank).backward()

    check_gradients(comm, Heads(), run, **buckets)
