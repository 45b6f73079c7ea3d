"""Ranks that make different numbers of steps: their parameters differ, and all ranks hear of it in
the next backward. Over NCCL they hear of it later: see tests/insight/test_stragglers.py.
"""

from __future__ import annotations

import pytest
import torch

import fastcomm
from fastcomm import MismatchError
from tests.support.models import attached, backward, check_backward
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports("shm", "group", "hierarchical"),
]


def _leave_out_a_step(comm, model, reducer, optimizer):
    backward(model, comm.rank)
    if comm.rank != 1:
        optimizer.step()


def _step_alone(comm, model, reducer, optimizer):
    if comm.rank == 1:
        with reducer.no_sync():
            backward(model, comm.rank)
        optimizer.step()


def _abandon_too_late(comm, model, reducer, optimizer):
    """Between the backward, which has ended on all ranks, and the step."""
    backward(model, comm.rank)
    if comm.rank == 1:
        comm.abandon()
        return
    optimizer.step()
    with pytest.raises(fastcomm.AbandonedError, match="rank 1"):
        backward(model, comm.rank, 1)
    model.zero_grad()


def _fail_in_a_step(comm, model, reducer, optimizer):
    """After the reducer has found the gradients good, and before they are used."""

    def fail(*_):
        raise ZeroDivisionError

    backward(model, comm.rank)
    if comm.rank == 1:
        with pytest.raises(ZeroDivisionError), optimizer.register_step_pre_hook(fail):
            optimizer.step()
        return
    optimizer.step()


@pytest.mark.parametrize(
    "differ", [_leave_out_a_step, _step_alone, _abandon_too_late, _fail_in_a_step]
)
@on_ranks(2)
def test_ranks_that_made_different_numbers_of_steps_all_hear_of_it(comm, differ):
    model, reducer, optimizer = attached(comm)
    backward(model, comm.rank)
    optimizer.step()
    differ(comm, model, reducer, optimizer)
    model.zero_grad()
    with pytest.raises(
        MismatchError,
        match=r"^the ranks have made different numbers of optimizer steps .*"
        r"after [12] steps?; rank .* after [12] steps?;.*refresh\(\)",
    ):
        backward(model, comm.rank, 2)
    model.zero_grad()
    reducer.refresh()
    reducer.check_in_sync()
    check_backward(comm, model)


@on_ranks(2)
def test_ranks_that_reduce_different_backwards_are_told_of_no_sync(comm):
    model, reducer, _ = attached(comm)
    if comm.rank == 1:
        with reducer.no_sync():
            backward(model, comm.rank)
        with pytest.raises(MismatchError, match="rank 0: .*bucket 0.*rank 1: barrier"):
            comm.barrier()
        comm.abandon()
    else:
        with pytest.raises(MismatchError, match=r"inside no_sync\(\) on all ranks or on none"):
            backward(model, comm.rank)


@on_ranks(3)
def test_several_optimizers_and_local_steps_count_alike_on_all_ranks(comm):
    model, reducer, _ = attached(comm)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    others = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    for step in range(3):
        backward(model, comm.rank, step)
        first.step()
        others.step()
        if step == 1:  # as often as one likes, alike on all ranks
            with reducer.no_sync():
                backward(model, 0, step)  # of the same data, so that parameters stay equal
            others.step()
        model.zero_grad()
    backward(model, comm.rank)


def _step_another_optimizer(comm, model, reducer):
    halves = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (model[0], model[2:])]
    halves[comm.rank].step()
    return r"rank [01] has last stepped \d parameters, [0-4]\.\w+ \.\.\. [0-4]\.\w+\n"


def _clip_alone(comm, model, reducer):
    if comm.rank == 1:
        reducer.clip_grad_norm_(1e-3)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    return r"not called clip_grad_norm_\(\) alike"


def _clip_to_numbers_of_their_own(comm, model, reducer):
    reducer.clip_grad_norm_(1e-3 * (1 + comm.rank))
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    return r"on every rank, with the same max_norm"


@pytest.mark.transports("shm", "group", "hierarchical")
@pytest.mark.parametrize(
    "differ", [_step_another_optimizer, _clip_alone, _clip_to_numbers_of_their_own]
)
@on_ranks(2)
def test_ranks_that_made_as_many_steps_but_others_all_hear_of_it(comm, differ):
    """Of steps that change nothing: what comes of others is compared, too."""
    model, reducer, _ = attached(comm)
    backward(model, comm.rank)
    why = differ(comm, model, reducer)
    model.zero_grad()
    with pytest.raises(MismatchError, match=rf"(?s)after 1 step.*after 1 step.*{why}"):
        backward(model, comm.rank, 1)
    model.zero_grad()
    reducer.refresh()
    backward(model, comm.rank)
    reducer.check_in_sync()


@on_ranks(2)
def test_optimizers_may_step_in_any_order_and_clip(comm):
    model, reducer, _ = attached(comm)
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2:])]
    for step in range(3):
        model.zero_grad()
        backward(model, comm.rank, step)
        reducer.clip_grad_norm_(1e-3)
        halves[comm.rank].step()
        halves[1 - comm.rank].step()
    reducer.check_in_sync()


@on_ranks(2)
def test_zeros_that_a_refresh_has_kept_may_be_stepped(comm):
    model, reducer, optimizer = attached(comm)
    backward(model, comm.rank)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    reducer.refresh()
    optimizer.step()
    reducer.check_in_sync()


@pytest.mark.transports("shm")
@on_ranks(2)
def test_a_compiled_step_is_not_compiled_again_and_again(comm):
    """torch's compiler traces the steps of optimizers, and is to trace nothing of fastcomm."""
    model, _, optimizer = attached(comm)
    compiled = torch.compile(optimizer.step, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=3):
        for step in range(8):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            compiled()
