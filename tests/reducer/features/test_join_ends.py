"""Reducer.join(): how it ends where something goes wrong, and what it refuses."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import FastcommError, MismatchError, PeerLostError
from tests.support.models import attached
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT
from tests.support.uneven import ANNOUNCING, data_of, loss_of, small

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]
only_shm = pytest.mark.transports("shm")


@pytest.mark.transports(*ANNOUNCING)
@pytest.mark.parametrize("what", ["all_reduce", "sync_buffers", "check_in_sync", "barrier"])
def test_other_collectives_beside_a_rank_without_data(ranks, transport, what):
    # Rank 0 leaves its block by the error, which may reach rank 1 before its own does.
    message = (
        r"no data left \(join\).*: enter join\(\) on every rank|rank 0 .*aborted its communicator"
    )
    expected = MismatchError, PeerLostError
    first, _ = ranks.raises(2, expected, call_beside_a_shadow, what, match=message)
    assert "no data left (join)" in first.message


@pytest.mark.transports("nccl")
@pytest.mark.parametrize("what", ["all_reduce", "barrier"])
def test_other_collectives_over_nccl_are_refused_at_once(ranks, transport, what):
    message = "reduce gradients alone|rank 0 .*aborted its communicator"
    ranks.raises(2, FastcommError, call_beside_a_shadow, what, match=message)


@pytest.mark.transports("nccl")
def test_one_backward_over_nccl_is_of_one_reducer(ranks, transport):
    message = "one backward inside join|rank 0 .*aborted its communicator"
    ranks.raises(2, FastcommError, reduce_for_two, match=message)


def reduce_for_two(comm):
    models = [small(0), small(1)]
    reducers = [fastcomm.Reducer(comm).attach(model) for model in models]
    with reducers[0].join(range(1 - comm.rank)) as batches:
        for i in batches:
            loss_of(models[1], models[0](data_of(0, i)).repeat(1, 2)).backward()


def call_beside_a_shadow(comm, what):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    reducer = fastcomm.Reducer(comm).attach(model)
    with reducer.join():
        for _ in range(1 - comm.rank):
            if what == "all_reduce":
                comm.all_reduce(torch.ones(1), "mean")
            elif what == "barrier":
                comm.barrier()
            else:
                getattr(reducer, what)()


def test_an_exception_that_leaves_the_block_ends_it_on_all_ranks(ranks, transport):
    for is_loop in (False, True):
        ranks.raises(3, (ValueError, PeerLostError), fail_in_join, is_loop)


def fail_in_join(comm, is_loop):
    model, reducer, _ = attached(comm, small())
    batches = range(4 * comm.rank)
    with reducer.join(batches if is_loop else None) as given:
        for i in given if is_loop else batches:
            if comm.rank == 2 and i == 5:
                raise ValueError("a bad batch")
            loss_of(model, data_of(comm.rank, i)).backward()


def test_data_that_ends_inside_an_accumulation(ranks, transport):
    ranks.raises(
        2,
        FastcommError,
        end_in_no_sync,
        match=r"rank 0: the data has ended inside no_sync|rank 0 .*aborted its communicator",
    )


def end_in_no_sync(comm):
    model, reducer, _ = attached(comm, small())
    with reducer.join(range(3 + comm.rank)) as batches:
        for i in batches:
            with reducer.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                loss_of(model, data_of(comm.rank, i)).backward()


@only_shm
@on_ranks(2)
def test_gradients_that_zero_grad_has_dropped_are_not_lost(comm):
    model, reducer, _ = attached(comm, small())
    with reducer.join():
        with reducer.no_sync():
            loss_of(model, data_of(comm.rank, 0)).backward()
        model.zero_grad()
    reducer.check_in_sync()


@only_shm
def test_what_ends_a_loop_that_was_left_is_not_lost(ranks, transport):
    ranks.raises(2, MismatchError, break_beside_an_all_reduce, match="no data left")


def break_beside_an_all_reduce(comm):
    model, reducer, _ = attached(comm, small())
    with reducer.join(range(3)) as batches:
        for _ in batches:
            if comm.rank:
                break
            comm.all_reduce(torch.ones(1))
    reducer.synchronize()


@only_shm
@on_ranks(1)
def test_a_block_may_be_left_in_any_way(comm):
    model, reducer, _ = attached(comm, small())

    def returned():
        with reducer.join(range(3)) as batches:
            for _ in batches:
                return

    returned()
    with reducer.join(range(3)) as batches:
        for _ in passed_on(enumerate(batches)):
            break
    with reducer.join(range(3)) as batches:
        for _, i in zip(range(2), batches, strict=False):
            assert i < 2

    def joined():
        with reducer.join():
            yield

    generator = joined()
    next(generator)
    generator.close()
    with contextlib.suppress(SystemExit), reducer.join():
        sys.exit()
    reducer.check_in_sync()


def passed_on(batches):
    yield from batches


@only_shm
@on_ranks(1)
def test_batches_end_with_their_block(comm):
    model, reducer, _ = attached(comm, small())
    with reducer.join(range(3)) as batches:
        assert next(batches) == 0
    with pytest.raises(FastcommError, match="after its block"):
        next(batches)


# What is refused, before any rank is involved


@only_shm
@on_ranks(2)
def test_another_reducer_of_the_communicator_that_cannot_join_is_told_from_this_one(comm):
    critic, actor = small(), small()
    of_critic = fastcomm.Reducer(comm, op="max").attach(critic)
    reducer = fastcomm.Reducer(comm).attach(actor)
    with pytest.raises(ValueError, match=r'the one of parameter 2\.bias.*detach\(\).*op="max"'):
        reducer.join()
    of_critic.detach()
    _leave_in_a_circle(comm)
    with reducer.join():
        loss_of(actor, data_of(comm.rank, 0)).backward()


def _leave_in_a_circle(comm):
    """A model that is gone when the garbage collector has run."""
    model = small()
    model.itself = [model]
    fastcomm.Reducer(comm, op="max").attach(model)


@only_shm
@on_ranks(1)
def test_arguments(comm):
    reducer = fastcomm.Reducer(comm)
    with pytest.raises(ValueError, match="has no model"):
        reducer.join()
    model = small()
    reducer.attach(model)
    with pytest.raises(TypeError, match="state takes optimizers"):
        reducer.join(state=[reducer])
    with pytest.raises(TypeError, match=r"join\(\) is a block, with the loop in it"):
        iter(reducer.join([1]))
    with pytest.raises(TypeError, match="not iterable"), reducer.join(3):
        pass
    reducer.check_in_sync()
