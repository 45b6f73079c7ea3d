"""Ranks that disagree about the model or the options: attach names the first difference on all."""

from __future__ import annotations

import time
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import FastcommError, MismatchError, TimeoutError
from tests.contract import new_ranks
from tests.support.bodies import communicator
from tests.support.models import attached, backward, check_backward, check_gradients, mlp
from tests.support.outcomes import values_of
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT, TRANSPORTS_OVER_TORCH

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]

BAD_INPUT = (FastcommError, ValueError, TypeError)


def _renamed():
    return nn.Sequential(OrderedDict(zip(["0", "1", "two", "3", "4"], mlp(), strict=True)))


def _another_shape():
    model = mlp()
    model[2] = nn.Linear(16, 12)
    return model


def _another_dtype():
    model = mlp()
    model[2].double()
    return model


def _another_stride():
    model = mlp()
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


def _frozen():
    model = mlp()
    model[2].weight.requires_grad_(False)
    return model


def _another_order():
    model = mlp()
    del model[2].weight, model[2].bias
    model[2].bias, model[2].weight = (
        nn.Parameter(torch.zeros(16)),
        nn.Parameter(torch.zeros(16, 16)),
    )
    return model


def _one_more():
    return mlp().append(nn.Linear(4, 4, bias=False))


def _two_fewer():
    return mlp()[:4]


DIFFERENCES = pytest.mark.parametrize(
    "make, words",
    [
        (_renamed, ["2.weight", "two.weight"]),
        (_another_shape, ["2.weight", "16, 16", "12, 16"]),
        (_another_dtype, ["2.weight", "float32", "float64"]),
        (_another_stride, ["2.weight", "16, 1", "1, 16"]),
        (_frozen, ["2.weight", "requires_grad", "True", "False"]),
        (_another_order, ["2.weight", "2.bias"]),
        (_one_more, ["5.weight"]),
        (_two_fewer, ["4.weight"]),
    ],
)


def _attach_another_model_on_the_last_rank(comm, make):
    fastcomm.Reducer(comm).attach(make() if comm.rank == comm.world_size - 1 else mlp())


@DIFFERENCES
def test_attach_names_the_first_difference_between_ranks_on_every_rank(ranks, make, words):
    failures = ranks.raises(
        3, MismatchError, _attach_another_model_on_the_last_rank, make, survives=True
    )
    for failure in failures:
        assert [word for word in [*words, "rank 2"] if word not in failure.message] == [], (
            failure.message
        )


@on_ranks(2)
def test_ranks_whose_buffers_differ_are_told(comm):
    model = mlp()
    model.register_buffer("table", torch.zeros(3 + comm.rank))
    with pytest.raises(MismatchError, match=r"(?s)table.*3.*4"):
        fastcomm.Reducer(comm).attach(model)


def _join(reducer):
    model = reducer.core.model()
    with reducer.join(range(1 + reducer.comm.rank)) as batches:
        for _ in batches:
            backward(model, reducer.comm.rank)


def _average_buffers(reducer):
    with fastcomm.LocalSGD(reducer, every=2) as syncs:
        syncs.average_buffers()


COPYING = [
    fastcomm.Reducer.sync_buffers,
    fastcomm.Reducer.check_in_sync,
    fastcomm.Reducer.refresh,
    _join,
    _average_buffers,
]


@pytest.mark.parametrize("copy", COPYING)
@on_ranks(2)
def test_a_buffer_of_one_rank_alone_is_named_and_ends_nothing(comm, copy):
    model = mlp().append(nn.BatchNorm1d(4))  # in training a FLOP counter adds such buffers
    reducer = fastcomm.Reducer(comm).attach(model)
    if comm.rank == 1:
        model[0].register_buffer("total_ops", torch.zeros(1, dtype=torch.float64))
    words = (
        r"rank 1 has buffer 0\.total_ops, which rank 0|buffer 0\.total_ops .*rank 0: none; rank 1"
    )
    with pytest.raises(MismatchError, match=words):
        copy(reducer)
    if comm.rank == 1:
        del model[0].total_ops
    reducer.refresh()
    check_backward(comm, model)


@on_ranks(2)
def test_after_a_join_that_could_not_copy_every_step_is_refused_until_refresh(comm):
    model, reducer, _ = attached(comm)
    model.register_buffer("table", torch.zeros(3 + comm.rank))
    with pytest.raises(
        MismatchError, match=r"table has shape \(3,\) on rank 0 and \(4,\) on rank 1"
    ):
        _join(reducer)
    with pytest.raises(FastcommError, match=r"(?s)could not copy.*refresh.*buffer table"):
        backward(model, comm.rank)


