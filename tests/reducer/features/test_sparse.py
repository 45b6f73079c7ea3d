"""Sparse gradients, of nn.Embedding(sparse=True) and the like: the rows of all ranks are added."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastcomm
from fastcomm import FastcommError, MismatchError
from tests.support.bodies import finish_together, raises_on_each
from tests.support.models import attached, replica_of, seed
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*EVERY_TRANSPORT),
    pytest.mark.pairwise,
]
only_shm = pytest.mark.transports("shm")

ROWS = 40


class Words(nn.Module):
    """Two tables and a dense layer. Words that begin a batch are in the bags, too."""

    def __init__(self, sparse=True):
        super().__init__()
        seed(0)
        self.table = nn.Embedding(ROWS, 6, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, 6, mode="sum", sparse=sparse)
        self.head = nn.Linear(6, 3)

    def forward(self, words):
        return self.head(self.table(words).mean(1) + self.bags(words[:, :2]))


def _table():
    return nn.Embedding(ROWS, 6, sparse=True)


def words(rank, step=0, n=5):
    """n rows of words; ranks have some in common, and some more than once."""
    generator = torch.Generator("cpu").manual_seed(100 * step + rank)
    drawn = torch.randint(0, 12, (n, 4), generator=generator, device="cpu") + 3 * rank
    return drawn.to(torch.get_default_device())


def loss_of(model, rank, step=0, n=5):
    return model(words(rank, step, n)).square().mean()


def alone(rank, step=0, n=5, make=Words):
    """The gradients of one rank, dense."""
    replica = replica_of(make())
    loss_of(replica, rank, step, n).backward()
    return {name: dense(p.grad) for name, p in replica.named_parameters()}


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


def weighted(batches):
    """The sum of the gradients of batches, given as (weight, rank, step)."""
    found = [(weight, alone(rank, step)) for weight, rank, step in batches]
    return {name: sum(w * g[name] for w, g in found) for name in found[0][1]}


def assert_gradients(model, wanted, rtol=1e-5, atol=1e-7):
    for name, p in model.named_parameters():
        if p.grad.is_sparse:
            assert p.grad.is_coalesced(), name
        torch.testing.assert_close(dense(p.grad), wanted[name], rtol=rtol, atol=atol)


def assert_same_bits(comm, model):
    for p in model.parameters():
        parts = [p.grad.indices(), p.grad.values()] if p.grad.is_sparse else [p.grad]
        for part in parts:
            part = part.contiguous().view(-1)
            everyone = part.new_empty(comm.world_size, len(part))
            comm.all_gather_single(everyone, part)
            assert torch.equal(everyone, everyone[:1].expand_as(everyone))


@pytest.mark.parametrize("op", ["mean", "sum"])
@on_ranks(1, 2, 3)
def test_gradients_are_those_of_one_process(comm, op, buckets):
    model, n = Words(), comm.world_size
    reducer = fastcomm.Reducer(comm, op=op, **buckets).attach(model)
    for step in range(3):
        model.zero_grad()
        loss_of(model, comm.rank, step).backward()
        assert model.table.weight.grad.is_sparse and model.bags.weight.grad.is_sparse
        share = 1 / n if op == "mean" else 1
        assert_gradients(model, weighted([(share, rank, step) for rank in range(n)]))
        assert_same_bits(comm, model)
    reducer.detach()
    assert model.table.weight.grad.is_sparse


@on_ranks(2)
def test_weights_accumulation_and_ranks_without_data(comm):
    model, reducer, _ = attached(comm, Words())
    for counts in ([(2, 1), (1, 4)], [(2, 1), (0, 0)], [(0, 3), (5, 0)]):
        model.zero_grad()
        for last, n in enumerate(counts[comm.rank]):
            reducer.set_weight(n)
            loss = loss_of(model, comm.rank, last) * (1 if n else float("nan"))
            if last:
                loss.backward()
            else:
                with reducer.no_sync():
                    loss.backward()
        total = sum(map(sum, counts))
        batches = [(n / total, r, i) for r, row in enumerate(counts) for i, n in enumerate(row)]
        assert_gradients(model, weighted([batch for batch in batches if batch[0]]))
        assert_same_bits(comm, model)
    model.zero_grad()
    reducer.set_weight(0)
    loss_of(model, comm.rank).backward()
    assert [p.grad for p in model.parameters()] == [None] * 4


@on_ranks(2)
def test_gradients_add_up_over_rounds(comm):
    """As dense ones do: a mean of what stands in .grad, to which ranks may have added."""
    model, _, _ = attached(comm, Words())
    loss_of(model, comm.rank).backward()
    if comm.rank == 0:
        loss_of(model, 0, 1).backward()
    else:
        model.head(torch.ones(2, 6)).sum().backward()  # uses no table
    wanted = weighted([(0.5, 0, 0), (0.5, 1, 0), (0.5, 0, 1)])
    assert_gradients(model.table, {"weight": wanted["table.weight"]})
    assert_same_bits(comm, model.table)


class Uses(nn.Module):
    """Ranks use the table as input, or not at all."""

    def __init__(self):
        super().__init__()
        seed(0)
        self.table = nn.Embedding(ROWS, 6, sparse=True)
        self.rest = nn.Linear(6, 6)

    def forward(self, x, uses=True):
        hidden = self.rest(torch.ones(1, 6))
        return hidden + self.table(x).mean((0, 1)) if uses else hidden


@on_ranks(1, 2, 3)
def test_ranks_agree_on_what_comes_out(comm):
    """Whatever each has: nothing, or rows."""
    model, n = Uses(), comm.world_size
    fastcomm.Reducer(comm).attach(model)
    for uses in itertools.product((True, False), repeat=n):
        model.zero_grad()
        model(words(comm.rank), uses[comm.rank]).square().mean().backward()
        replica, found = replica_of(Uses()), torch.zeros(ROWS, 6)
        for rank in range(n):
            replica.zero_grad()
            replica(words(rank), uses[rank]).square().mean().backward()
            if uses[rank]:
                found += dense(replica.table.weight.grad) / n
        if any(uses):
            torch.testing.assert_close(dense(model.table.weight.grad), found, rtol=1e-5, atol=1e-7)
            assert_same_bits(comm, model)
        else:
            assert model.table.weight.grad is None


@on_ranks(2)
def test_gradients_that_are_dense_or_of_other_dimensions_are_refused(comm):
    model, reducer, _ = attached(comm, Uses())
    hidden = model(words(comm.rank)) @ model.table.weight.t()  # tied, as an output layer's weight
    why = r"table\.weight is dense, and was to be sparse|abandoned"
    with pytest.raises(FastcommError, match=why):
        hidden.sum().backward()
    finish_together(comm)
    model.table.weight.grad = torch.zeros(ROWS, 6).to_sparse(2)
    with pytest.raises(FastcommError, match=r"table\.weight has 2 sparse dimensions|abandoned"):
        reducer.reduce()


@on_ranks(2)
def test_norms_and_clipping_count_each_row_once(comm):
    model, reducer, _ = attached(comm, Words())
    wanted = weighted([(0.5, 0, 0), (0.5, 1, 0)])
    norm = torch.nn.utils.get_total_norm(list(wanted.values()))
    loss_of(model, comm.rank).backward()
    torch.testing.assert_close(reducer.grad_norm(), norm, check_dtype=False)
    reducer.clip_grad_norm_(norm.item() / 3)
    assert_gradients(model, {name: gradient / 3 for name, gradient in wanted.items()})
    torch.testing.assert_close(reducer.grad_norm(), norm / 3, check_dtype=False)
    # what the user puts there may hold a row twice
    twice = torch.tensor([[4, 4]]), torch.tensor([[3.0] * 6, [1.0] * 6])
    for p in model.parameters():
        p.grad = torch.sparse_coo_tensor(*twice, (ROWS, 6)) if p is model.table.weight else None
    reducer.reduce()
    torch.testing.assert_close(reducer.grad_norm(), torch.tensor(6**0.5 * 4), check_dtype=False)
    model.table.weight.grad = torch.sparse_coo_tensor(*twice, (ROWS, 6))
    torch.testing.assert_close(reducer.grad_norm(), torch.tensor(6**0.5 * 4), check_dtype=False)
    assert reducer.nonfinite_count() == 0
    model.table.weight.grad._values()[0, :2] = float("nan")
    assert reducer.nonfinite_count() == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@on_ranks(3)
def test_rows_of_every_dtype_and_shape(comm, dtype):
    """Also of one number, and of no rows on some rank."""
    for size in ((7, 5), (7,), (7, 2, 3)):
        table = nn.Parameter(torch.zeros(size, dtype=dtype))
        reducer = fastcomm.Reducer(comm, sparse_parameters=["table"]).attach([("table", table)])
        total = 0
        for rank in range(3):
            seed(rank)
            indices = torch.randint(0, 7, (1, 3 * rank))
            values = torch.randn(3 * rank, *size[1:], dtype=dtype)
            mine = torch.sparse_coo_tensor(indices, values, size)
            total = total + mine.to_dense()
            if rank == comm.rank:
                table.grad = mine
        reducer.reduce()
        assert table.grad.is_sparse
        rtol = 2**-6 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(table.grad.to_dense(), total / 3, rtol=rtol, atol=rtol)
        reducer.detach()


@on_ranks(2)
def test_values_travel_in_their_own_dtype_whatever_the_wire_is(comm):
    model, _, _ = attached(comm, nn.Embedding(4, 1, sparse=True), wire_dtype=comm.wire_dtypes[-1])
    (model(torch.tensor([1])) * (1, 2**-20)[comm.rank]).sum().backward()
    assert model.weight.grad.values().item() == 0.5 + 2**-21


class Sizes(TorchDispatchMode):
    """The largest tensor that anything returns."""

    greatest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_sparse and "view" not in str(func):
            self.greatest = max(self.greatest, out.numel())
        return out


@only_shm
@on_ranks(2)
def test_nothing_as_large_as_the_table_is_made_or_sent(comm):
    seed(0)
    model, reducer, _ = attached(comm, nn.Embedding(100_000, 8, sparse=True))
    with reducer.no_sync():
        model(words(comm.rank)).square().mean().backward()
    with Sizes() as sizes:
        reducer.reduce()
    assert model.weight.grad._nnz() < 30
    # two ranks send at most 20 rows of an index and 8 numbers, and room is kept for more
    assert 0 < sizes.greatest <= 2 * 1.25 * 20 * (8 + 8 * 4) + 128


@only_shm
@on_ranks(2)
def test_rows_are_asked_for_at_the_end_of_backward(comm):
    """Where no hook waits for the other ranks, also if these gradients are ready first."""
    model, reducer, _ = attached(comm, Words())
    with reducer.timeline() as timeline:
        loss_of(model, comm.rank).backward()
    (step,) = timeline.steps()
    assert [plan.names for plan in timeline.buckets] == [
        ("table.weight", "bags.weight"),
        ("head.bias", "head.weight"),
    ]
    assert step.buckets[0].launch >= step.backward_end
    assert len(step.ready) == 4 and all(step.ready)


@pytest.mark.parametrize("make", [Words, _table])
@on_ranks(2)
def test_ranks_drop_a_step_together(comm, make):
    """Also where nothing but sparse gradients carries the vote."""
    seed(0)
    model, reducer, optimizer = attached(comm, make(), skip_nonfinite=True)
    before = [p.detach().clone() for p in model.parameters()]
    for trouble in ("a vote", "a NaN", "none"):
        model.zero_grad()
        loss = loss_of(model, comm.rank)
        if comm.rank == 1 and trouble == "a vote":
            reducer.skip_step()
        if comm.rank == 1 and trouble == "a NaN":  # in a row, and in no dense gradient
            row = nn.functional.embedding(torch.tensor([3]), next(model.parameters()), sparse=True)
            loss = loss + row.sum() * float("nan")
        loss.backward()
        optimizer.step()
        assert reducer.skipped == (trouble != "none")
        assert all(map(torch.equal, before, model.parameters())) == reducer.skipped
    assert_same_bits(comm, model)


@on_ranks(2)
def test_gradients_are_guarded_as_dense_ones_are(comm):
    model, reducer, optimizer = attached(comm, Words())
    loss_of(model, comm.rank).backward()
    optimizer.step()
    reducer.check_in_sync()
    model.table.weight.grad.mul_(2)  # after the step that has used it
    with pytest.raises(FastcommError, match=r"parameter table\.weight was made without a backward"):
        optimizer.step()
    model.table.weight.grad.zero_()
    optimizer.step()
    reducer.refresh()
    model.zero_grad()
    loss_of(model, comm.rank).backward()
    optimizer.step()
    finish_together(comm)
    model.table.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(FastcommError, match=r"parameter table\.weight was dropped in a hook"):
        loss_of(model, comm.rank).backward()


@on_ranks(2)
def test_ranks_that_make_different_steps_are_told(comm):
    seed(0)
    model, _, optimizer = attached(comm, nn.Embedding(ROWS, 6, sparse=True))
    model(words(0)).sum().backward()
    if comm.rank == 0:
        optimizer.step()
    with raises_on_each(comm, MismatchError, "rank 0: mean after 1 step; rank 1: mean"):
        model(words(0)).sum().backward()


@on_ranks(2)
def test_what_is_sparse_is_agreed_on(comm):
    with pytest.raises(MismatchError, match=r"table\.weight has sparse gradients True on rank 0"):
        fastcomm.Reducer(comm).attach(Words(sparse=comm.rank == 0))
    model = Words()
    model.table.sparse = False
    reducer = fastcomm.Reducer(comm).attach(model)
    loss_of(model, comm.rank).backward()
    model.table.sparse = True
    model.zero_grad()
    # the second rank to come there may hear of the first one's error before it has its own
    told = r"sparse, and was to be dense.*sparse_parameters=|abandoned what was under way"
    with pytest.raises(FastcommError, match=told):
        loss_of(model, comm.rank).backward()
    reducer.refresh()
    model.zero_grad()
    loss_of(model, comm.rank).backward()
    assert_gradients(model, weighted([(0.5, 0, 0), (0.5, 1, 0)]))


@on_ranks(2)
def test_what_does_not_go_with_them_is_refused_by_name(comm):
    model = Words()
    with pytest.raises(ValueError, match="the model has no parameter missing"):
        fastcomm.Reducer(comm, sparse_parameters=["missing"]).attach(model)
    table = nn.Embedding(ROWS, 6, sparse=True, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"parameter weight is sparse and complex: make"):
        fastcomm.Reducer(comm).attach(table)
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(ValueError, match=r"gradient of parameter table\.weight: rows .* travel"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    with pytest.raises(FastcommError, match=r"is to be differentiated \(create_graph=True\): use"):
        loss_of(model, comm.rank).backward(create_graph=True)


@on_ranks(2)
def test_a_backward_that_fails_on_one_rank_is_dropped_on_all(comm):
    model, reducer, _ = attached(comm, Words())

    def fail(_):
        raise RuntimeError("out of luck")

    hidden = model.table(words(comm.rank))
    if comm.rank == 1:
        hidden.register_hook(fail)
    loss = model.head(hidden.mean(1)).sum()
    with pytest.raises((RuntimeError, FastcommError), match="out of luck|rank 1 abandoned"):
        loss.backward()
        reducer.synchronize()
    assert [p.grad for p in model.parameters()] == [None] * 4
    model.zero_grad()
    loss_of(model, comm.rank).backward()
    assert_gradients(model, weighted([(0.5, 0, 0), (0.5, 1, 0)]))
