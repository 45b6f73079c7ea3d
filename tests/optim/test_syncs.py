"""What counts as a step of LocalSGD and DiLoCo, what they refuse, and how syncs fail."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import time

import pytest
import torch

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError
from fastcomm.optim import local_sgd
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.round import Round
from tests.support.bodies import Interrupted
from tests.support.models import (
    SMALL_BUCKETS,
    assert_gradients,
    assert_same_parameters,
    attached,
    backward,
    check_backward,
    gradients,
    loss_of,
    mlp,
    replica_of,
)
from tests.support.own_steps import NESTEROV, adamw, sgd, step, training
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("shm")]
every_transport = pytest.mark.transports(*EVERY_TRANSPORT)


# What counts as a step


@on_ranks(2)
def test_steps_of_several_optimizers_count_as_one(comm):
    model, reducer, _ = attached(comm)
    first, last = adamw(model[0]), adamw(model[2:])
    reducer.skip_step()  # of the steps of all ranks
    reducer.synchronize()
    assert reducer.skipped
    with fastcomm.LocalSGD(reducer, every=2) as syncs:
        for i in range(4):
            model.zero_grad()
            backward(model, comm.rank, i)
            first.step()
            assert syncs.n_syncs == i // 2
            last.step()
        assert (syncs.n_steps, syncs.n_syncs) == (4, 2)
        assert syncs._is_agreed


@on_ranks(2)
def test_a_step_that_grad_scaler_leaves_out_is_counted_by_hand(comm):
    model, reducer, optimizer = training(comm, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with fastcomm.LocalSGD(reducer, every=2) as syncs:
        for i in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, i)
            scaler.scale(loss * float("inf") if i == comm.rank else loss).backward()
            before = syncs.n_steps
            scaler.step(optimizer)
            scaler.update()
            if syncs.n_steps == before:
                syncs.count_step()
        assert (syncs.n_steps, syncs.n_syncs) == (4, 2)
    reducer.check_in_sync()


@on_ranks(2)
def test_a_closure_with_several_backwards_is_one_step(comm):
    model = mlp()
    alone = [replica_of(model) for _ in range(2)]

    def descend(model, rank):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, rank)
            loss.backward()
            return loss

        optimizer.step(closure)

    reducer = fastcomm.Reducer(comm).attach(model)
    with fastcomm.LocalSGD(reducer, every=2) as syncs:
        descend(model, comm.rank)
        descend(alone[comm.rank], comm.rank)
        assert syncs.n_steps == 1
        assert_same_parameters(model, alone[comm.rank])


@pytest.mark.parametrize("every", [1, 2])
@on_ranks(2)
def test_what_was_made_alone_is_no_accumulation_afterwards(comm, every):
    """With every=1 the end of the block finds nothing to sync, which would begin anew."""
    model, reducer, optimizer = training(comm, sgd)
    with fastcomm.LocalSGD(reducer, every=every):
        backward(model, comm.rank)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, comm.rank, 1)
    with pytest.raises(FastcommError, match="made without a backward"):
        optimizer.step()
    reducer.set_weight(1 + comm.rank)
    optimizer.zero_grad()
    backward(model, comm.rank, 1)
    optimizer.step()
    reducer.check_in_sync()


# What is this rank's own, and what is refused


@on_ranks(2)
def test_norms_and_clipping_are_of_own_gradients_of_any_origin(comm):
    model, reducer, _ = attached(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with fastcomm.LocalSGD(reducer, every=2):
        for parameter in model.parameters():  # by hand
            parameter.grad = torch.full_like(parameter, 1.0 + comm.rank)
        n = sum(p.numel() for p in model.parameters())
        torch.testing.assert_close(reducer.grad_norm(), torch.tensor(n).sqrt() * (1 + comm.rank))
        reducer.clip_grad_norm_(1.0)
        torch.testing.assert_close(reducer.grad_norm(), torch.tensor(1.0))
        before = replica_of(model)
        optimizer.step()
        torch.testing.assert_close(
            model[0].bias, before[0].bias - 1 / torch.tensor(n).sqrt(), msg="its own step"
        )


@on_ranks(2)
def test_what_needs_reduced_gradients_is_refused_meanwhile(comm):
    model, reducer, _ = attached(comm)
    syncs = fastcomm.LocalSGD(reducer, every=2)
    reducer.check_in_sync()
    for call in (reducer.reduce, reducer.refresh, lambda: reducer.set_weight(1)):
        with pytest.raises(FastcommError, match="while LocalSGD lets each rank step with its own"):
            call()
    if comm.rank == 1:  # only one rank's own steps are enough, and all ranks hear of it
        syncs.count_step()
    why = "rank 1 cannot compare its model" if comm.rank == 0 else "steps of its own since"
    with pytest.raises(FastcommError, match=why):
        reducer.check_in_sync()
    if comm.rank == 0:
        syncs.count_step()
    syncs.finish()
    syncs.finish()
    for call in (syncs.sync, syncs.count_step):
        with pytest.raises(FastcommError, match=r"this LocalSGD has ended, by finish\(\)"):
            call()
    reducer.check_in_sync()


@on_ranks(2)
def test_reducers_and_numbers_that_are_refused(comm):
    def refused(why, error=ValueError, kind=fastcomm.DiLoCo, **options):
        model = mlp()
        given = fastcomm.Reducer(comm).attach(model)
        outer = () if kind is fastcomm.LocalSGD else (options.pop("outer", torch.optim.SGD),)
        with pytest.raises(error, match=why):
            kind(given, *outer, **{"every": 4, **options})
        assert not given.core.steps_alone

    local = fastcomm.LocalSGD
    refused("every must be at least 1; got 0", kind=local, every=0)
    refused("every must be an int", error=TypeError, kind=local, every=1.5)
    refused("LBFGS asks for losses", outer=torch.optim.LBFGS)
    refused("must make an optimizer", error=TypeError, outer=lambda p: p)
    refused(
        "every must be at least 1; got -1",
        error=(FastcommError, ValueError),
        every=4 - comm.rank * 5,
    )
    refused("every is 4 on rank 0 and 5 on rank 1", error=MismatchError, every=4 + comm.rank)
    refused("lr of .* is 0.5 on rank 0 and 1.5", error=MismatchError, lr=0.5 + comm.rank)
    with pytest.raises(TypeError, match=r"LocalSGD\(\) takes a Reducer"):
        local(mlp(), every=2)
    model, reducer, _ = attached(comm)
    with reducer.no_sync(), pytest.raises(ValueError, match="between two steps"):
        local(reducer, every=2)
    weighted_model = mlp()
    weighted = fastcomm.Reducer(comm).attach(weighted_model)
    weighted.set_weight(2)
    with pytest.raises(ValueError, match="between two steps"):
        local(weighted, every=2)
    weighted.detach()
    weighted.attach(weighted_model).skip_step()
    with pytest.raises(ValueError, match="between two steps"):
        local(weighted, every=2)


@every_transport
@on_ranks(2)
def test_a_state_that_differs_between_ranks_is_refused_on_all(comm):
    model, reducer, optimizer = training(comm)
    syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=4, lr=0.5, momentum=0.9)
    for i in range(4):
        step(model, optimizer, comm.rank, i)
    saved = copy.deepcopy(syncs.state_dict())

    def refused(change, match, error=MismatchError):
        state = copy.deepcopy(saved)
        if comm.rank == 1:
            change(state)
        with pytest.raises(error, match=match):
            syncs.load_state_dict(state)

    refused(lambda s: s.update(n_steps=3), "n_steps is 4 on rank 0 and 3 on rank 1")
    refused(
        lambda s: s["outer_parameters"]["2.weight"].add_(1),
        r"different states to load: outer parameter 2\.weight is .* on rank 0 and .* on rank 1",
    )
    refused(
        lambda s: s["outer_optimizer"]["state"][3]["momentum_buffer"].add_(1),
        r"momentum_buffer of parameter 2\.bias is .* on rank 0",
    )
    own_error = ValueError if comm.rank == 1 else FastcommError
    refused(
        lambda s: s["outer_parameters"].pop("2.bias"),
        r"outer parameter 2\.bias has shape None in the state, and \(16,\) in the model",
        own_error,
    )
    refused(
        lambda s: s["outer_parameters"].update({"0.bias": torch.zeros(3)}),
        r"outer parameter 0\.bias has shape \(3,\) in the state, and \(16,\) in the model",
        own_error,
    )
    syncs.load_state_dict(saved)
    syncs.finish()
    reducer.check_in_sync()


@pytest.mark.transports("shm", "group", "hierarchical")
@on_ranks(2)
def test_a_state_that_one_rank_alone_loads_is_an_error_on_both(comm):
    model, reducer, _ = attached(comm)
    syncs = fastcomm.LocalSGD(reducer, every=1)
    with pytest.raises(MismatchError) as caught:
        if comm.rank == 0:
            syncs.load_state_dict(syncs.state_dict())
        else:
            step(model, adamw(model), comm.rank, 0)
    if comm.rank == 0:
        assert "(in load_state_dict() of LocalSGD, which every rank" in str(caught.value)


# How it ends


@on_ranks(2)
def test_between_syncs_no_collective_is_called(comm):
    model, reducer, optimizer = training(comm)

    def count():
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(torch.zeros(1 + comm.rank))
        return int(re.search(r"number (\d+)", str(caught.value))[1])

    with fastcomm.LocalSGD(reducer, every=10):
        before = count()
        for i in range(9):
            step(model, optimizer, comm.rank, i)
        assert count() == before + 1


@every_transport
@on_ranks(2)
def test_different_numbers_of_steps_are_an_error_on_all_ranks(comm):
    model, reducer, optimizer = training(comm)
    syncs = fastcomm.LocalSGD(reducer, every=4)
    for i in range(3 - comm.rank):
        step(model, optimizer, comm.rank, i)
    before = replica_of(model)
    with pytest.raises(
        MismatchError,
        match="rank 0: after 3 steps .*; rank 1: after 2 steps",
    ):
        syncs.finish()
    assert_same_parameters(model, before)
    assert syncs._is_on
    if comm.rank == 1:
        syncs.count_step()
    syncs.finish()
    reducer.check_in_sync()
    optimizer.state.clear()  # each rank's own
    step(model, optimizer, comm.rank, 9)  # of all ranks, though one has made a step more
    reducer.check_in_sync()


def _pause_behind(compare, comm, standing):
    """In place of _compare: over NCCL this rank hears here that the other one has failed."""
    found = compare(comm, standing)
    time.sleep(2)
    comm.check()
    return found


@pytest.mark.parametrize(
    "transport, pauses",
    [*((name, False) for name in EVERY_TRANSPORT), ("nccl", True)],
    indirect=["transport"],
)
@on_ranks(2)
def test_a_sync_that_fails_changes_nothing(comm, pauses):
    model, reducer, optimizer = training(comm, sgd, **SMALL_BUCKETS)
    syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, **NESTEROV)
    step(model, optimizer, comm.rank, 0)
    optimizer.zero_grad()
    backward(model, comm.rank, 1)
    after = replica_of(model)
    for ours, theirs in zip(model.parameters(), after.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    outer = {name: p.clone() for name, p in syncs.state_dict()["outer_parameters"].items()}
    last, kept = model[4].weight, model[4].weight.data
    if comm.rank == 1:
        handle = optimizer.register_step_post_hook(
            lambda *_: setattr(last, "data", last.data.double())
        )
        why = r"parameter 4.weight is torch.float64 .*, and was torch.float32"
        with pytest.raises(FastcommError, match=why):
            optimizer.step()
        handle.remove()
        last.data = kept
    else:
        with pytest.MonkeyPatch.context() as patch:
            if pauses:
                behind = functools.partial(_pause_behind, local_sgd._compare)
                patch.setattr(local_sgd, "_compare", behind)
            with pytest.raises(AbandonedError, match="rank 1 abandoned"):
                optimizer.step()
        assert_gradients(model, gradients(after))
    assert_same_parameters(model, after)
    state = syncs.state_dict()
    assert all(torch.equal(outer[name], p) for name, p in state["outer_parameters"].items())
    assert state["n_steps"] == 2 and state["n_syncs"] == 0
    syncs.finish()
    reducer.check_in_sync()


@every_transport
@on_ranks(2)
def test_a_reducer_that_is_detached_takes_its_syncs_along(comm):
    model, reducer, optimizer = training(comm)
    syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, **NESTEROV)
    for i in range(2):
        step(model, optimizer, comm.rank, i)
    reducer.detach()
    with pytest.raises(FastcommError, match="has ended"):
        syncs.sync()
    reducer.attach(model)
    reducer.check_in_sync()
    check_backward(comm, model)


@on_ranks(2)
def test_a_sync_that_is_not_applied_ends_training(comm):
    model, reducer, optimizer = training(comm)
    syncs = fastcomm.DiLoCo(reducer, torch.optim.SGD, every=1, **NESTEROV)
    at_first = copy.deepcopy((model.state_dict(), syncs.state_dict()))
    if comm.rank == 1:
        handle = syncs.outer_optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model, optimizer, comm.rank, 0)
        handle.remove()
    else:
        step(model, optimizer, comm.rank, 0)
    with pytest.raises(
        MismatchError, match="after 2 steps and 1 syncs; rank 1: after 2 steps and 0"
    ):
        step(model, optimizer, comm.rank, 1)
    with pytest.raises(MismatchError, match="n_syncs is 1 on rank 0 and 0 on rank 1"):
        syncs.load_state_dict(syncs.state_dict())
    model.load_state_dict(at_first[0])
    syncs.load_state_dict(at_first[1])
    step(model, optimizer, comm.rank, 2)
    assert syncs.n_syncs == 1
    syncs.finish()
    reducer.check_in_sync()


@contextlib.contextmanager
def interrupted(kind, method, after=False):
    """A signal comes as this rank begins, or ends, a part of its sync."""
    original = getattr(kind, method)

    def interrupt(*arguments, **options):
        setattr(kind, method, original)
        if after:
            original(*arguments, **options)
        raise Interrupted

    setattr(kind, method, interrupt)
    yield
    assert getattr(kind, method) is original


PARTS = {
    "comparing": (local_sgd, "gather_numbers"),
    "launched": (Round, "commit", True),
    "waiting": (Bucket, "finish"),
}


@every_transport
@pytest.mark.parametrize("where", PARTS)
@on_ranks(2)
def test_an_interrupted_sync_is_applied_all_the_same(comm, where):
    model, reducer, optimizer = training(comm, **SMALL_BUCKETS)
    is_dropped = where == "comparing"  # nothing was launched yet
    with fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, **NESTEROV) as syncs:
        step(model, optimizer, comm.rank, 0)
        n_interruptions = 0
        with interrupted(*PARTS[where]) if comm.rank else contextlib.nullcontext():
            try:
                step(model, optimizer, comm.rank, 1)
            except Interrupted:
                n_interruptions += 1
            except AbandonedError:
                assert is_dropped and comm.rank == 0
        assert n_interruptions == comm.rank
        assert syncs.n_syncs == 1 - is_dropped
    reducer.check_in_sync()
