"""Ways to train with ranks that differ and hear nothing, which hard use has shown: each must be
right, or an error.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import AbandonedError, FastcommError
from fastcomm.comm.objects import gather_objects
from tests.support.models import (
    Heads,
    assert_gradients,
    attached,
    backward,
    check_backward,
    gradients,
    loss_of,
    mean_gradients,
    mlp,
)
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]


# Another rank's abandonment, heard of by polling


@on_ranks(2, 3)
def test_a_poll_leaves_the_error_of_an_abandoned_round_to_the_next_call(comm):
    before = comm.n_abandoned
    if comm.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            work = comm.all_reduce(
                torch.ones(3), async_op=True
            )  # over NCCL this may be the next call
            while not work.is_completed():
                time.sleep(0.001)
            assert comm.n_abandoned == before
            comm.all_reduce(torch.full((3,), 100.0), async_op=True)
    assert comm.n_abandoned == before + 1
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [comm.world_size] * 3


@on_ranks(2)
def test_a_rank_that_abandons_what_it_has_seen_abandoned_joins_the_others(comm):
    before = comm.n_abandoned
    if comm.rank == 1:
        comm.abandon()
    else:
        with (
            contextlib.suppress(AbandonedError)
            if comm.backend == "nccl"
            else contextlib.nullcontext()
        ):
            work = comm.all_reduce(torch.ones(3), async_op=True)  # over NCCL this may raise
            while not work.is_completed():
                time.sleep(0.001)
            comm.abandon()
    assert comm.n_abandoned == before + 1
    for _ in range(3):
        tensor = torch.ones(3)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3


# Memory


@on_ranks(2)
def test_a_gradient_made_by_hand_is_found_out_wherever_it_lies(comm):
    """Also in memory that a gradient with a graph has left, which is not reduced again."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fastcomm.Reducer(comm).attach(model)
    loss_of(model, comm.rank).backward(create_graph=True)
    optimizer.step()
    weight = model[0].weight
    address = weight.grad.data_ptr()
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    kept = [torch.ones_like(weight) for _ in range(100)]
    weight.grad = next((tensor for tensor in kept if tensor.data_ptr() == address), kept[0])
    with pytest.raises(FastcommError, match="0.weight was made without a backward"):
        optimizer.step()


def _flat_gradients(model):
    """A buffer of the user's own, of which the gradients are parts; and what zeroes them."""
    lengths = [p.numel() for p in model.parameters()]
    flat = torch.zeros(sum(lengths))
    for p, part in zip(model.parameters(), flat.split(lengths), strict=True):
        p.grad = part.view_as(p)
    return flat.zero_


def _listed_gradients(model):
    backward(model, 0)
    grads = [p.grad for p in model.parameters()]
    return lambda: torch._foreach_zero_(grads)


@pytest.mark.parametrize("hold", [_flat_gradients, _listed_gradients])
@on_ranks(2)
def test_attach_refuses_gradients_that_the_user_holds_too(comm, hold):
    """He would zero them under his own name, and not those that are reduced."""
    model, reducer = mlp(), fastcomm.Reducer(comm)
    zero = hold(model)
    with pytest.raises(ValueError, match=r"0\.weight has another name.* Set `.grad` to None first"):
        reducer.attach(model)
    del zero
    model.zero_grad()
    reducer.attach(model)


@pytest.mark.parametrize("hold", [_flat_gradients, _listed_gradients])
@on_ranks(2)
def test_gradients_that_the_user_holds_after_attach_are_replaced(comm, hold):
    model, reducer, _ = attached(comm)
    expected = mean_gradients(model, comm.world_size, backward)
    with reducer.no_sync():
        zero = hold(model)
    before = {p.grad.data_ptr() for p in model.parameters()}
    zero()
    backward(model, comm.rank)
    assert_gradients(model, expected)
    assert not {p.grad.data_ptr() for p in model.parameters()} & before


