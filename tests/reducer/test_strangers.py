"""Parameters that no bucket holds: what came into an attached model past torch's hooks, what was
frozen and has a gradient, what stands in an optimizer beside an attached model. None is stepped
unreduced.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import AbandonedError, FastcommError
from tests.support.bodies import finish_together
from tests.support.models import attached, backward, mlp
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def insert(model):
    model.insert(4, nn.Linear(16, 16))
    return "4.weight"


def replace_module(model):
    model._modules["4"] = nn.Linear(16, 4)
    return "4.weight"


def replace_parameter(model):
    model[4]._parameters["bias"] = nn.Parameter(torch.zeros(4))
    return "4.bias"


def move_through_meta(model):
    before = model[4].state_dict()
    model[4].to("meta").to_empty(device=before["weight"].device)
    model[4].load_state_dict(before)
    return "4.weight"


def unfreeze(model):
    model[2].requires_grad_(True)
    return "2.weight"


CHANGES = [insert, replace_module, replace_parameter, move_through_meta]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_ranks(2)
def test_a_parameter_that_came_past_the_hooks_is_not_stepped_before_refresh(comm, change):
    model, reducer, _ = attached(comm)
    name = change(model)
    optimizer = sgd(model.parameters())
    backward(model, comm.rank)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(FastcommError, match=rf"parameter {name} .*refresh\(\) on every rank"):
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    finish_together(comm)
    reducer.refresh()
    for step in range(2):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_parameter_put_into_an_optimizers_list_in_place_of_another_is_noticed(comm):
    model, _, _ = attached(comm)
    optimizer = sgd(model.parameters())
    backward(model, comm.rank)
    optimizer.step()
    replace_parameter(model)
    optimizer.param_groups[0]["params"][-1] = model[4].bias
    backward(model, comm.rank)
    with pytest.raises(FastcommError, match=r"parameter 4\.bias .*refresh\(\) on every rank"):
        optimizer.step()


@pytest.mark.parametrize("change", [unfreeze, insert], ids=lambda change: change.__name__)
@on_ranks(2)
def test_reduce_refuses_gradients_by_hand_of_what_no_bucket_holds(comm, change):
    model = mlp()
    model[2].requires_grad_(False)
    reducer = fastcomm.Reducer(comm).attach(model)
    name = change(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, comm.rank + 1.0) if p.requires_grad else None
    finish_together(comm)
    # Another rank may say so first.
    with pytest.raises(FastcommError, match=rf"parameter {name} .*refresh\(\)|abandoned"):
        reducer.reduce()
    finish_together(comm)
    reducer.refresh()
    for p in model.parameters():
        p.grad = torch.full_like(p, comm.rank + 1.0) if p.requires_grad else None
    reducer.reduce()
    sgd(model.parameters()).step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_gradient_by_hand_of_an_unfrozen_parameter_is_not_stepped(comm):
    model = mlp()
    model[2].requires_grad_(False)
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = sgd(model.parameters())
    backward(model, comm.rank)
    optimizer.step()
    unfreeze(model)
    model[2].weight.grad = torch.full_like(model[2].weight, comm.rank + 1.0)
    with pytest.raises(FastcommError, match=r"parameter 2\.weight .*refresh\(\)"):
        optimizer.step()
    model[2].weight.grad = None
    model[2].requires_grad_(False)
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_gradient_of_no_sync_is_not_stepped_when_its_parameter_was_frozen_since(comm):
    model, reducer, _ = attached(comm)
    optimizer = sgd(model.parameters())
    with reducer.no_sync():
        backward(model, comm.rank)
    model[2].requires_grad_(False)
    reducer.refresh()
    backward(model, comm.rank, 1)
    with pytest.raises(FastcommError, match=r"parameter 2\.weight .*frozen must have no gradient"):
        optimizer.step()
    for p in model[2].parameters():
        p.grad = None
    optimizer.step()
    reducer.check_in_sync()


@pytest.mark.parametrize("leaves", ["reduced gradients", "zeros"])
@on_ranks(2)
def test_what_is_equal_on_all_ranks_may_stand_at_a_frozen_parameter(comm, leaves):
    model, reducer, _ = attached(comm)
    optimizer = sgd(model.parameters())
    backward(model, comm.rank)
    if leaves == "zeros":
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    model[2].requires_grad_(False)
    reducer.refresh()
    backward(model, comm.rank, 1)
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_rank_trains_parameters_of_its_own_by_an_optimizer_of_their_own(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(
        [(name, p) for name, p in model.named_parameters() if not name.startswith("4")]
    )
    attached = [p for layer in model[:4] for p in layer.parameters()]
    shared, own = sgd(attached), sgd(model[4].parameters())
    before = model[4].bias.detach().clone()
    for step in range(2):
        shared.zero_grad()
        own.zero_grad()
        backward(model, comm.rank, step)
        shared.step()
        own.step()
    reducer.check_in_sync()
    assert not torch.equal(model[4].bias, before)


@on_ranks(2)
def test_a_gradient_that_a_closure_makes_is_not_stepped_unreduced_either(comm):
    trunk = mlp()
    fastcomm.Reducer(comm).attach(trunk)
    model = nn.Sequential(trunk, nn.Linear(4, 4))
    optimizer = sgd(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FastcommError, match=r"\(4, 4\), which is outside the attached model"):
        optimizer.step(lambda: backward(model, comm.rank))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_a_parameter_without_gradient_may_stand_beside_attached_ones(comm):
    model, reducer, _ = attached(comm)
    optimizer = sgd([*model.parameters(), nn.Parameter(torch.ones(3))])
    backward(model, comm.rank)
    optimizer.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_a_step_warns_where_no_model_was_attached_to_a_reducer(comm):
    model = mlp()
    reducer, another = fastcomm.Reducer(comm), fastcomm.Reducer(comm)
    optimizer = sgd(model.parameters())
    another.attach(mlp())
    backward(model, comm.rank)
    words = f"rank {comm.rank} steps parameters that no reducer reduces"
    with pytest.warns(UserWarning, match=words) as found:
        optimizer.step()
    assert [Path(one.filename).name for one in found] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # said once
        reducer.attach(model)
        backward(model, comm.rank)
        optimizer.step()


@on_ranks(1)
def test_one_rank_may_step_without_attaching(comm):
    model, reducer = mlp(), fastcomm.Reducer(comm)
    backward(model, reducer.comm.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sgd(model.parameters()).step()


@on_ranks(2)
def test_the_other_ranks_hear_of_a_reduce_that_one_rank_refuses(comm):
    model, reducer, _ = attached(comm)
    finish_together(comm)
    if comm.rank == 1:
        insert(model)
        model[4].weight.grad = torch.ones(16, 16)
    if comm.rank == 1:
        with pytest.raises(FastcommError, match=r"parameter 4\.weight"):
            reducer.reduce()
    else:
        with pytest.raises(AbandonedError, match="rank 1"):
            reducer.reduce()
            comm.barrier()  # over NCCL a later call hears of it
    finish_together(comm)
