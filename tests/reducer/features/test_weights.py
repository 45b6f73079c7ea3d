"""Reducer.set_weight(): ranks with different amounts of data get the gradients of one process."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import FastcommError, MismatchError
from tests.support.models import assert_gradients, attached, gradients, mlp, replica_of
from tests.support.ranks import on_ranks
from tests.support.sharded_pairs import Pair
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*EVERY_TRANSPORT),
    pytest.mark.pairwise,
]
only_shm = pytest.mark.transports("shm")

# Rows of data by rank, and in each rank by backward.
ONE_BACKWARD = {2: [([5], [1]), ([5], [0])], 4: [([3], [2], [0], [1])], 1: [([3],)]}
SEVERAL = {
    1: [([3, 5, 0, 2],)],
    2: [([4, 1, 0], [0, 2, 6]), ([2, 0], [0, 0])],
    4: [([1, 7], [2, 2], [0, 0], [0, 5])],
}


def rows(n, rank, i=0):
    """n rows of data, others for every rank and backward."""
    generator = torch.Generator("cpu").manual_seed(100 * rank + i)
    x = torch.randn(n, 8, generator=generator, device="cpu")
    y = torch.randn(n, 4, generator=generator, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def loss_of(model, data, of="mean"):
    x, y = (tensor.to(next(model.parameters()).dtype) for tensor in data)
    loss = (model(x) - y).square().sum(1)
    return loss.mean() if of == "mean" else loss.sum()


def joined(model, counts):
    """The gradients of one process on the data of all ranks."""
    replica = replica_of(model).double()
    data = [rows(n, rank, i) for rank, row in enumerate(counts) for i, n in enumerate(row)]
    x, y = (torch.cat(parts).double() for parts in zip(*data, strict=True))
    loss_of(replica, (x, y)).backward()
    return [p.grad.to(next(model.parameters()).dtype) for p in replica.parameters()]


def accumulate(reducer, model, counts, of="mean"):
    """One reduction of this rank's data: a backward for each count."""
    *first, last = enumerate(counts)
    for i, n in (*first, last):
        reducer.set_weight(n, of=of)
        loss = loss_of(model, rows(n or 1, reducer.comm.rank, i), of)
        loss = loss if n else loss * float("nan")  # whatever a batch without data gives
        if i == last[0]:
            loss.backward()
        else:
            with reducer.no_sync():
                loss.backward()


