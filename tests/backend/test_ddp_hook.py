"""fastcomm as a communication hook of DDP."""

from __future__ import annotations

import functools
import gc
import time
import warnings
import weakref

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from tests.support.bodies import gloo
from tests.support.models import Heads, assert_gradients, backward, loss_of, mean_gradients, mlp
from tests.support.ranks import on_ranks


def _ddp(model, **options):
    return DistributedDataParallel(model, process_group=gloo(), **options)


def _train(run, model, steps):
    """Parameters after `steps` of SGD on what run(step) leaves in .grad."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        run(step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
)
@on_ranks(2)
def test_ddp_with_the_hook_trains_bitwise_as_without(comm, options):
    trained = []
    for hooked in (False, True):
        ddp = _ddp(mlp(), bucket_cap_mb=0.001, **options)
        if hooked:
            ddp.register_comm_hook(fastcomm.HookState(comm), fastcomm.all_reduce_hook)
        trained.append(_train(lambda step, ddp=ddp: backward(ddp, comm.rank, step), ddp, 10))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*trained, strict=True))


@on_ranks(2, 3)
def test_the_hook_reduces_in_the_wire_dtype(comm):
    ddp = _ddp(mlp(), bucket_cap_mb=0.0005)  # which DDP cuts anew after the first step
    ddp.register_comm_hook(
        fastcomm.HookState(comm, wire_dtype=torch.bfloat16), fastcomm.all_reduce_hook
    )
    for step in range(3):
        run = functools.partial(backward, step=step)
        expected = mean_gradients(mlp(), comm.world_size, run)
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch would resize a wire that does not fit
            run(ddp, comm.rank)
        for parameter, wanted in zip(ddp.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=2**-6, atol=1e-3)
            assert torch.equal(parameter.grad, parameter.grad.bfloat16().float())


@on_ranks(2)
def test_parameters_a_rank_does_not_use_get_the_mean_under_the_hook(comm):
    model = Heads(2)
    expected = mean_gradients(
        model, comm.world_size, lambda model, rank: loss_of(model, rank, 0, rank).backward()
    )
    ddp = _ddp(model, find_unused_parameters=True)
    ddp.register_comm_hook(fastcomm.HookState(comm), fastcomm.all_reduce_hook)
    loss_of(ddp, comm.rank, 0, comm.rank).backward()
    assert_gradients(model, expected)


@on_ranks(2)
def test_no_sync_and_join_of_ddp_work_with_the_hook(comm):
    model = mlp()
    ddp = _ddp(model)
    ddp.register_comm_hook(fastcomm.HookState(comm), fastcomm.all_reduce_hook)

    def two_steps(model, rank):
        backward(model, rank, 0)
        backward(model, rank, 1)

    expected = mean_gradients(mlp(), comm.world_size, two_steps)
    with ddp.no_sync():
        backward(ddp, comm.rank, 0)
    backward(ddp, comm.rank, 1)
    assert_gradients(model, expected)
    with ddp.join():
        for step in range(1 + comm.rank):
            ddp.zero_grad()
            backward(ddp, comm.rank, step)
    if comm.rank == 1:  # rank 0 has joined, with zeros: the mean is over both
        alone = mean_gradients(mlp(), 1, lambda model, _: backward(model, 1, 1))
        assert_gradients(model, [gradient / 2 for gradient in alone])


@on_ranks(2)
def test_what_a_failed_backward_has_left_behind_does_no_harm_to_the_next(comm, tmp_path):
    has_failed = tmp_path / "rank 1 has failed"

    def fail(gradient):
        raise RuntimeError("out of luck")

    state = fastcomm.HookState(comm)
    for is_lucky in (False, True):
        model = mlp()  # DDP does not go on after an exception
        ddp = _ddp(model, bucket_cap_mb=0.0005)
        ddp.register_comm_hook(state, fastcomm.all_reduce_hook)
        for _ in range(2):  # DDP's ranks meet in the second forward, to make several buckets of one
            backward(ddp, comm.rank)
            ddp.zero_grad()
        if is_lucky:
            backward(ddp, comm.rank)
        elif comm.rank == 1:
            model[0].weight.register_hook(fail)
            with pytest.raises(RuntimeError, match="out of luck"):
                backward(ddp, comm.rank)
            assert state._under_way  # as rank 0 has not come
            has_failed.touch()
            comm.abandon()
        else:
            while not has_failed.exists():
                time.sleep(0.01)
            with pytest.raises(fastcomm.AbandonedError, match="rank 1 abandoned"):
                backward(ddp, comm.rank)
            abandoned = weakref.ref(model[0].weight)
    assert_gradients(model, mean_gradients(mlp(), comm.world_size, backward))
    gc.collect()
    assert comm.rank == 1 or abandoned() is None


def test_a_wire_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="wire_dtype"):
        fastcomm.HookState(None, wire_dtype=torch.int32)