@pytest.mark.parametrize(
    "option, values",
    [
        ("bucket_cap_mb", (1, 0.0001)),
        ("bucket_cap_mb", ("auto", 25)),
        ("skip_nonfinite", (False, True)),
        ("op", ("mean", "sum")),
        ("wire_dtype", (None, torch.bfloat16)),
    ],
)
@on_ranks(2)
def test_ranks_whose_options_differ_are_told_when_they_attach(comm, option, values):
    with pytest.raises(MismatchError, match=option):
        fastcomm.Reducer(comm, **{option: values[comm.rank]}).attach(mlp())
    check_gradients(comm, mlp(), backward)


@pytest.mark.transports(*TRANSPORTS_OVER_TORCH)
@on_ranks(2)
def test_ranks_of_which_one_feeds_errors_back_are_told_when_they_attach(comm):
    feeds_back = comm.rank == 1
    with pytest.raises(MismatchError, match="error_feedback is"):
        fastcomm.Reducer(comm, wire_dtype=torch.int8, error_feedback=feeds_back).attach(mlp())
    check_gradients(comm, mlp(), backward)


@on_ranks(2)
def test_one_rank_without_trainable_parameters_is_an_error_on_both(comm):
    with pytest.raises(BAD_INPUT, match="requires a gradient"):
        fastcomm.Reducer(comm).attach(mlp().requires_grad_(comm.rank == 0))


@on_ranks(2)
def test_one_rank_on_another_device_is_an_error_on_both(comm):
    with pytest.raises(BAD_INPUT, match=r"is on meta.*to_empty\(device=comm\.device\) first"):
        fastcomm.Reducer(comm).attach(mlp().to("meta" if comm.rank == 1 else "cpu"))


@on_ranks(2)
def test_ranks_that_refresh_to_different_models_are_told_and_may_refresh_again(comm):
    model, reducer, optimizer = attached(comm)
    if comm.rank == 1:
        model[2].weight.requires_grad_(False)
    with pytest.raises(MismatchError, match=r"2\.weight"):
        reducer.refresh()
    for _ in range(2):  # in a loop that survives it, nothing is trained
        with pytest.raises(FastcommError, match=r"refresh\(\) failed: call it again"):
            backward(model, comm.rank)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for call in (reducer.reduce, reducer.grad_norm, optimizer.step):
        with pytest.raises(FastcommError, match=r"refresh\(\) failed: call it again"):
            call()
    model.zero_grad()
    model[2].weight.requires_grad_(True)
    reducer.refresh()
    check_backward(comm, model)
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_rank_that_cannot_refresh_is_named_to_all(comm):
    """A vote is cast on one rank; nobody waits in refresh() for the rank that has cast it."""
    model, reducer, _ = attached(comm, skip_nonfinite=True)
    if comm.rank == 1:
        reducer.skip_step()
    who = "rank 1: refresh" if comm.rank == 1 else "rank 1 cannot refresh: rank 1: refresh"
    with pytest.raises(FastcommError, match=rf"^{who}\(\) would lose"):
        reducer.refresh()
    backward(model, comm.rank)
    assert reducer.n_skipped == 1
    reducer.refresh()
    check_backward(comm, model)


@on_ranks(2)
def test_after_a_failed_refresh_a_rank_may_detach_and_train_alone(comm):
    model, reducer, optimizer = attached(comm)
    model[2].weight.requires_grad_(comm.rank == 0)
    with pytest.raises(MismatchError, match=r"2\.weight"):
        reducer.refresh()
    reducer.detach()
    backward(model, comm.rank)
    optimizer.step()


# Ranks that do not attach

TIMEOUT_S = {"shm": 0.5, "nccl": 2, "group": 1, "hierarchical": 1}


def _attach_alone(place):
    comm = communicator(place, timeout=timedelta(seconds=TIMEOUT_S[place.transport]))
    if comm.rank == 1:
        time.sleep(4 * TIMEOUT_S[place.transport])
        return
    with pytest.raises(TimeoutError, match=r"missing: rank 1.*in attach\(\).*every rank must call"):
        fastcomm.Reducer(comm).attach(mlp())


def test_a_rank_that_attaches_alone_hears_that_every_rank_must(transport):
    values_of(new_ranks(transport, 2, _attach_alone, timeout=20))


@pytest.mark.transports("shm", "group")
@on_ranks(2)
def test_a_rank_that_copies_buffers_alone_hears_that_every_rank_must(comm):
    model = mlp()
    model.register_buffer("table", torch.zeros(16))
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(MismatchError, match=r"rank 0: all_gather_single.*rank 1: all_reduce"):
        reducer.sync_buffers() if comm.rank == 0 else comm.all_reduce(torch.ones(3))
    reducer.sync_buffers()  # the ranks are in step
