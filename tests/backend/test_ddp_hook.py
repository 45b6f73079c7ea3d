"""fastcomm as a communication hook of DDP, and hooks written for DDP in a reducer."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import warnings

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from tests.support.bodies import gloo
from tests.support.models import (
    Heads,
    assert_gradients,
    backward,
    batch,
    loss_of,
    mean_gradients,
    mlp,
)
from tests.support.ranks import fresh_ranks, on_ranks


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


# The hook of ours


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
def test_the_hook_reduces_with_another_op(comm):
    model = mlp()
    expected = [
        gradient * comm.world_size for gradient in mean_gradients(model, comm.world_size, backward)
    ]
    ddp = _ddp(model)
    ddp.register_comm_hook(fastcomm.HookState(comm, op="sum"), fastcomm.all_reduce_hook)
    backward(ddp, comm.rank)
    assert_gradients(model, expected)


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
    assert_gradients(model, mean_gradients(mlp(), comm.world_size, backward))


def test_a_wire_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="wire_dtype"):
        fastcomm.HookState(None, wire_dtype=torch.int32)


# Hooks of others


def _powersgd_state():
    return powerSGD_hook.PowerSGDState(gloo(), start_powerSGD_iter=2, matrix_approximation_rank=2)


def _local_sgd_state():
    return post_localSGD_hook.PostLocalSGDState(gloo(), gloo(), start_localSGD_iter=1000)


BITWISE = {
    "allreduce": (lambda: gloo(), default_hooks.allreduce_hook),
    "fp16": (lambda: gloo(), default_hooks.fp16_compress_hook),
    "noop": (lambda: None, debugging_hooks.noop_hook),
}
# These depend on how buckets are cut.
ALIKE = {
    "bf16": (lambda: gloo(), default_hooks.bf16_compress_hook),
    "fp16 around allreduce": (
        lambda: gloo(),
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "fp16 around powerSGD": (
        _powersgd_state,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "powerSGD": (_powersgd_state, powerSGD_hook.powerSGD_hook),
    "post_localSGD": (_local_sgd_state, post_localSGD_hook.post_localSGD_hook),
}


@pytest.mark.parametrize("name", BITWISE)
@on_ranks(2)
def test_a_reducer_with_a_hook_of_ddps_trains_bitwise_as_ddp_with_it(comm, name):
    make_state, hook = BITWISE[name]
    theirs, ours = _train_both(comm, make_state, hook, hook)
    assert all(
        torch.equal(one, other)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def _train_both(comm, make_state, hook, hook_of_ddp):
    """A model after 50 steps of DDP with its hook, and one after those of a reducer with the
    other.
    """
    theirs, ours = mlp(), mlp()
    ddp = _ddp(theirs)
    ddp.register_comm_hook(make_state(), hook_of_ddp)
    _train(lambda step: backward(ddp, comm.rank, step), theirs, 50)
    fastcomm.Reducer(comm, hook=(make_state(), hook)).attach(ours)
    _train(lambda step: backward(ours, comm.rank, step), ours, 50)
    return theirs, ours


def _loss_on_all(model, comm):
    losses = [
        F.mse_loss(model(x), y)
        for x, y in (batch(rank, step) for rank in range(comm.world_size) for step in range(50))
    ]
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("name", ALIKE)
@on_ranks(2)
def test_a_reducer_with_any_other_hook_of_ddps_comes_to_the_same_loss(comm, name):
    make_state, hook = ALIKE[name]
    theirs, ours = _train_both(
        comm, make_state, hook, default_hooks.allreduce_hook if name == "bf16" else hook
    )  # DDP refuses it on a CPU
    assert _loss_on_all(ours, comm) == pytest.approx(_loss_on_all(theirs, comm), rel=0.01)


@on_ranks(2)
def test_buckets_have_the_same_index_in_every_step(comm):
    seen = []

    def hook(state, bucket):
        seen.append(
            (
                bucket.index(),
                bucket.is_last(),
                bucket.buffer().numel(),
                [p.shape for p in bucket.parameters()],
            )
        )
        return default_hooks.allreduce_hook(state, bucket)

    model = mlp()
    fastcomm.Reducer(
        comm, bucket_cap_mb=0.0005, first_bucket_cap_mb=0.0001, hook=(gloo(), hook)
    ).attach(model)
    for step in range(3):
        backward(model, comm.rank, step)
    n = len(seen) // 3
    assert n > 1 and seen[:n] == seen[n : 2 * n] == seen[2 * n :]
    assert [index for index, *_ in seen[:n]] == list(range(n)) and [
        last for _, last, *_ in seen[:n]
    ] == [False] * (n - 1) + [True]


@on_ranks(2)
def test_a_chain_of_hooks_hands_on_what_each_has_left(comm):
    def double(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model = mlp()
    expected = [gradient * 2 for gradient in mean_gradients(model, comm.world_size, backward)]
    fastcomm.Reducer(comm, hook=[(None, double), (gloo(), default_hooks.allreduce_hook)]).attach(
        model
    )
    backward(model, comm.rank)
    assert_gradients(model, expected)


@on_ranks(2)
def test_parameters_unused_everywhere_stay_none_under_a_hook(comm):
    model = Heads(3)
    expected = mean_gradients(
        copy.deepcopy(model),
        comm.world_size,
        lambda model, rank: loss_of(model, rank, 0, rank).backward(),
    )
    fastcomm.Reducer(comm, hook=(gloo(), default_hooks.allreduce_hook)).attach(model)
    loss_of(model, comm.rank, 0, comm.rank).backward()
    assert_gradients(model, expected)


@on_ranks(2)
def test_an_exception_in_a_hook_is_one_of_backward(comm):
    is_unlucky = True

    def hook(state, bucket):
        if is_unlucky:
            raise KeyError("out of luck")
        return default_hooks.allreduce_hook(state, bucket)

    model = mlp()
    fastcomm.Reducer(comm, hook=(gloo(), hook)).attach(model)
    with pytest.raises(KeyError, match="out of luck"):
        backward(model, comm.rank)
    assert all(parameter.grad is None for parameter in model.parameters())
    is_unlucky = False
    expected = mean_gradients(mlp(), comm.world_size, backward)
    backward(model, comm.rank)
    assert_gradients(model, expected)


def _goes_on_after_a_failed_backward(comm, hook):
    """Rank 1 fails when the first buckets are under way; then all use the same hook, and another
    reducer with a hook that has posted nothing.
    """
    model = mlp()
    reducer = fastcomm.Reducer(
        comm, bucket_cap_mb=0.0005, first_bucket_cap_mb=0.0001, hook=(gloo(), hook)
    ).attach(model)
    backward(model, comm.rank)
    hidden = model[0](batch(comm.rank, 1)[0])
    if comm.rank == 1:
        hidden.register_hook(lambda gradient: 1 / 0)
    with pytest.raises((ZeroDivisionError, fastcomm.AbandonedError)):
        model[1:](hidden).sum().backward()
    for step in range(2):
        with pytest.raises(
            fastcomm.FastcommError, match=r"called the communication hook .* 5 to 6 times"
        ):
            backward(model, comm.rank, step)
        assert all(p.grad is None for p in model.parameters())
    reducer.detach()
    fastcomm.Reducer(comm, hook=(None, _keep)).attach(model)
    for step in range(2):
        if step == comm.rank == 1:
            comm.abandon()
        else:
            with contextlib.suppress(fastcomm.AbandonedError):
                backward(model, comm.rank, step)
        model.zero_grad()
    backward(model, comm.rank)


def _keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_what_a_hook_has_posted_in_a_failed_backward_is_never_taken_for_a_later_collective():
    outcomes = fresh_ranks(
        2, _goes_on_after_a_failed_backward, default_hooks.allreduce_hook, pass_comm=True
    )
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, "\n".join(map(str, outcomes))


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, (None, 3), [(None,)]])
@on_ranks(2)
def test_what_is_no_hook_is_refused(comm, hook):
    with pytest.raises(TypeError, match="hook"):
        fastcomm.Reducer(comm, hook=hook)
