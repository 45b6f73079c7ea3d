"""A reducer's life with a model: attach, norms, optimizers, whole trainings, detach."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn

import fastcomm
from tests.support.models import (
    Heads,
    assert_gradients,
    attached,
    backward,
    check_gradients,
    convnet,
    gradients,
    loss_of,
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


def _with_norm(model):
    return torch.nn.utils.clip_grad_norm_(
        [_bearer(p) for p in model.parameters() if p.grad is not None], float("inf")
    )


def _bearer(parameter):
    """A tensor with a copy of the parameter's gradient."""
    bearer = torch.empty_like(parameter)
    bearer.grad = parameter.grad.clone()
    return bearer


@on_ranks(2)
def test_grad_norm_sees_what_the_user_did_to_the_gradients(comm, buckets):
    model, reducer, _ = attached(comm, **buckets)
    backward(model, comm.rank)
    model[0].weight.grad.mul_(10)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    torch.testing.assert_close(
        float(reducer.grad_norm()), float(_with_norm(model)), rtol=1e-6, atol=0
    )


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


@pytest.mark.parametrize("share", [0.3, 1.0, 3.0])
@on_ranks(2)
def test_clip_grad_norm_does_what_torchs_does(comm, buckets, share):
    model, reducer, _ = attached(comm, **buckets)
    backward(model, comm.rank)
    max_norm = share * float(_with_norm(model))
    bearers = [_bearer(parameter) for parameter in model.parameters()]
    wanted = torch.nn.utils.clip_grad_norm_(bearers, max_norm)
    torch.testing.assert_close(
        float(reducer.clip_grad_norm_(max_norm)), float(wanted), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        gradients(model), [bearer.grad for bearer in bearers], rtol=1e-6, atol=0
    )


# Optimizers and synchronize


@on_ranks(2)
def test_an_optimizer_step_without_a_backward_waits_for_nobody(comm):
    model, _, optimizer = attached(comm)
    if comm.rank == 0:
        optimizer.step()
    comm.barrier()


@on_ranks(2)
def test_synchronize_may_be_called_at_any_time_and_twice(comm, buckets):
    model, reducer, _ = attached(comm, **buckets)
    expected = mean_gradients(model, comm.world_size, backward)
    reducer.synchronize()
    backward(model, comm.rank)
    reducer.synchronize()
    reducer.synchronize()
    assert_gradients(model, expected)


# Whole trainings

STEPS = 25  # any difference of a bit stays, and grows


def _train(comm, model, run, steps, buckets, **options):
    reducer = fastcomm.Reducer(comm, **buckets, **options).attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        run(model, comm.rank, step)
        reducer.clip_grad_norm_(1.0)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _train_mlp_over_bfloat16(comm, buckets):
    return _train(comm, mlp(), backward, STEPS, buckets, wire_dtype=torch.bfloat16)


def _train_changing_heads(comm, buckets):
    return _train(comm, Heads(3), _backward_of_a_head, STEPS, buckets)


def _backward_of_a_head(model, rank, step):
    loss_of(model, rank, step, (rank + step * step) % 3).backward()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("train", [_train_mlp_over_bfloat16, _train_changing_heads])
def test_parameters_are_bitwise_equal_on_all_ranks_after_many_steps(
    ranks, world_size, train, buckets
):
    _assert_all_equal(ranks(world_size, train, buckets))


def _assert_all_equal(parameters_by_rank):
    first, *others = parameters_by_rank
    for parameters in others:
        assert all(torch.equal(one, other) for one, other in zip(first, parameters, strict=True))


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
    expected = mean_gradients(model, comm.world_size, backward)
    fastcomm.Reducer(comm, **buckets).attach(nn.ModuleList([model[:2], model[2:]]))
    gc.collect()
    backward(model, comm.rank)
    assert_gradients(model, expected)
