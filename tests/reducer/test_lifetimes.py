"""A reducer lives as long as its model, and no longer: nothing of a step keeps either."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fastcomm
from tests.support.models import backward, mlp
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("transport")


def _train(comm, model, block=lambda reducer: nullcontext(), **options):
    """Makes two steps. Returns weak references to the reducer and to a parameter."""
    reducer = fastcomm.Reducer(comm, **options).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with block(reducer):
        for _ in range(2):
            backward(model, comm.rank)
            optimizer.step()
            model.zero_grad()
    return weakref.ref(reducer), weakref.ref(model[0].weight)


def _hook(comm, model):
    return _train(comm, model, hook=(fastcomm.HookState(comm), fastcomm.all_reduce_hook))


def _narrow_hook(comm, model):
    state = fastcomm.HookState(comm, wire_dtype=torch.bfloat16)
    return _train(comm, model, hook=(state, fastcomm.all_reduce_hook))


def _refusing_hook(comm, model):
    """Of another model, whose gradients the hook cannot reduce."""
    state = fastcomm.HookState(comm, op="max")
    pair = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    other = fastcomm.Reducer(comm, hook=(state, fastcomm.all_reduce_hook)).attach([("pair", pair)])
    with pytest.raises(TypeError, match="complex"):
        pair.abs().sum().backward()
    return weakref.ref(other), weakref.ref(pair)


def _narrow_wire(comm, model):
    return _train(comm, model, wire_dtype=torch.bfloat16)


def _largest(comm, model):
    return _train(comm, model, op="max")


def _skip_nonfinite(comm, model):
    return _train(comm, model, skip_nonfinite=True)


def _weights(comm, model):
    def weigh(reducer):
        reducer.set_weight(comm.rank + 1.0)
        return nullcontext()

    return _train(comm, model, weigh)


def _weight_of_no_backward(comm, model):
    references = _train(comm, model)
    references[0]().set_weight(0)
    return references


def _clipping(comm, model):
    reducer = fastcomm.Reducer(comm).attach(model)
    backward(model, comm.rank)
    reducer.clip_grad_norm_(1.0)
    return weakref.ref(reducer), weakref.ref(model[0].weight)


def _no_sync(comm, model):
    return _train(comm, model, fastcomm.Reducer.no_sync)


def _join(comm, model):
    return _train(comm, model, fastcomm.Reducer.join)


def _local_sgd(comm, model):
    return _train(comm, model, lambda reducer: fastcomm.LocalSGD(reducer, every=2))


def _diloco(comm, model):
    return _train(
        comm, model, lambda reducer: fastcomm.DiLoCo(reducer, torch.optim.SGD, every=2, lr=0.7)
    )


@pytest.mark.parametrize(
    "train",
    [
        _train,
        _hook,
        _narrow_hook,
        _refusing_hook,
        _narrow_wire,
        _largest,
        _skip_nonfinite,
        _weights,
        _weight_of_no_backward,
        _clipping,
        _no_sync,
        _join,
        _local_sgd,
        _diloco,
    ],
)
@on_ranks(2)
def test_a_reducer_goes_with_its_model(comm, train):
    model = mlp()
    reducer, parameter = train(comm, model)
    del model
    gc.collect()
    assert reducer() is None
    assert parameter() is None
