"""ShardedOptimizer: its state, whole and by rank, saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastcomm import FastcommError, MismatchError
from tests.support.models import backward, convnet, image_backward, mlp
from tests.support.ranks import on_ranks
from tests.support.sharded_pairs import OPTIMIZERS, STEPS, Pair
from tests.support.transports import EVERY_TRANSPORT

pytestmark = pytest.mark.usefixtures("transport")
every_transport = pytest.mark.transports(*EVERY_TRANSPORT)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adafactor"])
@on_ranks(2)
def test_the_full_state_is_the_plain_optimizers(comm, name):
    kind, options = OPTIMIZERS[name]
    model = convnet().to(memory_format=torch.channels_last)
    pair = Pair(comm, model, kind, options, bucket_cap_mb=0.005)
    pair.train(image_backward)
    mine, theirs = pair.sharded.full_state_dict(), pair.plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for i, state in theirs["state"].items():
        assert mine["state"][i].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert mine["state"][i][key].dtype == value.dtype
                assert torch.equal(mine["state"][i][key], value), (i, key)
            else:
                assert mine["state"][i][key] == value
    # each goes on with the other's
    pair.plain.load_state_dict(mine)
    pair.sharded.load_state_dict(copy.deepcopy(theirs))
    pair.train(image_backward, first=STEPS)


@every_transport
@on_ranks(3)
def test_a_state_of_fewer_ranks(comm, buckets):
    alone = mlp()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(STEPS):
        plain.zero_grad()
        backward(alone, 0, step)
        plain.step()
    pair = Pair(comm, copy.deepcopy(alone), torch.optim.AdamW, {"lr": 0.5}, **buckets)
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(plain.state_dict())
    assert pair.sharded.param_groups[0]["lr"] == 0.01
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_ranks_own_state(comm, buckets, tmp_path):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)
    assert repr(pair.sharded).startswith("ShardedOptimizer of AdamW (")
    pair.train()
    saved = copy.deepcopy(pair.sharded.state_dict())
    n_elements = sum(s["exp_avg"].to_local().numel() for s in saved["state"].values())
    n_parameters = sum(p.numel() for p in pair.models[1].parameters())
    assert n_elements < 0.6 * n_parameters
    pair.sharded.load_state_dict(saved)
    pair.train(first=STEPS)
    torch.save(saved, path := tmp_path / str(comm.rank))
    comm.barrier()
    theirs = torch.load(path.with_name(str(1 - comm.rank)))
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter .* is another rank's part, or of other buckets"
    ):
        pair.sharded.load_state_dict(theirs)


@on_ranks(2)
def test_the_state_of_frozen_parameters_is_kept(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)

    def freeze(is_frozen):
        for model, reducer in zip(pair.models, pair.reducers, strict=True):
            model[2].requires_grad_(not is_frozen)
            model.zero_grad()
            reducer.refresh()

    pair.train()
    earlier = copy.deepcopy(pair.plain.state_dict())
    freeze(True)
    pair.train(first=STEPS)
    saved, own = pair.sharded.full_state_dict(), copy.deepcopy(pair.sharded.state_dict())
    assert torch.equal(saved["state"][2]["exp_avg"], pair.plain.state_dict()["state"][2]["exp_avg"])
    freeze(False)
    pair.train(first=2 * STEPS)
    freeze(True)
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(copy.deepcopy(earlier))
    freeze(False)
    pair.train(first=3 * STEPS)
    freeze(True)
    for optimizer, state in zip(pair.optimizers, (saved, own), strict=True):
        optimizer.load_state_dict(state)
    freeze(False)
    pair.train(first=4 * STEPS)
    freeze(True)
    pair.models[1][2].weight.data = torch.zeros(16, 8)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 2\.weight has shape \[16, 16\]"):
        freeze(False)


@on_ranks(2)
def test_shards_of_a_parameter_that_is_frozen_now_are_refused(comm):
    buckets = {"bucket_cap_mb": 0.0001}  # a parameter's own each
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)
    pair.train()
    saved = copy.deepcopy(pair.sharded.state_dict())
    pair.models[1][0].weight.requires_grad_(False)
    pair.sharded.zero_grad()
    pair.reducers[1].refresh()
    with pytest.raises(
        (ValueError, FastcommError), match=r"exp_avg of parameter 0\.weight is another rank's"
    ):
        pair.sharded.load_state_dict(saved)


@on_ranks(2)
def test_the_state_that_a_frozen_parameter_begins_with_is_kept(comm, buckets):
    model = mlp()
    model[2].requires_grad_(False)
    options = {"lr": 0.01, "initial_accumulator_value": 0.5}
    pair = Pair(comm, model, torch.optim.Adagrad, options, **buckets)
    pair.train()
    mine, theirs = pair.sharded.full_state_dict(), pair.plain.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    assert torch.equal(mine["state"][2]["sum"], theirs["state"][2]["sum"])
    pair.plain.load_state_dict(copy.deepcopy(mine))
    pair.sharded.load_state_dict(copy.deepcopy(theirs))
    for model, reducer in zip(pair.models, pair.reducers, strict=True):
        model[2].requires_grad_(True)
        model.zero_grad()
        reducer.refresh()
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_state_of_other_groups_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="other parameter groups"):
        pair.sharded.load_state_dict(other.state_dict())
    whole = pair.plain.state_dict()
    whole["state"]["average"] = {}
    with pytest.raises(ValueError, match="something under 'average', which is no parameter"):
        pair.sharded.load_state_dict(whole)


@on_ranks(2)
def test_a_state_of_another_shape_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": torch.tensor(0.01)})
    pair.train()
    whole = pair.sharded.full_state_dict()
    other = copy.deepcopy(whole)
    other["state"][2]["exp_avg"] = torch.ones(256)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 2\.weight has shape \[256\]"):
        pair.sharded.load_state_dict(other)
    saved = copy.deepcopy(whole)
    pair.sharded.load_state_dict(saved)
    saved["param_groups"][0]["lr"].fill_(5)  # it has been copied
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_state_of_another_class_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    pair.train()
    other = torch.optim.AdamW(mlp().parameters())
    with pytest.raises(ValueError, match="has no option momentum: it is of another class than SGD"):
        pair.sharded.load_state_dict(other.state_dict())
    older = copy.deepcopy(pair.plain.state_dict())
    del older["param_groups"][0]["fused"]  # as versions of torch without it have saved it
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(copy.deepcopy(older))
    pair.train(first=STEPS)


@every_transport
@on_ranks(2)
def test_a_rank_that_has_no_state_to_load_is_an_error_on_all(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)
    pair.train()
    saved = copy.deepcopy(pair.sharded.full_state_dict())
    broken = copy.deepcopy(saved)
    broken["state"][0] = None
    for other, match in (
        (None, r"full_state_dict\(\) or state_dict\(\) has returned; got NoneType"),
        ({"state": {}, "param_groups": [{}]}, "has returned; got dict"),
        (broken, "unsupported operand.*'NoneType'"),
    ):
        with pytest.raises(TypeError if comm.rank == 1 else FastcommError, match=match):
            pair.sharded.load_state_dict(saved if comm.rank == 0 else other)
    pair.train(first=STEPS)


@pytest.mark.transports("shm", "group")
@on_ranks(2)
def test_a_call_of_one_rank_alone_is_named(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    reducer, optimizer = pair.reducers[1], pair.sharded
    pair.train()
    whole = copy.deepcopy(optimizer.full_state_dict())
    calls = {
        "load_state_dict()": lambda: optimizer.load_state_dict(whole),
        "full_state_dict()": optimizer.full_state_dict,
        "check_in_sync()": reducer.check_in_sync,
        "grad_norm()": reducer.grad_norm,
    }
    backward(pair.models[1], comm.rank)
    for name, call in calls.items():
        with pytest.raises(MismatchError) as caught:
            (call if comm.rank == 0 else comm.barrier)()
        if comm.rank == 0:
            assert f"{name}, which every rank must call)" in str(caught.value)
        else:
            hint = "1 float64 elements" if name == "grad_norm()" else "may be in attach(), refresh"
            assert hint in str(caught.value)
    optimizer.zero_grad()
    pair.train(first=STEPS)


@on_ranks(3)
def test_states_that_differ_are_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    pair.train()
    whole, part = (
        copy.deepcopy(saved)
        for saved in (pair.sharded.full_state_dict(), pair.sharded.state_dict())
    )
    is_odd = comm.rank == 1

    def refused(saved, match):
        with pytest.raises(MismatchError, match=match):
            pair.sharded.load_state_dict(saved)

    refused(part if is_odd else whole, "kind of state is the whole on rank 0 and one rank's part")
    other = copy.deepcopy(whole)
    other["state"][2]["exp_avg"][0, 0] += is_odd
    refused(
        other, r"exp_avg of parameter 2\.weight is torch.*#.* on rank 0 and torch.*#.* on rank 1"
    )
    if is_odd:
        del whole["state"][3]
    refused(whole, r"step of parameter 2\.bias is torch.*#.* on rank 0 and None on rank 1")
    part["param_groups"][0]["lr"] += is_odd
    refused(part, r"lr of the optimizer's group 0 is 0\.01 on rank 0 and 1\.01 on rank 1")
    part["param_groups"][0]["lr"] = 0.01
    for state in part["state"].values():
        state["step"] += is_odd
    refused(part, r"step of parameter .* is 3\.0 on rank 0 and 4\.0 on rank 1, and each steps")
    pair.train(first=STEPS)  # nothing of all this was taken