def assert_same_on_all(comm, numbers):
    first, *others = gather_objects(comm, numbers, "the test")
    assert others == [first] * len(others)


def _written_in_place(p):
    p.grad.mul_(1)


def _written_past_torch(p):
    p.grad.data.mul_(3)


@on_ranks(2)
def test_ranks_clip_numbers_alike_where_one_has_copied_its_gradients(comm):
    """The factor is float64 here, and rounds otherwise than in float32."""
    model = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in range(16))
    model.append(nn.Parameter(torch.ones(3, dtype=torch.float64)))
    reducer = fastcomm.Reducer(comm).attach(model)
    for step in range(4):
        model.zero_grad()
        slopes = torch.randn(17, generator=torch.Generator().manual_seed(2 * step + comm.rank))
        sum((p * slope).sum() for p, slope in zip(model, slopes.tolist(), strict=True)).backward()
        if comm.rank == 1 and step > 1:
            for p in model:
                p.grad = p.grad.clone()
        norm = reducer.clip_grad_norm_(0.7)
        assert_same_on_all(comm, [t.tolist() for t in (norm, *gradients(model))])


class Scales(nn.Module):
    """Of each size one parameter; those in `unused` get no gradient."""

    def __init__(self, sizes):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in sizes)

    def forward(self, slopes, unused=()):
        pairs = zip(self.all, slopes, strict=True)
        return sum((p * g).sum() for i, (p, g) in enumerate(pairs) if i not in unused)


@pytest.mark.parametrize("first", [(), (3,)], ids=str)
@on_ranks(2)
def test_ranks_clip_alike_where_one_has_zeros_and_another_nothing(comm, first):
    """Torch adds up fewer norms there, in another order."""
    sizes = [*range(40, 62), 0]
    model, reducer, _ = attached(comm, Scales(sizes))
    model([torch.ones(n) for n in sizes]).backward()  # whose norm nobody asks for
    generator = torch.Generator().manual_seed(comm.rank)
    for unused in [first, (), (3,), (3, 11), (22,), (2, 5, 7, 20, 22), ()]:
        for is_asked_again in (False, True):
            model.zero_grad(set_to_none=False)
            if comm.rank:
                for i in unused:
                    model.all[i].grad = None
            slopes = [torch.randn(n, generator=generator) for n in sizes]
            model(slopes, unused).backward()
            assert [model.all[i].grad is None for i in unused] == [comm.rank > 0] * len(unused)
            norms = [reducer.clip_grad_norm_(0.7), reducer.grad_norm()]
            assert norms[1].item() == pytest.approx(0.7, rel=1e-5), is_asked_again
            assert_same_on_all(comm, [norm.tolist() for norm in norms])


@on_ranks(2)
def test_a_norm_leaves_alone_what_the_user_has_taken_out(comm):
    """Also where the user has put other gradients in its place, as gradient surgery does."""
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(2)])
    reducer = fastcomm.Reducer(comm).attach(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, 9)).square().sum().backward()
        reduced = [p.grad for p in model.parameters()]
        values = [gradient.clone() for gradient in reduced]
        for p in model.parameters():
            p.grad = p.grad * 2 + 1
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(reducer.grad_norm(), expected)
        reducer.clip_grad_norm_(0.5 * expected.item())
        torch.testing.assert_close(reducer.grad_norm(), 0.5 * expected)
        model[0].weight.grad = None
        left = [p.grad for p in model.parameters() if p.grad is not None]
        expected = torch.nn.utils.get_total_norm(left)
        torch.testing.assert_close(reducer.grad_norm(), expected)
        assert all(map(torch.equal, reduced, values))


