"""ShardedOptimizer: the parameters are those of the plain optimizer, whatever the loop does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastcomm import FastcommError
from tests.support.bodies import finish_together, raises_on_each
from tests.support.models import (
    Heads,
    Transformer,
    backward,
    batch,
    convnet,
    image_backward,
    loss_of,
    mlp,
    text_backward,
)
from tests.support.ranks import on_ranks
from tests.support.sharded_pairs import OPTIMIZERS, STEPS, Lion, Pair
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.pairwise]
every_transport = pytest.mark.transports(*EVERY_TRANSPORT)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_the_parameters_are_those_of_the_plain_optimizer(comm, name):
    kind, options = OPTIMIZERS[name]
    Pair(comm, mlp(), kind, options, bucket_cap_mb=0.001).train()


@on_ranks(4)
def test_a_rank_may_have_no_share(comm):
    model = nn.Linear(2, 3, bias=False)
    pair = Pair(comm, model, torch.optim.AdamW, {"lr": 0.01})

    def run(model, rank, step):
        (model.weight * (rank + step + 1.0)).sum().backward()

    pair.train(run)


def _two_dtypes():
    return nn.Sequential(nn.Linear(8, 16).bfloat16(), nn.Linear(16, 4).double())


def _train_two_dtypes(model, rank, step):
    x, y = batch(rank, step)
    hidden = model[0](x.bfloat16()).double()
    nn.functional.mse_loss(model[1](hidden), y.double()).backward()


def _matrices():
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))


def _train_matrices(model, rank, step):
    model(torch.full((2, 16), rank + step + 1.0)).square().sum().backward()


MODELS = {
    "convolutions and buffers": (
        lambda: convnet().to(memory_format=torch.channels_last),
        image_backward,
        *OPTIMIZERS["SGD momentum"],
    ),
    "tied parameters": (Transformer, text_backward, *OPTIMIZERS["AdamW"]),
    "several dtypes": (_two_dtypes, _train_two_dtypes, *OPTIMIZERS["AdamW"]),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on; it steps matrices whole
    MODELS["Muon"] = (_matrices, _train_matrices, torch.optim.Muon, {"lr": 0.01})


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_models_of_every_kind(comm, name, buckets):
    make, run, kind, options = MODELS[name]
    pair = Pair(comm, make(), kind, options, **buckets)
    pair.train(run)
    for mine, theirs in zip(*(model.parameters() for model in pair.models), strict=True):
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("sharding", [{}, {"elementwise": True}], ids=["whole", "cut"])
@on_ranks(2)
def test_an_optimizer_of_the_users_own_steps_parameters(comm, buckets, sharding):
    Pair(comm, mlp(), Lion, {"lr": 0.01}, sharding=sharding, **buckets).train()


@on_ranks(2)
def test_gradients_in_another_dtype_on_the_wire(comm, buckets):
    Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, wire_dtype=torch.bfloat16, **buckets).train()


@on_ranks(2)
def test_parameter_groups_and_schedulers(comm, buckets):
    def groups(model):
        return [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.05},
        ]

    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, groups=groups, **buckets)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in pair.optimizers]
    for first in range(0, 3 * STEPS, STEPS):
        pair.train(first=first)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.sharded.param_groups[1]["lr"] == 0.05 * 0.125


@every_transport
@on_ranks(2)
def test_unused_parameters_are_not_stepped(comm, buckets):
    def run(model, rank, step):
        # head 0 on rank 0 alone, head 1 on all ranks from the second step on, head 2 never
        used = [0] if rank == 0 else [1]
        loss_of(model, rank, step, *([1] if step else []), *used).backward()

    pair = Pair(comm, Heads(3), torch.optim.AdamW, {"lr": 0.01}, **buckets)
    before = pair.models[1].heads[2].weight.clone()
    pair.train(run)
    assert torch.equal(pair.models[1].heads[2].weight, before)


@on_ranks(2)
def test_groups_that_were_changed_by_hand(comm, buckets):
    def groups(model):
        rates = (0.01, 0.1, 0.05)
        layers = (model[i].parameters() for i in (0, 2, 4))
        return [{"params": p, "lr": lr} for p, lr in zip(layers, rates, strict=True)]

    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, groups=groups, **buckets)
    pair.train()
    for optimizer in pair.optimizers:
        first, second, _ = (group["params"] for group in optimizer.param_groups)
        first[1], second[1] = second[1], first[1]
    pair.train(first=STEPS)
    saved = pair.plain.state_dict()
    for optimizer in pair.optimizers:
        optimizer.param_groups = optimizer.param_groups[::-1]
    reordered = copy.deepcopy(pair.plain.state_dict())
    assert reordered["param_groups"] != saved["param_groups"]
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(copy.deepcopy(reordered))
    pair.train(first=2 * STEPS)
    for optimizer in pair.optimizers:
        del optimizer.param_groups[0]
    before = pair.models[1][4].weight.clone()
    pair.train(first=3 * STEPS)
    assert torch.equal(pair.models[1][4].weight, before)


@on_ranks(2)
def test_a_gradient_that_nobody_reduces_is_not_passed_over(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    strange = nn.Parameter(torch.zeros(3, 5))
    pair.sharded.add_param_group({"params": [strange]})
    pair.train()
    finish_together(comm)
    strange.grad = torch.ones(3, 5)
    with raises_on_each(
        comm, FastcommError, r"shape \(3, 5\).* has a gradient that nobody reduces"
    ):
        pair.sharded.step()


@on_ranks(2)
def test_no_sync_accumulates(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)

    def run(model, rank, step):
        with pair.reducers[pair.models.index(model)].no_sync():
            backward(model, rank, step + 10)
        backward(model, rank, step)

    pair.train(run)


@on_ranks(2)
def test_parameters_whose_data_was_replaced(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)

    def run(model, rank, step):
        turned = model[2].weight
        for p in model.parameters():  # as when averaged weights are swapped in
            p.data = p.data.t() if p is turned else p.data.clone().mul_(1.5)
        backward(model, rank, step)

    pair.train(run)
    pair.models[1][0].double()
    finish_together(comm)
    with raises_on_each(comm, FastcommError, r"parameter 0\..* is torch.float64"):
        pair.sharded.step()


def share(model):
    model.share_memory()


def put_elsewhere(model):
    for p in model.parameters():
        with torch.no_grad():
            p.set_(p.clone())


def negate_twice(model):
    for p in model.parameters():
        p.data = torch._neg_view(p.detach().neg())


@pytest.mark.parametrize(
    "move", [share, put_elsewhere, negate_twice], ids=lambda move: move.__name__
)
@pytest.mark.parametrize("whose", ["rank 0", "all"])
@on_ranks(2)
def test_parameters_that_were_moved_go_on_training(comm, move, whose):
    model = mlp()
    model.empty = nn.Parameter(torch.zeros(0))
    pair = Pair(comm, model, torch.optim.AdamW, {"lr": 0.01}, bucket_cap_mb=0.001)

    def run(model, rank, step):
        if step == 1 and (whose == "all" or rank == 0) and model is pair.models[1]:
            move(model)
        backward(model, rank, step)

    pair.train(run)
    pair.reducers[1].check_in_sync()


@on_ranks(2)
def test_processes_that_have_a_models_memory_see_its_steps(comm):
    """As with a plain optimizer."""
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    model = pair.models[1]
    if comm.rank == 0:
        model.share_memory()
    seen = [p.detach() for p in model.parameters()]  # the memory that another process would have
    pair.train()
    pair.reducers[1].refresh()
    pair.train(first=STEPS)
    if comm.rank == 0:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), seen, strict=True))


@on_ranks(2)
def test_a_closure(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    for step in range(STEPS):
        losses = []
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, comm.rank, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert losses[0] == losses[1]
        pair.check()


@on_ranks(2)
def test_kept_gradients_are_those_of_the_plain_reducer(comm, buckets):
    pair = Pair(
        comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, sharding={"keep_gradients": True}, **buckets
    )

    def run(model, rank, step):
        backward(model, rank, step)
        if step == 1:  # as clipping would
            for p in model.parameters():
                p.grad.mul_(0.5)
        if step == 2:
            for p in model.parameters():
                p.grad = p.grad * 2
        if step == 0:
            for p in model.parameters():
                p.grad.data = p.grad.data * 2

    pair.train(run)
    for mine, theirs in zip(*(m.parameters() for m in pair.models), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    other = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(FastcommError, match="keep_gradients=True"):
        loss_of(other.models[1], comm.rank).backward(create_graph=True)


# norms, clipping, GradScaler


@every_transport
@on_ranks(3)
def test_norm_clipping_and_counts_over_shards(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1}, bucket_cap_mb=0.001)
    for step in range(STEPS):
        norms = []
        for model, reducer, optimizer in zip(
            pair.models, pair.reducers, pair.optimizers, strict=True
        ):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            assert reducer.nonfinite_count() == 0
            norms.append(reducer.grad_norm())
            torch.testing.assert_close(reducer.clip_grad_norm_(norms[0] / 2), norms[0])
            torch.testing.assert_close(reducer.grad_norm(), norms[0] / 2)
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0])
        for mine, theirs in zip(*(m.parameters() for m in pair.models), strict=True):
            torch.testing.assert_close(mine, theirs)
    pair.sharded.zero_grad()
    (pair.models[1][0].weight.flatten()[comm.rank] * float("inf")).backward()
    assert pair.reducers[1].nonfinite_count() == 3


@pytest.mark.parametrize("unscales", [False, True])
@on_ranks(2)
def test_grad_scaler(comm, unscales):
    kept = {"keep_gradients": True}
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1}, sharding=kept, bucket_cap_mb=0.001)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            if step == 3:  # in one element, so in one rank's shard
                loss = loss + model[0].weight[0, 0] * float("inf")
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        pair.check()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[1].get_scale() == 16.0


@on_ranks(2)
def test_a_grad_scaler_that_would_find_no_gradients_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(pair.models[1], comm.rank)).backward()
    with pytest.raises(FastcommError, match="GradScaler finds no gradients.*keep_gradients=True"):
        scaler.step(pair.sharded)


@on_ranks(2)
def test_torch_clipping_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    backward(pair.models[1], comm.rank)
    utils = torch.nn.utils
    for clip in (
        utils.clip_grad_norm_,
        utils.clip_grad_value_,
        lambda parameters, norm: utils.clip_grads_with_norm_(parameters, norm, torch.ones(())),
    ):
        with pytest.raises(FastcommError, match="reducer.clip_grad_norm_"):
            clip(pair.models[1].parameters(), 1.0)
        backward(pair.models[0], comm.rank)
        clip(pair.models[0].parameters(), 1.0)
