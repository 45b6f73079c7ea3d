"""Norms, and counts of what is not finite, that come out of the reduction over shared memory."""

from __future__ import annotations

import contextlib
import weakref

import numpy
import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.comm.objects import gather_objects
from tests.support.models import attached
from tests.support.ranks import on_ranks
from tests.support.skips import INF, NAN, logged

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("shm")]
SIZES = (3, 77, 5_000, 100_001)  # through a mailbox and in place, in one block and in many
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class Weights(nn.Module):
    """Parameters of these sizes, whose gradients are given."""

    def __init__(self, sizes=SIZES, dtype=torch.float32):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes)

    def backward(self, gradients):
        sum((p * g).sum() for p, g in zip(self.all, gradients, strict=True)).backward()


def slopes(model, rank, i):
    generator = torch.Generator().manual_seed(10 * i + rank)
    return [torch.randn(p.numel(), generator=generator).to(p.dtype) for p in model.all]


def norm_of(model):
    squares = [p.grad.double().square().sum() for p in model.all]
    return torch.stack(squares).sum().sqrt()


@contextlib.contextmanager
def unread():
    """Nobody reads the gradients in this block for their norm, or for what is not finite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "get_total_norm", _read)
        patch.setattr(torch, "isfinite", _read)
        yield


def _read(*_):
    raise AssertionError("the gradients are read again")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("small", [False, True])
@on_ranks(1, 2, 3)
def test_a_norm_needs_no_second_look(comm, dtype, small):
    model = Weights(SIZES[2:], dtype)  # what goes through a mailbox is read again
    buckets = {"bucket_cap_mb": 1e-4} if small else {}
    reducer = fastcomm.Reducer(comm, **buckets).attach(model)
    for i in range(3):
        model.zero_grad()
        model.backward(slopes(model, comm.rank, i))
        if i == 0:  # from here on they are counted
            torch.testing.assert_close(
                reducer.grad_norm().double(), norm_of(model), rtol=1e-3, atol=0
            )
            continue
        expected = norm_of(model)
        with unread():
            norm, count = reducer.grad_norm(), reducer.nonfinite_count()
            before = reducer.clip_grad_norm_(2 * norm.item())
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
        assert (before, count) == (norm, 0)
        assert len(set(gather_objects(comm, norm.item(), "the test"))) == 1
        torch.testing.assert_close(norm_of(model), expected, rtol=0, atol=0)
        reducer.clip_grad_norm_(expected.item() / 2)
        torch.testing.assert_close(norm_of(model), expected / 2, rtol=1e-2, atol=0)
        torch.testing.assert_close(reducer.grad_norm().double(), norm_of(model), rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [3, 5_000])
@on_ranks(2)
def test_a_norm_that_one_rank_asks_for_changes_no_other(comm, size):
    model = Weights((size, 2 * size))
    reducer = fastcomm.Reducer(comm, skip_nonfinite=True).attach(model)
    for i in range(6):
        model.zero_grad()
        model.backward(slopes(model, comm.rank, i))
        if comm.rank == 0:
            torch.testing.assert_close(
                reducer.grad_norm().double(), norm_of(model), rtol=1e-6, atol=0
            )
        if i > 2:
            norm = reducer.clip_grad_norm_(1e-3)
            assert len(set(gather_objects(comm, norm.item(), "the test"))) == 1


@on_ranks(1, 2)
def test_the_norm_of_infinities_is_infinite(comm):
    for dtype in DTYPES:
        model = Weights(dtype=dtype)
        reducer = fastcomm.Reducer(comm).attach(model)
        for i in range(3):
            model.zero_grad()
            gradients = slopes(model, comm.rank, i)
            gradients[3][7] = INF
            model.backward(gradients)
            assert reducer.grad_norm() == INF
        reducer.detach()


def _unscale(gradient):
    """As GradScaler does it."""
    torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(()), torch.full((), 3.0)
    )


WRITES = {
    "in place": lambda p: p.grad.mul_(3),
    "to one element": lambda p: p.grad[-2].fill_(100),
    "to all at once": lambda p: torch._foreach_mul_([p.grad], 3),
    "to a view": lambda p: p.grad[1:].mul_(3),
    "by a GradScaler": lambda p: _unscale(p.grad),
    "past torch": lambda p: p.grad.data.mul_(3),
    "by NumPy": lambda p: numpy.multiply(p.grad.numpy(), 3, out=p.grad.numpy()),
    "of another tensor": lambda p: setattr(p, "grad", 3 * p.grad),
    "of nothing": lambda p: setattr(p, "grad", None),
}


@on_ranks(2)
def test_what_is_written_since_is_in_the_norm(comm):
    for name, write in WRITES.items():
        for k in range(len(SIZES)):
            model = Weights()
            reducer = fastcomm.Reducer(comm).attach(model)
            for i in range(2):
                model.zero_grad()
                model.backward(slopes(model, comm.rank, i))
                reducer.grad_norm()
            write(model.all[k])
            left = [p for p in model.all if p.grad is not None]
            expected = torch.nn.utils.get_total_norm([p.grad for p in left])
            torch.testing.assert_close(
                reducer.grad_norm(), expected, rtol=1e-6, atol=0, msg=lambda m, name=name: name + m
            )
            reducer.detach()


@on_ranks(1)
def test_what_is_written_to_few_rows_is_in_the_norm(comm):
    """As an embedding has them: where torch counts no write, most elements do not tell."""
    model, reducer, _ = attached(comm, Weights(SIZES[2:]))
    for _ in range(2):
        model.zero_grad()
        gradients = [torch.zeros_like(p) for p in model.all]
        gradients[0][7] = 1
        model.backward(gradients)
        assert reducer.grad_norm() == 1
    _unscale(model.all[0].grad)
    assert reducer.grad_norm() == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3)
def test_what_is_not_finite_is_counted_and_found_on_its_rank(comm, dtype):
    """Wherever it stands, also where two ranks have it in one place, or in one block, and where
    there are infinities alone.
    """
    places = [(0, 2), (1, 76), (2, 0), (2, 4_999), (3, 50_000), (3, 50_001), (3, 100_000)]
    for skips in (False, True):
        model = Weights(dtype=dtype)
        reducer = fastcomm.Reducer(comm, skip_nonfinite=skips).attach(model)
        for i in range(4):
            model.zero_grad()
            gradients = slopes(model, comm.rank, i)
            if i > 1:  # which other kernels reduce
                reducer.set_weight(comm.rank + 1)
            mine = places[comm.rank : 4 + comm.rank] if i % 2 else []
            values = (NAN, INF, -INF, NAN) if i == 1 else (-INF,) * 4
            for (k, at), value in zip(mine, values, strict=False):
                gradients[k][at] = value
            with logged() as lines:
                model.backward(gradients)
            assert reducer.skipped == (skips and bool(mine))
            if not skips:
                reducer.grad_norm()  # lets them be counted
                n = 3 + comm.world_size if mine else 0
                assert (
                    reducer.nonfinite_count()
                    == n
                    == sum(int((~p.grad.isfinite()).sum()) for p in model.all)
                )
            elif comm.rank == 0 and mine:
                found = [
                    ["all.2 (2 elements)", "all.1 (1 elements)", "all.0 (1 elements)"],
                    ["all.3 (1 elements)", "all.2 (2 elements)", "all.1 (1 elements)"],
                    ["all.3 (2 elements)", "all.2 (2 elements)"],
                ]
                for rank, names in enumerate(found[: comm.world_size]):
                    words = f"on rank {rank}: {', '.join(names)}"
                    assert [words] == [one for one in (words,) if one in lines[0]], lines
        reducer.detach()


@on_ranks(2)
def test_gradients_that_are_at_home_are_looked_at_before(comm):
    """Where gradients are cleared to zeros, autograd adds to them in the flat buffer."""
    model, reducer, _ = attached(comm, Weights(), skip_nonfinite=True)
    for i in range(3):
        model.zero_grad(set_to_none=False)
        gradients = slopes(model, comm.rank, i)
        if i == 2 and comm.rank == 1:
            gradients[3][7] = NAN
        with logged() as lines:
            model.backward(gradients)
    assert reducer.skipped
    said = "all ranks skip a step: gradients not finite on rank 1: all.3 (1 elements)"
    assert lines == [said] * (comm.rank == 0)


@on_ranks(1)
def test_gradients_that_were_looked_at_are_let_go(comm):
    model, seen = Weights(), []
    for p in model.all:
        p.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    fastcomm.Reducer(comm, skip_nonfinite=True).attach(model)
    model.backward(slopes(model, 0, 0))
    assert [reference() for reference in seen] == [None] * len(SIZES)