@pytest.mark.parametrize("of", ["mean", "sum"])
@on_ranks(1, 2, 4)
def test_the_gradients_are_those_of_one_process_on_all_data(comm, of, buckets):
    model, reducer, _ = attached(comm, **buckets)
    for counts in (*ONE_BACKWARD[comm.world_size], *SEVERAL[comm.world_size]):
        model.zero_grad()
        accumulate(reducer, model, counts[comm.rank], of)
        assert_gradients(model, joined(model, counts))


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(2)
def test_sums_over_much_data_fit_a_narrow_wire(comm, wire_dtype):
    n = 100_000.0  # more than float16 holds
    parameter = nn.Parameter(torch.zeros(20_000))
    reducer = fastcomm.Reducer(comm, wire_dtype=wire_dtype).attach([("weight", parameter)])
    for of in ("mean", "sum"):
        parameter.grad = None
        weight = n * (1 + 3 * comm.rank)
        reducer.set_weight(weight, of=of)
        (parameter * (comm.rank + 0.501) * (weight if of == "sum" else 1)).sum().backward()
        expected = torch.full((20_000,), (0.501 + 4 * 1.501) / 5)
        torch.testing.assert_close(parameter.grad, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@on_ranks(3)
def test_gradients_of_every_dtype(comm, dtype):
    """Of sizes that end between two vectors, and in tensors that shared memory reads in place."""
    for numel in (3, 77, 50_001):
        parameter = nn.Parameter(torch.zeros(numel, dtype=dtype))
        reducer = fastcomm.Reducer(comm).attach([("weight", parameter)])
        reducer.set_weight(torch.tensor(4**comm.rank))
        slopes = [torch.linspace(r, r + 1, numel, dtype=dtype) for r in range(3)]
        (parameter * slopes[comm.rank]).sum().backward()
        exact = sum(4**r * slopes[r].double() for r in range(3)) / 21
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(parameter.grad.double(), exact, rtol=2 * step, atol=step)
        reducer.detach()


@on_ranks(2)
def test_without_any_data_no_rank_has_gradients(comm):
    model, reducer, _ = attached(comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for counts in ([0], [0, 0]):
        accumulate(reducer, model, counts)
        assert gradients(model) == [None] * len(before)
        assert reducer.clip_grad_norm_(1.0) == 0
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@on_ranks(2)
def test_a_weight_is_of_one_reduction(comm):
    model, reducer, _ = attached(comm, mlp().double())
    reducer.set_weight(9)  # replaced: no backward has used it
    accumulate(reducer, model, [5 * comm.rank])
    model.zero_grad()
    loss_of(model, rows(2, comm.rank)).backward()
    assert_gradients(model, joined(model, [[2], [2]]))


@on_ranks(2)
def test_a_weight_holds_for_all_backwards_of_its_data(comm):
    model, reducer, _ = attached(comm)
    data = rows(1 + 2 * comm.rank, comm.rank)
    reducer.set_weight(1 + 2 * comm.rank)
    with reducer.no_sync():
        (loss_of(model, data) * 0.25).backward()
    (loss_of(model, data) * 0.75).backward()
    assert_gradients(model, joined(mlp(), [[1], [3]]))


@on_ranks(2)
def test_zero_grad_drops_the_weights_of_an_accumulation(comm):
    model, reducer, _ = attached(comm)
    with reducer.no_sync():
        reducer.set_weight(7)
        loss_of(model, rows(7, 5)).backward()
        reducer.set_weight(1)  # and its forward raises
    model.zero_grad()
    accumulate(reducer, model, [2, 2 + comm.rank])
    assert_gradients(model, joined(mlp(), [[2, 2], [2, 3]]))


@on_ranks(2)
def test_gradients_of_torch_autograd_grad_are_not_weighted(comm):
    model, reducer, _ = attached(comm)
    data = rows(4, comm.rank)
    expected = torch.autograd.grad(loss_of(model, data), list(model.parameters()))
    reducer.set_weight(8)
    with reducer.no_sync():
        loss_of(model, data).backward()
    for weight in (2, 0):
        reducer.set_weight(weight)
        found = torch.autograd.grad(loss_of(model, data), list(model.parameters()))
        assert all(map(torch.equal, found, expected))


@on_ranks(2)
def test_gradients_that_are_made_by_hand(comm):
    parameter = nn.Parameter(torch.zeros(3))
    reducer = fastcomm.Reducer(comm).attach([("weight", parameter)])
    parameter.grad = torch.full((3,), 1.0 + comm.rank)
    reducer.set_weight(1 + 2 * comm.rank)
    reducer.reduce()
    assert parameter.grad.tolist() == [1.75] * 3
    parameter.grad = torch.full((3,), (2.0, float("nan"))[comm.rank])
    reducer.set_weight((5, 0)[comm.rank])
    reducer.reduce()
    assert parameter.grad.tolist() == [2.0] * 3


@on_ranks(2)
def test_a_sharded_optimizer_makes_the_steps_of_the_plain_one(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, bucket_cap_mb=0.001)
    owner = {id(model): reducer for model, reducer in zip(pair.models, pair.reducers, strict=True)}

    def run(model, rank, step):
        n = (step + 1) * (rank + step % 2)
        owner[id(model)].set_weight(n)
        loss_of(model, rows(n, rank, step)).backward()

    pair.train(run)


@pytest.mark.transports("shm", "group", "hierarchical")
@on_ranks(2)
def test_ranks_without_a_weight_beside_others_are_found_on_all(comm):
    model, reducer, _ = attached(comm, mlp().double())
    if comm.rank == 0:
        reducer.set_weight(5)
    with pytest.raises(MismatchError, match="rank 0: .* op weighted mean .*; rank 1: .* op mean"):
        loss_of(model, rows(2, comm.rank)).backward()
    reducer.set_weight(2, of=("mean", "sum")[comm.rank])
    with pytest.raises(MismatchError, match="op weighted mean .*op weighted sum"):
        loss_of(model, rows(2, comm.rank)).backward()
    model.zero_grad()
    accumulate(reducer, model, [2])
    assert_gradients(model, joined(model, [[2], [2]]))


@only_shm
@on_ranks(2)
def test_over_shared_memory_a_weight_costs_no_collective(comm):
    model, reducer, _ = attached(comm)

    def count():
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(torch.zeros(1 + comm.rank))
        return int(re.search(r"number (\d+)", str(caught.value))[1])

    numbers = [count()]
    loss_of(model, rows(2, comm.rank)).backward()
    numbers.append(count())
    model.zero_grad()
    accumulate(reducer, model, [2, 3 + comm.rank])
    numbers.append(count())
    assert numbers[2] - numbers[1] == numbers[1] - numbers[0]


# What is refused, before any rank is involved


@only_shm
@on_ranks(1)
def test_weights_that_are_none(comm):
    model, reducer, _ = attached(comm)
    for weight in (-1, float("nan"), float("inf"), 1e31, torch.tensor(-2.0)):
        with pytest.raises(ValueError, match="a weight is 0, or from 1e-30 to 1e"):
            reducer.set_weight(weight)
    for weight in ("5", None, 1j, torch.ones(2)):
        with pytest.raises(TypeError, match="a weight is a number or a tensor of one"):
            reducer.set_weight(weight)
    reducer.detach()
    with pytest.raises(ValueError, match='op="sum": .*use op mean'):
        fastcomm.Reducer(comm, op="sum").attach(model).set_weight(1)


@only_shm
@on_ranks(1)
def test_batches_that_cannot_be_weighted(comm):
    model, reducer, _ = attached(comm)
    with pytest.raises(ValueError, match='of must be "mean" or "sum"'):
        reducer.set_weight(1, of="max")
    with reducer.no_sync():
        loss_of(model, rows(2, 0)).backward()
        with pytest.raises(FastcommError, match="accumulated without a weight"):
            reducer.set_weight(2)
        model.zero_grad()
        reducer.set_weight(2)
        loss_of(model, rows(2, 0)).backward()
        for correction in (2, 3):  # also of a weight that no backward has used
            with pytest.raises(ValueError, match="got 'mean' and 'sum'"):
                reducer.set_weight(2, of="sum")
            reducer.set_weight(correction)
    handle = model[0].bias.register_post_accumulate_grad_hook(lambda _: reducer.set_weight(1))
    with pytest.raises(FastcommError, match=r"set_weight\(\) was called inside backward"):
        loss_of(model, rows(2, 0)).backward()
    handle.remove()


@only_shm
@on_ranks(2)
def test_a_refresh_loses_neither_weight_nor_vote(comm):
    model, reducer, _ = attached(comm)
    for call in (lambda: reducer.set_weight(2), reducer.skip_step):
        call()
        with pytest.raises(FastcommError, match=f"rank {comm.rank}: refresh.. would lose"):
            reducer.refresh()
        loss_of(model, rows(2, 0)).backward()
        reducer.refresh()
        model.zero_grad()
    assert reducer.n_skipped == 1


@only_shm
@on_ranks(2)
def test_a_rank_without_data_keeps_the_zeros_that_all_ranks_have(comm):
    """Of parameters that no rank's backward uses, and no step has used."""
    model, reducer, _ = attached(comm)
    accumulate(reducer, model, [1])
    model.zero_grad(set_to_none=False)
    reducer.set_weight(comm.rank)
    model[4](torch.ones(1, 16)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model[0].parameters())


@on_ranks(2)
def test_a_graph_of_gradients_needs_data(comm):
    model, reducer, _ = attached(comm)
    reducer.set_weight(comm.rank)
    why = r"is to be differentiated \(create_graph=True\)" if comm.rank == 0 else "rank 0 abandoned"
    with pytest.raises(FastcommError, match=why):
        loss_of(model, rows(2, comm.rank)).backward(create_graph=True)


# Gradients of an earlier reduction, which stand in .grad


@on_ranks(2)
def test_zeros_that_zero_grad_has_left_are_no_earlier_gradients(comm):
    model, reducer, _ = attached(comm)
    for of in ("sum", "mean"):
        accumulate(reducer, model, [3, 1 + comm.rank], of)
        model.zero_grad(set_to_none=False)
    accumulate(reducer, model, [2, 4 * comm.rank], "sum")
    assert_gradients(model, joined(mlp(), [[2, 0], [2, 4]]))


def untouched(model, reducer):
    pass


def stepped(model, reducer):
    """Leaves the gradients where they are."""
    torch.optim.SGD(model.parameters(), lr=0.0).step()


def refreshed(model, reducer):
    reducer.refresh()


@pytest.mark.parametrize("between", [untouched, stepped, refreshed])
@on_ranks(2)
def test_a_weight_refuses_gradients_of_an_earlier_reduction(comm, between):
    model, reducer, _ = attached(comm)
    accumulate(reducer, model, [3])
    between(model, reducer)
    for of in ("mean", "sum"):
        with pytest.raises(FastcommError, match=r"\d\.\w+ is that of an earlier reduction"):
            reducer.set_weight(2, of=of)
    model.zero_grad()
    accumulate(reducer, model, [2, 5])
    assert_gradients(model, joined(model, [[2, 5], [2, 5]]))


@on_ranks(2)
def test_a_second_reduction_without_a_weight_counts_ranks_alike(comm):
    model, reducer, _ = attached(comm, mlp().double())
    counts = 1 + 2 * comm.rank
    data = rows(counts, comm.rank)
    reducer.set_weight(counts)
    loss_of(model, data).backward()
    loss_of(model, data).backward()
    weighted = joined(model, [[1], [3]])
    means = [joined(model, [[1], [0]]), joined(model, [[0], [3]])]
    alike = [(a + b) / 2 for a, b in zip(*means, strict=True)]
    assert_gradients(model, [a + b for a, b in zip(weighted, alike, strict=True)])
