"""LocalSGD and DiLoCo: ranks step by themselves, and agree where they sync."""

from __future__ import annotations

import copy

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
from tests.support.models import (
    SMALL_BUCKETS,
    assert_gradients,
    assert_same_parameters,
    attached,
    backward,
    check_backward,
    convnet,
    gradients,
    image_backward,
    mean_gradients,
    mlp,
    replica_of,
)
from tests.support.own_steps import NESTEROV, adamw, sgd, step, training
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("shm")]
every_transport = pytest.mark.transports(*EVERY_TRANSPORT)


class Alone:
    """All ranks in one process: a model and an optimizer for each, and the outer parameters."""

    def __init__(self, model, n):
        self.models = [replica_of(model) for _ in range(n)]
        self.optimizers = [adamw(replica) for replica in self.models]
        self.outer = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.outer.items()}

    def step(self, i):
        for rank, pair in enumerate(zip(self.models, self.optimizers, strict=True)):
            step(*pair, rank, i)

    def sync(self, lr=1.0, momentum=0.0):
        """Nesterov's step, as torch.optim.SGD has it. The defaults average the parameters."""
        for name, outer in self.outer.items():
            own = [model.get_parameter(name) for model in self.models]
            gradient = torch.stack([outer - p.detach() for p in own]).mean(0)
            self.momentum[name] = momentum * self.momentum[name] + gradient
            self.outer[name] = outer - lr * (gradient + momentum * self.momentum[name])
            for p in own:
                p.data.copy_(self.outer[name])


def assert_close(model, other, rtol=1e-5, atol=1e-6):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=name)


@every_transport
@pytest.mark.parametrize("every", [1, 3])
@on_ranks(2)
def test_local_sgd_averages_the_parameters(comm, every, buckets):
    model, reducer, optimizer = training(comm, **buckets)
    alone = Alone(model, comm.world_size)
    with fastcomm.LocalSGD(reducer, every=every) as syncs:
        for i in range(1, 6):
            alone.step(i)
            if i % every == 0:
                alone.sync()
            step(model, optimizer, comm.rank, i)
            assert_close(model, alone.models[comm.rank])
    if syncs.n_steps % every:
        alone.sync()
    assert_close(model, alone.models[0])
    reducer.check_in_sync()


@every_transport
@on_ranks(2)
def test_diloco_steps_where_ranks_sync_and_where_sync_is_called(comm):
    model, reducer, optimizer = training(comm, **SMALL_BUCKETS)
    alone = Alone(model, comm.world_size)
    syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=3, **NESTEROV)
    for i in range(1, 7):
        alone.step(i)
        step(model, optimizer, comm.rank, i)
        if i in (2, 3, 6):
            alone.sync(0.7, 0.9)
        if i in (2, 6):
            syncs.sync()  # where all have just synced, nothing is stepped once more
        assert syncs._is_agreed == (i in (2, 3, 6))
        assert_close(model, alone.models[comm.rank])
    syncs.finish()
    assert_close(model, alone.models[0])


@pytest.mark.parametrize(
    "transport, wire_dtype",
    [
        ("shm", torch.bfloat16),
        ("nccl", torch.bfloat16),
        ("nccl", torch.int8),
        ("group", torch.int8),
        ("hierarchical", torch.int8),
    ],
    indirect=["transport"],
    ids=str,
)
@on_ranks(2)
def test_pseudo_gradients_travel_in_the_wire_dtype(comm, wire_dtype):
    model, reducer, optimizer = training(comm, wire_dtype=wire_dtype)
    alone = Alone(model, comm.world_size)
    largest = 0.0
    with fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, lr=1.0):
        for i in range(1, 5):
            alone.step(i)
            step(model, optimizer, comm.rank, i)
            if i == 2:
                alone.sync()
                pairs = zip(model.parameters(), alone.models[0].parameters(), strict=True)
                largest = max((a - b).abs().max().item() for a, b in pairs)
    # of two steps of 0.01: rounded, and not by more than a wire of 8 bits does
    assert 1e-6 < largest < 0.02 * 2**-6
    reducer.check_in_sync()


@every_transport
@on_ranks(2)
def test_buffers_stay_own_until_they_are_averaged(comm):
    model = convnet()
    model.register_buffer("constant", torch.linspace(0, 1, 7))
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = adamw(model)
    constant = model.constant.clone()
    means = [replica_of(convnet()) for _ in range(2)]
    with fastcomm.LocalSGD(reducer, every=1) as syncs:
        optimizer.zero_grad()
        image_backward(model, comm.rank)
        optimizer.step()
        for rank, replica in enumerate(means):
            image_backward(replica, rank)
        assert torch.equal(model[1].running_mean, means[comm.rank][1].running_mean)
        syncs.average_buffers()
        expected = (means[0][1].running_mean + means[1][1].running_mean) / 2
        torch.testing.assert_close(model[1].running_mean, expected)
        model[1].num_batches_tracked += comm.rank
    assert torch.equal(model.constant, constant)
    reducer.check_in_sync()