@pytest.mark.parametrize("write", [None, _written_in_place, _written_past_torch])
@on_ranks(2)
def test_ranks_clip_alike_where_one_has_assigned_gradients(comm, write):
    """In tensors with strides of its own, in which torch adds squares in another order."""
    model = nn.Sequential(*[nn.Linear(65, 65) for _ in range(4)])
    reducer = fastcomm.Reducer(comm).attach(model)
    if comm.rank == 1:
        for p in model.parameters():
            p.grad = torch.zeros_like(p).T.contiguous().T
    for step in range(8):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        model(torch.randn(8, 65) + comm.rank).square().sum().backward()
        if step and write is not None:
            write(model[1].weight)
        norms = [reducer.clip_grad_norm_(share) for share in (0.7, 0.3)]
        norms += [reducer.grad_norm(), *gradients(model)]
        own = torch.cat([tensor.flatten() for tensor in norms])
        assert torch.equal(*gather_objects(comm, own, "the test"))
        assert norms[1].item() == pytest.approx(0.7, rel=1e-5)


class Fused(nn.Module):
    """Its weight is cut from two pairs of parameters, whose gradients are slices of one tensor."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.full((n, 8), 0.1 * n) for n in (3, 1, 3, 1))

    def forward(self, x):
        a, b, c, d = self.parts
        return nn.functional.linear(x, torch.cat([a, b]) + torch.cat([c, d]))


@on_ranks(2)
def test_gradients_that_autograd_has_cut_from_one_piece_are_views(comm):
    model, reducer, _ = attached(comm, Fused())
    check_backward(comm, model)
    reducer.clip_grad_norm_(0.5)
    assert float(torch.nn.utils.get_total_norm(gradients(model))) == pytest.approx(0.5, rel=1e-4)


@on_ranks(2)
def test_a_gradient_whose_data_was_replaced_is_reduced_in_this_step_and_the_next(comm):
    model, _, _ = attached(comm)
    expected = mean_gradients(model, comm.world_size, backward)
    backward(model, comm.rank)
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * 0.5
    assert_gradients(model, [gradient / 2 for gradient in expected])
    backward(model, comm.rank)  # on top of what is there
    assert_gradients(model, [gradient * 1.5 for gradient in expected])
    model.zero_grad()
    backward(model, comm.rank)
    assert_gradients(model, expected)


@on_ranks(2)
def test_another_pattern_of_unused_parameters_in_every_step_takes_no_more_memory(comm):
    model = Heads(10)
    fastcomm.Reducer(comm).attach(model)
    numbers = []
    for step in range(200):
        model.zero_grad()
        used = [head for head in range(10) if (step >> head) & 1 or head == step % 10]
        loss_of(model, comm.rank, step, *used).backward()
        if step in (60, 199):
            gc.collect()
            numbers.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert numbers[1] <= numbers[0] + 20


# Warnings

SCRIPT = """
import sys, torch, fastcomm
comm = fastcomm.init("shm", init_method=sys.argv[1], rank=0, world_size=1)
model = torch.nn.Linear(3, 2)
reducer = fastcomm.Reducer(comm).attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 3)).sum().backward()
reducer.clip_grad_norm_(1.0)
optimizer.step()
reducer.check_in_sync(optimizer)
comm.close()
"""


def test_a_training_gives_no_warnings(transport, tmp_path):
    if transport != "shm":
        pytest.skip("one process is enough")
    strict = [
        sys.executable,
        "-W",
        "error::ResourceWarning",
        "-W",
        "error::DeprecationWarning:fastcomm",
        "-X",
        "dev",
    ]
    done = subprocess.run(
        [*strict, "-c", SCRIPT, f"file://{tmp_path}/meeting"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr


# Sums


@on_ranks(1)
def test_the_norm_of_float64_gradients_beside_halves_is_taken_in_float64(comm):
    model = nn.ModuleList(
        [nn.Linear(1, 1, bias=False).half(), nn.Linear(1, 1, bias=False).double()]
    )
    reducer = fastcomm.Reducer(comm).attach(model)
    for layer, slope in zip(model, (1.0, 1e100), strict=True):
        layer.weight.grad = torch.full_like(layer.weight, slope)
    reducer.reduce()
    assert reducer.grad_norm().item() == 1e100
