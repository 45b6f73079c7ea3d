"""Where gradients lie: which of them share a bucket, and how much memory a training takes."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.reducer.bucket import Bucket
from tests.support.memory import resident_bytes
from tests.support.models import Heads, attached, backward, loss_of, mlp, seed
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("transport")

# Buckets


def _flat_buffers(model):
    """The flat buffers the gradients lie in, in the order a backward fills them: the size in bytes
    of each, and its gradients' sizes.

    In a buffer each gradient begins at the next cache line; two buffers never share a page.
    """
    found = []
    end = None
    for parameter in reversed(list(model.parameters())):
        begin, nbytes = parameter.grad.data_ptr(), parameter.grad.nbytes
        if end is None or not 0 <= begin - end < 64:
            found.append([0, []])
            first = begin
        end = begin + nbytes
        found[-1][0] = end - first
        found[-1][1].append(nbytes)
    return found


def _layers(number, size=32):
    seed(0)
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(number)))


def _backward_of_layers(model, rank):
    model(torch.full((2, model[0].in_features), rank + 1.0)).sum().backward()


@on_ranks(2)
def test_a_saved_gradient_takes_its_own_size(comm):
    model, _, _ = attached(comm, _layers(4))
    _backward_of_layers(model, comm.rank)
    saved = io.BytesIO()
    torch.save(model[1].weight.grad, saved)
    assert len(saved.getvalue()) < 2 * model[1].weight.nbytes


@on_ranks(2)
def test_buckets_fill_up_to_their_cap(comm):
    layers = _layers(11)
    model, _, _ = attached(comm, layers, bucket_cap_mb=4 * layers[0].weight.nbytes / 2**20)
    _backward_of_layers(model, comm.rank)
    assert [len(sizes) for _, sizes in _flat_buffers(model)] == [4, 4, 3]


@on_ranks(2)
def test_by_default_the_first_bucket_takes_1_mib_and_the_others_25(comm):
    model, _, _ = attached(comm, _layers(28, size=512))
    _backward_of_layers(model, comm.rank)
    assert [len(sizes) for _, sizes in _flat_buffers(model)] == [1, 25, 2]


@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_gradients_keep_their_memory_or_return_to_it(comm, buckets, set_to_none):
    model, _, _ = attached(comm, **buckets)
    backward(model, comm.rank)
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    for step in range(3):
        model.zero_grad(set_to_none)
        backward(model, comm.rank, step)
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == addresses


# Memory


def _memory_of_training(comm, set_to_none):
    """What training with a reducer adds to a rank's memory, per byte of gradients: when backward is
    nearly through, and after it.

    The mean over the ranks: which of them is charged for a page that they share depends on which of
    them has touched it.
    """
    model = _layers(16, size=1024)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    comm.barrier()
    before = resident_bytes()
    at_the_end_of_backward = []
    # The last gradient of a backward.
    model[0].weight.register_post_accumulate_grad_hook(
        lambda _: at_the_end_of_backward.append(resident_bytes())
    )
    reducer = fastcomm.Reducer(comm, bucket_cap_mb=8).attach(model)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        _backward_of_layers(model, comm.rank)
    after = resident_bytes()
    reducer.detach()
    grown = torch.tensor([(then - before) / nbytes for then in (at_the_end_of_backward[-1], after)])
    comm.all_reduce(grown, "mean")
    return grown.tolist()


# Autograd makes new gradients in every backward, which live until they are in their bucket.
@pytest.mark.parametrize("set_to_none, at_most", [(False, 1.1), (True, 2.05)])
def test_a_training_holds_one_buffer_and_what_autograd_makes(ranks, set_to_none, at_most):
    for during, after in ranks(2, _memory_of_training, set_to_none):  # 64 MiB of gradients
        assert during <= at_most
        assert after <= 1.05


@on_ranks(2)
def test_memory_does_not_grow_when_reducers_come_and_go(comm):
    for number in range(20):
        model = _layers(4, size=256)
        reducer = fastcomm.Reducer(comm).attach(model)
        _backward_of_layers(model, comm.rank)
        reducer.detach()
        del model, reducer
        gc.collect()
        if number == 10:
            before = resident_bytes()
    # Ten models have gradients of 10 MiB.
    assert resident_bytes() - before < 4 * 2**20


@on_ranks(2)
def test_gradients_lie_in_memory_of_their_own_after_detach(comm):
    model, reducer, _ = attached(comm)
    backward(model, comm.rank)
    before = [(p.grad.data_ptr(), p.grad.clone()) for p in model.parameters()]
    reducer.detach()
    for parameter, (address, values) in zip(model.parameters(), before, strict=True):
        assert parameter.grad.data_ptr() != address
        assert torch.equal(parameter.grad, values)


@on_ranks(2)
def test_ranks_are_asked_for_missing_gradients_only_in_rounds_where_some_are_missing(comm):
    """It waits for the device."""
    model, _, _ = attached(comm, Heads(2))
    asked = []
    settle = Bucket._settle_missing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "_settle_missing", lambda *a: asked.append(step) or settle(*a))
        for step, heads in enumerate([(0, 1), (0,), (0, 1), (0, 1)]):
            model.zero_grad()
            loss_of(model, comm.rank, step, *heads).backward()
    assert asked == [1]


@on_ranks(2)
def test_what_no_rank_used_in_one_round_is_reduced_in_the_next(comm):
    """Also where a rank's gradients lie in place, and nothing has to be scaled."""
    model, _, _ = attached(comm, Heads(2), op="sum")
    for heads in ((0, 1), (0,), (0, 1) if comm.rank == 0 else (0,)):
        model.zero_grad(set_to_none=False)
        loss_of(model, 0, 0, *heads).backward()
    alone = Heads(2)
    loss_of(alone, 0, 0, 0, 1).backward()
    for ours, wanted in zip(model.heads[1].parameters(), alone.heads[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad)


@on_ranks(2)
def test_a_reducer_keeps_no_parameter_alive_a_frozen_one_neither(comm):
    model = mlp()
    model[2].requires_grad_(False)
    reducer = fastcomm.Reducer(comm).attach(model)
    backward(model, comm.rank)
    comm.barrier()
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * 6
    reducer.detach()
