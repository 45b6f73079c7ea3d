"""Ranks whose parameters have drifted apart in ways that no gradient shows: the next reduction is
an error on every rank. Over NCCL nobody compares parameters.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import MismatchError
from tests.support.bodies import gloo
from tests.support.models import attached, backward
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports("shm", "group", "hierarchical"),
]

DIFFER = r"(?s:after . steps? \(record .*\n- different parameters: .*check_in_sync\(\))"
NOT_ALIKE = "^the ranks have not stepped alike.*" + DIFFER


def train(model, optimizer, rank, step=0):
    optimizer.zero_grad()
    backward(model, rank, step)
    optimizer.step()


def step_what_no_sync_has_left(comm, model, reducer, optimizer):
    optimizer.zero_grad()
    with reducer.no_sync():
        backward(model, comm.rank)
    optimizer.step()


def lower_the_rate_alone(comm, model, reducer, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5 if comm.rank else 1
    train(model, optimizer, comm.rank)


def clip_alone(comm, model, reducer, optimizer):
    optimizer.zero_grad()
    backward(model, comm.rank)
    if comm.rank:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def drop_a_gradient_alone(comm, model, reducer, optimizer):
    optimizer.zero_grad()
    backward(model, comm.rank)
    if comm.rank:
        model[0].weight.grad = None
    optimizer.step()


def add_noise(comm, model, reducer, optimizer):
    with torch.no_grad():
        model[0].weight.add_(comm.rank + 1.0)
    train(model, optimizer, comm.rank)


DRIFTS = [
    step_what_no_sync_has_left,
    lower_the_rate_alone,
    clip_alone,
    drop_a_gradient_alone,
    add_noise,
]


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.__name__)
@on_ranks(2)
def test_ranks_that_drift_apart_hear_of_it_in_the_next_backward(comm, drift):
    model, reducer, optimizer = attached(comm)
    train(model, optimizer, comm.rank)
    drift(comm, model, reducer, optimizer)
    with pytest.raises(MismatchError, match=NOT_ALIKE):
        backward(model, comm.rank)
    optimizer.param_groups[0]["lr"] = 0.1
    reducer.refresh()
    for step in range(2):
        train(model, optimizer, comm.rank, step)
    reducer.check_in_sync()


@on_ranks(2)
def test_parameters_may_differ_within_a_step(comm):
    """Each rank perturbs them by its own gradient, and restores them (SAM)."""
    model, reducer, optimizer = attached(comm)
    for step in range(3):
        optimizer.zero_grad()
        with reducer.no_sync():
            backward(model, comm.rank, step)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05)
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_rows_of_a_sparse_embedding_that_drift_apart_are_found(comm):
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.arange(4)).sum().backward()
        if comm.rank:
            model[0].weight.grad = None
        optimizer.step()

    step()
    with pytest.raises(MismatchError, match=DIFFER):
        step()
    reducer.detach()


@pytest.mark.transports("shm")
@on_ranks(2)
def test_an_optimizer_that_steps_a_part_on_each_rank_and_shares_it_may_step(comm):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    gloo()
    model, reducer, _ = attached(comm)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    for step in range(3):
        train(model, optimizer, comm.rank, step)
    reducer.check_in_sync()


@on_ranks(2)
def test_a_norm_that_one_rank_takes_by_clipping_to_infinity_is_no_difference(comm):
    model, reducer, optimizer = attached(comm)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        if comm.rank:
            reducer.clip_grad_norm_(float("inf"))
        optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_ranks_that_have_stepped_alone_may_begin_to_average(comm):
    model, reducer, optimizer = attached(comm)
    train(model, optimizer, comm.rank)
    step_what_no_sync_has_left(comm, model, reducer, optimizer)
    with fastcomm.LocalSGD(reducer, every=1):
        train(model, optimizer, comm.rank)
    train(model, optimizer, comm.rank)
    reducer.check_in_sync()


@pytest.mark.transports("shm")
@on_ranks(2)
def test_a_parameter_without_memory_is_not_looked_at(comm):
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "freed": nn.Linear(4, 4)})
    fastcomm.Reducer(comm).attach(model)
    optimizer = torch.optim.SGD(model["used"].parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model["used"](torch.ones(1, 4)).sum().backward()
        model["freed"].weight.untyped_storage().resize_(0)
        optimizer.step()
