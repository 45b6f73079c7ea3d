"""Steps that fail on some ranks: they cost one step on all, and no rank hangs or drifts apart."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import FastcommError
from tests.support.bodies import finish_together, hear_of_it, raises_on_each
from tests.support.models import (
    Fail,
    Heads,
    assert_gradients,
    attached,
    backward,
    batch,
    check_backward,
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


HEARD_S = 0.5  # in which a rank hears of what another one has abandoned, over every transport

# One handler for all exceptions

# By step, the ranks that raise there, and whether it happens in forward or in backward.
UNLUCKY = {
    1: ("forward", {1}),
    2: ("forward", {1}),
    3: ("backward", {0}),
    4: ("backward", {0, 1}),
    6: ("forward", {0, 1}),
    8: ("backward", {1}),
}


def _step_that_may_fail(model, comm, step):
    where, who = UNLUCKY.get(step, ("", set()))
    finish_together(comm)
    if where == "forward" and comm.rank in who:
        raise ValueError("bad batch")
    x, _ = batch(comm.rank, step)
    model[2:](Fail.apply(model[:2](x), where == "backward" and comm.rank in who)).sum().backward()
    if where:
        hear_of_it(comm)


@on_ranks(2, 3)
def test_one_handler_may_abandon_after_any_exception(comm, buckets):
    """Those that have heard of it say so, too, and nobody skips another step for that."""
    model, _, _ = attached(comm, **buckets)
    heard, n_before = {}, comm.n_abandoned
    for step in range(10):
        model.zero_grad()
        try:
            _step_that_may_fail(model, comm, step)
        except Exception as error:
            comm.abandon()
            heard[step] = type(error)
    assert heard.keys() == UNLUCKY.keys()
    for step, (where, who) in UNLUCKY.items():
        own = ValueError if where == "forward" else RuntimeError
        allowed = {fastcomm.AbandonedError}  # of those that raise, it may be either
        if comm.rank in who:
            allowed = {own} if len(who) == 1 else {own, fastcomm.AbandonedError}
        assert heard[step] in allowed, step
    assert comm.n_abandoned == n_before + len(UNLUCKY)


@on_ranks(2)
def test_a_gradient_that_cannot_be_reduced_costs_one_step(comm):
    model, reducer, _ = attached(comm)
    before = comm.n_abandoned
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if comm.rank == 1:
        model[0].weight.grad = torch.ones_like(model[0].weight).to_sparse()
    with pytest.raises(
        FastcommError, match="0.weight is sparse" if comm.rank == 1 else "rank 1 abandoned"
    ):
        try:
            reducer.reduce()
            hear_of_it(comm)
        except FastcommError:
            comm.abandon()
            raise
    assert comm.n_abandoned == before + 1
    check_backward(comm, model)


@on_ranks(2)
def test_a_gradient_in_another_bucket_is_refused_though_its_parameter_is_unused(comm):
    """Whatever the other bucket holds when it is copied would be taken for it."""
    model = Heads(3)
    # Every parameter in a bucket of its own, that of heads.2.bias being the first to be launched.
    fastcomm.Reducer(comm, bucket_cap_mb=1e-5).attach(model)
    loss_of(model, comm.rank, 0, 0, 1, 2).backward()
    finish_together(comm)
    one, other = model.heads[1].bias, model.heads[2].bias
    one.grad, other.grad = other.grad, one.grad
    with raises_on_each(comm, FastcommError, r"heads\.2\.bias lies in that of another one"):
        loss_of(model, comm.rank, 1, 0).backward()
    model.zero_grad()

    def run(model, rank):
        loss_of(model, rank, 2, 0, 1).backward()

    expected = mean_gradients(model, comm.world_size, run)
    run(model, comm.rank)
    assert_gradients(model, expected)


def _out_of_memory(*arguments, **options):
    raise MemoryError("out of memory")


@on_ranks(2)
def test_attach_may_be_tried_again_on_all_ranks_when_it_has_failed_on_one(comm):
    model, reducer = mlp(), fastcomm.Reducer(comm)
    error, words = (
        (MemoryError, "out of memory") if comm.rank == 1 else (FastcommError, "rank 1 abandoned")
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=words):
        if comm.rank == 1:
            patch.setattr(fastcomm.reducer.plan, "Bucket", _out_of_memory)
        reducer.attach(model)
    reducer.attach(model)
    check_backward(comm, model)


# A step abandoned in a hook


def _abandon(comm):
    comm.abandon()


def _abandon_in_a_handler(comm):
    try:
        raise ValueError("not a number")
    except ValueError:
        comm.abandon()


def _abandon_and_go_on(comm):
    with contextlib.suppress(fastcomm.AbandonedError):
        comm.abandon()


@pytest.mark.parametrize(
    "abandon, is_first",
    [
        (_abandon, True),
        (_abandon, False),
        (_abandon_in_a_handler, True),
        (_abandon_in_a_handler, False),
        (_abandon_and_go_on, False),
    ],
    ids=[
        "before any gradient",
        "between gradients",
        "in a handler first",
        "in a handler",
        "goes on",
    ],
)
@on_ranks(2)
def test_a_hook_that_abandons_costs_all_ranks_the_step(comm, buckets, abandon, is_first):
    model, _, _ = attached(comm, **buckets)
    before = comm.n_abandoned
    finish_together(comm)
    hidden = model[:2](batch(comm.rank)[0])
    output = model[2:](hidden)
    if comm.rank == 1:
        (output if is_first else hidden).register_hook(lambda _: abandon(comm))
    with pytest.raises(fastcomm.AbandonedError, match="abandon"):
        output.sum().backward()
        hear_of_it(comm)
    assert comm.n_abandoned == before + 1
    assert all(parameter.grad is None for parameter in model.parameters())
    check_backward(comm, model)


@on_ranks(2)
def test_a_backward_that_accumulates_ends_where_its_hook_abandons(comm):
    model, reducer, _ = attached(comm)
    hidden = model[:2](batch(comm.rank)[0])
    if comm.rank == 1:
        hidden.register_hook(lambda _: _abandon_in_a_handler(comm))
    with pytest.raises(fastcomm.AbandonedError):
        with reducer.no_sync():
            model[2:](hidden).sum().backward()
        comm.barrier()
        hear_of_it(comm)
    assert all(parameter.grad is None for parameter in model.parameters())
    finish_together(comm)


# One handler, whatever the exception is


def _loop_with_a_bad_step(comm, bad_step):
    """The ranks skip the same step, and no other: the last one is that of both."""
    model, _, _ = attached(comm)
    skipped = []
    for step in range(4):
        model.zero_grad()
        try:
            if step == 1:
                bad_step(comm, model)
            else:
                backward(model, comm.rank, step)
        except Exception:
            comm.abandon()
            skipped.append(step)
    assert skipped == [1]
    expected = mean_gradients(model, comm.world_size, lambda m, rank: backward(m, rank, 3))
    assert_gradients(model, expected)


@on_ranks(2)
def test_an_exception_that_hides_an_abandonment_is_not_abandoned_again(comm):
    def bad_step(comm, model):
        try:
            _step_that_may_fail(model, comm, 8)  # rank 1, in backward
        except Exception:
            if comm.rank == 1:
                raise
            raise RuntimeError("step failed")  # noqa: B904  (not from anything)

    _loop_with_a_bad_step(comm, bad_step)


@pytest.mark.transports("shm", "group", "hierarchical")  # which compare what the ranks call
@on_ranks(2)
def test_a_mismatch_that_another_rank_has_abandoned_is_not_abandoned_again(comm):
    def bad_step(comm, model):
        work = comm.all_reduce(torch.ones(2 + comm.rank), async_op=True)
        if comm.rank == 0:
            comm.barrier()  # hears of it here
        work.wait()

    _loop_with_a_bad_step(comm, bad_step)


@on_ranks(2)
def test_one_exception_raised_in_two_steps_abandons_both(comm):
    """As a future raises the same object whenever it is asked."""
    model, _, _ = attached(comm)
    before, bad, skipped = comm.n_abandoned, ValueError("bad batch"), []

    def spoil(_):
        raise bad

    for step in range(5):
        model.zero_grad()
        finish_together(comm)
        try:
            if step == 3 and comm.rank == 1:
                raise bad
            hidden = model[:2](batch(comm.rank, step)[0])
            if step == 1 and comm.rank == 1:
                hidden.register_hook(spoil)
            model[2:](hidden).sum().backward()
            if step in (1, 3):
                hear_of_it(comm)
        except Exception:
            comm.abandon()
            skipped.append(step)
    bad.__traceback__ = None  # it holds the model
    assert skipped == [1, 3] and comm.n_abandoned == before + 2


# Steps that fail


def _fails_early(comm):
    """A model of more buckets than may be under way at once, whose backward fails on rank 1 after
    the first of them.
    """
    layers = [nn.Linear(8, 8) for _ in range(24)]
    model, _, _ = attached(comm, nn.Sequential(*layers), bucket_cap_mb=0.0001)
    for _ in range(2):
        hidden = model[:23](torch.ones(2, 8))
        if comm.rank == 1:
            hidden.register_hook(_raise)
        with pytest.raises(RuntimeError) as caught:
            model[23](hidden).sum().backward()
        assert isinstance(caught.value, FastcommError) == (comm.rank == 0), caught.value
        model.zero_grad()
        model(torch.full((2, 8), comm.rank + 1.0)).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def _raise(_):
    raise RuntimeError("out of luck")


def test_an_exception_while_more_buckets_wait_than_the_ring_holds_is_an_error_for_one_step_only(
    ranks,
):
    one, other = ranks(2, _fails_early)
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


@pytest.mark.parametrize("where", ["finish", "step"])
@on_ranks(2)
def test_a_rank_that_is_late_misses_no_step_before_the_one_that_was_abandoned(comm, where):
    """The other rank has made that step when it abandons the next one, with nothing launched."""
    model, reducer, optimizer = attached(comm)
    if comm.rank == 0:
        owner = optimizer if where == "step" else reducer.core.buckets[-1]
        on_time = getattr(owner, where)

        def late():
            time.sleep(HEARD_S)
            return on_time()

        setattr(owner, where, late)
    backward(model, comm.rank)
    optimizer.step()
    with pytest.raises(RuntimeError, match="out of luck" if comm.rank else "rank 1 abandoned"):
        x, _ = batch(comm.rank)
        model[2:](Fail.apply(model[:2](x), comm.rank == 1)).sum().backward()
        optimizer.step()  # hears of it at the latest
    if comm.rank == 0:
        setattr(owner, where, on_time)
    model.zero_grad()
    backward(model, comm.rank)
    optimizer.step()
    reducer.check_in_sync(optimizer)


# What stands in .grad when a step is abandoned


def _accumulate(reducer, model, rank, number, how):
    """One of two batches of a step."""
    with reducer.no_sync() if how == "no_sync" else contextlib.nullcontext():
        backward(model, rank, number)


@pytest.mark.parametrize("how", ["no_sync", "reduced"])
@on_ranks(2)
def test_a_rank_that_abandons_a_step_keeps_no_gradient_of_it(comm, how):
    """Gradients are cleared after the step, which a step that fails does not come to."""
    model, reducer, _ = attached(comm)
    found = []
    for step in range(3):
        try:
            _accumulate(reducer, model, comm.rank, 2 * step, how)
            finish_together(comm)
            if step == 1 and comm.rank == 1:
                raise ValueError("bad batch")
            backward(model, comm.rank, 2 * step + 1)
            if step == 1:
                hear_of_it(comm)
        except Exception:
            comm.abandon()
            found.append((step, [p.grad for p in model.parameters()]))
            continue
        if step == 2:
            break
        model.zero_grad()
    assert found == [(1, [None] * 6)]

    def both(model, rank):
        backward(model, rank, 4)
        backward(model, rank, 5)

    assert_gradients(model, mean_gradients(model, comm.world_size, both))


@on_ranks(2)
def test_all_reducers_of_the_communicator_drop_an_abandoned_step(comm):
    """A rank that abandons cannot know to which of them the others had come."""
    models = mlp(), mlp()
    first, second = (fastcomm.Reducer(comm).attach(model) for model in models)
    with first.no_sync():
        backward(models[0], comm.rank)
    backward(models[1], comm.rank)
    finish_together(comm)
    if comm.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(fastcomm.AbandonedError):
            comm.barrier()
            hear_of_it(comm)
    for model in models:
        assert all(p.grad is None for p in model.parameters())
    expected = mean_gradients(models[0], comm.world_size, lambda m, rank: backward(m, rank, 1))
    for model in models:
        backward(model, comm.rank, 1)
        assert_gradients(model, expected)
    assert not first.core.n_unsynced and not second.core.n_unsynced


@pytest.mark.transports("shm", "group", "hierarchical")  # where votes need no option
@on_ranks(2)
def test_weights_and_votes_go_with_the_step_that_was_abandoned(comm):
    model, reducer, _ = attached(comm)
    reducer.set_weight(3 if comm.rank else 1)
    if comm.rank == 1:
        reducer.skip_step()
    if comm.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(fastcomm.AbandonedError):
            comm.barrier()
    reducer.refresh()  # refuses to lose a weight or a vote
    expected = mean_gradients(model, comm.world_size, backward)
    backward(model, comm.rank)
    assert not reducer.skipped
    assert_gradients(model, expected)
