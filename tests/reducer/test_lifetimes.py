"""A reducer lives as long as its model, and no longer: nothing of a step keeps either."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch

import fastcomm
from tests.support.bodies import finish_together
from tests.support.models import backward, loss_of, mlp
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("transport")


def _graphs(comm, model):
    """Gradients with graphs, which hold the model until they are dropped."""
    reducer = fastcomm.Reducer(comm).attach(model)
    loss_of(model, comm.rank).backward(create_graph=True)
    model.zero_grad()
    return reducer


def _trained(block=lambda reducer: nullcontext(), sharded=False, **options):
    """Two steps inside a block."""

    def train(comm, model):
        reducer = fastcomm.Reducer(comm, **options).attach(model)
        if sharded:
            optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.AdamW)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with block(reducer):
            for _ in range(2):
                backward(model, comm.rank)
                optimizer.step()
                model.zero_grad()
        return reducer

    return train


def _weighing(reducer):
    reducer.set_weight(reducer.comm.rank + 1.0)
    return nullcontext()


@contextmanager
def _weighing_at_the_end(reducer):
    """A weight that no backward uses."""
    yield
    reducer.set_weight(0)


TRAININGS = {
    "plain": _trained(),
    "graphs": _graphs,
    "skips": _trained(skip_nonfinite=True),
    "sharded": _trained(sharded=True),
    "weights": _trained(_weighing),
    "a weight at the end": _trained(_weighing_at_the_end),
    "no_sync": _trained(fastcomm.Reducer.no_sync),
    "join": _trained(fastcomm.Reducer.join),
    "LocalSGD": _trained(lambda reducer: fastcomm.LocalSGD(reducer, every=2)),
    "DiLoCo": _trained(lambda reducer: fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, lr=0.7)),
}


@pytest.mark.parametrize("name", TRAININGS)
@on_ranks(2)
def test_a_reducer_goes_with_its_model(comm, name):
    model = mlp()
    kept = weakref.ref(TRAININGS[name](comm, model).core), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


# What torch keeps


def _raise(_):
    raise RuntimeError("out of luck")


def _fail_early(model):
    """Fails in a backward that has not come to the first layer. Returns a weak reference to a
    parameter of that.
    """
    model[4].weight.register_post_accumulate_grad_hook(_raise)
    with pytest.raises(RuntimeError, match="out of luck"):
        backward(model, 0)
    return weakref.ref(model[0].weight)


@on_ranks(2)
def test_a_model_whose_backward_has_failed_goes_before_the_next_is_attached(comm):
    model = mlp()
    reducer = weakref.ref(fastcomm.Reducer(comm).attach(model).core)
    finish_together(comm)
    parameter = _fail_early(model)
    comm.barrier()  # as above
    del model
    fastcomm.Reducer(comm).attach(mlp())
    gc.collect()
    assert reducer() is None
    assert parameter() is None


@on_ranks(2)
def test_a_join_does_not_take_in_a_model_that_went_after_its_backward_had_failed(comm):
    model, other = mlp(), mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    fastcomm.Reducer(comm, op="max").attach(other)  # which no join() could take in
    finish_together(comm)
    _fail_early(other)
    comm.barrier()  # as above
    del other
    with reducer.join(range(comm.rank)) as batches:
        for i in batches:
            backward(model, comm.rank, i)
    reducer.check_in_sync()