@every_transport
@on_ranks(2)
def test_steps_before_and_after_are_those_of_all_ranks(comm):
    """As post-local SGD has it; with gradients that stay in the flat buffers."""
    model, reducer, optimizer = training(comm, sgd)
    backward(model, comm.rank)
    optimizer.step()
    reducer.check_in_sync()
    alone = replica_of(model)
    with fastcomm.LocalSGD(reducer, every=2):
        for i in (1, 2):
            optimizer.zero_grad(set_to_none=False)
            backward(model, comm.rank, i)
            alone.zero_grad()
            backward(alone, comm.rank, i)
            if i == 1:
                assert_gradients(model, gradients(alone))
                optimizer.step()
                torch.optim.SGD(alone.parameters(), lr=0.1).step()
        optimizer.step()
        # what the step has used is still there
        assert_gradients(model, gradients(alone))
    expected = mean_gradients(model, 2, lambda replica, rank: backward(replica, rank, 3))
    optimizer.zero_grad(set_to_none=False)
    backward(model, comm.rank, 3)
    assert_gradients(model, expected)
    optimizer.step()
    reducer.check_in_sync()


@every_transport
@on_ranks(2)
def test_a_run_that_is_resumed_has_the_same_bits(comm):
    options = {"every": 4, **NESTEROV}

    def begin():
        model, reducer, optimizer = training(comm, **SMALL_BUCKETS)
        return model, optimizer, fastcomm.DiLoCo(reducer, torch.optim.SGD, **options)

    model, optimizer, syncs = begin()
    for i in range(1, 12):
        step(model, optimizer, comm.rank, i)
        if i == 6:
            saved = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, syncs)]
    syncs.finish()
    other, other_optimizer, other_syncs = begin()
    # as torch.distributed.checkpoint writes it
    outer = saved[2]["outer_optimizer"]
    outer["state"] = {str(number): state for number, state in outer["state"].items()}
    for thing, state in zip((other, other_optimizer, other_syncs), saved, strict=True):
        thing.load_state_dict(state)
    for i in range(7, 12):
        step(other, other_optimizer, comm.rank, i)
    other_syncs.finish()
    assert_same_parameters(model, other)
    assert other_syncs.n_syncs == syncs.n_syncs


class _EarlyStop(Exception):
    pass


@on_ranks(2)
def test_an_exception_that_leaves_the_block_ends_it(comm):
    """Caught outside by all ranks, whose parameters differ by then."""
    model, reducer, optimizer = training(comm, sgd)
    with (
        pytest.raises(_EarlyStop),
        fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, **NESTEROV) as syncs,
    ):
        for i in (1, 2, 3):
            step(model, optimizer, comm.rank, i)
        raise _EarlyStop
    assert not syncs._is_on
    with pytest.raises(FastcommError, match=r"was left by an exception.*refresh\(\)"):
        backward(model, comm.rank)
    reducer.refresh()
    with pytest.raises(FastcommError, match="was made without a backward"):
        optimizer.step()  # with gradients of its own, which no rank has any more use for
    check_backward(comm, model)
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_parameters_loaded_after_diloco_has_copied_them_are_refused(comm):
    model, pretrained = mlp(), mlp()
    torch.nn.init.ones_(pretrained[2].bias)
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=1, **NESTEROV)
    model.load_state_dict(pretrained.state_dict())
    with pytest.raises(FastcommError, match=r"parameter \d\.\w+ was changed after DiLoCo\(\)"):
        step(model, optimizer, comm.rank, 1)
    syncs.finish()
    model.load_state_dict(pretrained.state_dict())
    with fastcomm.DiLoCo(reducer, torch.optim.SGD, every=1, lr=1.0):
        step(model, optimizer, comm.rank, 1)
    assert (model[2].bias > 0.5).all()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_parameter_that_is_frozen_midway_asks_for_another_local_sgd(comm):
    model, reducer, _ = attached(comm)
    syncs = fastcomm.LocalSGD(reducer, every=2)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    step(model, optimizer, comm.rank, 1)
    with pytest.raises(FastcommError, match=r"parameter 0\.\w+ .*call finish\(\), freeze it"):
        step(model, optimizer, comm.rank, 2)
    syncs.finish()
    reducer.refresh()
    with fastcomm.LocalSGD(reducer, every=2):
        for i in (3, 4):
            step(model, optimizer, comm.rank, i)
    reducer.check_in_sync()
