"""A reducer's life with a model: attach, norms, optimizers, whole trainings, detach."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn

import fastcomm
from tests.support.models import (
    assert_gradients,
    attached,
    backward,
    check_backward,
    check_gradients,
    convnet,
    mean_gradients,
    mlp,
)
from tests.support.ranks import fresh_ranks, on_ranks, torchrun_env

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.pairwise]

# Attach


class _Scattered(nn.Module):
    """Parameters and buffers of every sort, with other values on every rank."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator(torch.get_default_device()).manual_seed(rank)
        self.dense = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.frozen = nn.Parameter(torch.randn(7, generator=generator), requires_grad=False)
        self.channels_last = nn.Parameter(
            torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
        )
        self.sliced = nn.Parameter(torch.randn(4, 6, generator=generator)[:, ::2])
        self.wide = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(3, 3, generator=generator) > 0.5)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("short", torch.arange(5, dtype=torch.int16) * rank)
        self.register_buffer("phase", torch.randn(4, generator=generator, dtype=torch.complex64))
        self.register_buffer("transposed", torch.randn(4, 3, generator=generator).t())
        self.register_buffer("temporary", torch.randn(2, generator=generator), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("absent", None)


@on_ranks(2, 3)
def test_attach_gives_every_rank_the_parameters_and_buffers_of_rank_0(comm):
    model, wanted = _Scattered(comm.rank), _Scattered(0)
    fastcomm.Reducer(comm).attach(model).check_in_sync()
    for (name, tensor), expected in zip(
        _tensors(model), dict(_tensors(wanted)).values(), strict=True
    ):
        assert torch.equal(tensor, expected), name
        assert tensor.stride() == expected.stride(), name


def _tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]


@on_ranks(2)
def test_attach_changes_neither_the_module_nor_its_state_dict(comm):
    model = mlp()
    keys, parameters, modules = (
        list(model.state_dict()),
        list(model.parameters()),
        list(model.modules()),
    )
    attributes = [sorted(vars(module)) for module in modules]
    fastcomm.Reducer(comm).attach(model)
    assert list(model.state_dict()) == keys
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert all(new is old for new, old in zip(model.modules(), modules, strict=True))
    assert [sorted(vars(module)) for module in modules] == attributes
    assert not any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in modules
    )


@on_ranks(2)
def test_sync_buffers_gives_every_rank_the_buffers_of_one(comm):
    model, reducer, _ = attached(comm, convnet())
    for step in range(comm.rank + 1):
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        model(torch.randn(4, 3, 12, 12, generator=generator) + comm.rank)
    mine = {name: buffer.clone() for name, buffer in model.named_buffers()}
    reducer.sync_buffers(src=1)
    same = [torch.equal(buffer, mine[name]) for name, buffer in model.named_buffers()]
    assert all(same) if comm.rank == 1 else not any(same)
    assert model[1].num_batches_tracked == 2


def _attach_without_a_communicator(place):
    model = mlp()
    expected = mean_gradients(model, place.world_size, backward)
    fastcomm.Reducer().attach(model)
    backward(model, place.rank)
    assert_gradients(model, expected)


def test_a_reducer_without_a_communicator_makes_one_from_the_launchers_environment():
    outcomes = fresh_ranks(2, _attach_without_a_communicator, env=torchrun_env(2))
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, "\n".join(map(str, outcomes))


# Norms


@on_ranks(2)
def test_grad_norm_of_no_gradients_is_zero(comm):
    model = mlp()
    assert float(fastcomm.Reducer(comm).attach(model).grad_norm()) == 0


@pytest.mark.transports("shm")
@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
@on_ranks(1)
def test_a_norm_to_clip_to_is_positive(comm, max_norm):
    with pytest.raises(ValueError, match="max_norm must be positive"):
        fastcomm.Reducer(comm).attach(mlp()).clip_grad_norm_(max_norm)


# Optimizers and synchronize


@on_ranks(2)
def test_an_optimizer_step_without_a_backward_waits_for_nobody(comm):
    model, _, optimizer = attached(comm)
    if comm.rank == 0:
        optimizer.step()
    comm.barrier()


# Whole trainings

STEPS = 25  # any difference of a bit stays, and grows


# The end


@on_ranks(2)
def test_a_detached_model_is_no_longer_reduced(comm, buckets):
    model = mlp()
    reducer = check_gradients(comm, model, backward, **buckets)
    reducer.detach()
    local = mean_gradients(mlp(), 1, lambda model, _: backward(model, comm.rank))
    model.zero_grad()
    backward(model, comm.rank)
    assert_gradients(model, local)


@on_ranks(2)
def test_parameters_are_reduced_though_the_module_that_was_attached_is_gone(comm, buckets):
    model = mlp()
    fastcomm.Reducer(comm, **buckets).attach(nn.ModuleList([model[:2], model[2:]]))
    gc.collect()
    check_backward(comm, model)
