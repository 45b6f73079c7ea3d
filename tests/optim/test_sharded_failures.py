"""ShardedOptimizer: what it cannot do is refused; what goes wrong on one rank is said on all, and
training goes on.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError
from tests.support.bodies import hear_of_it
from tests.support.models import Heads, attached, backward, loss_of, mlp
from tests.support.ranks import on_ranks
from tests.support.sharded_pairs import STEPS, Pair
from tests.support.transports import EVERY_TRANSPORT

pytestmark = pytest.mark.usefixtures("transport")
every_transport = pytest.mark.transports(*EVERY_TRANSPORT)


@on_ranks(2)
def test_copies_and_hooks_of_one_ranks_pieces_are_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre"):
        with pytest.raises(FastcommError, match="calls no hooks when its state is saved"):
            getattr(pair.sharded, f"register_{name}_hook")(print)
    for make_copy in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save its full_state_dict\(\)"):
            make_copy(pair.sharded)


@every_transport
@on_ranks(2)
def test_a_second_round_would_overwrite_gradients(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    backward(pair.models[1], comm.rank)
    with pytest.raises(FastcommError, match=r"no_sync\(\)"):
        backward(pair.models[1], comm.rank)
    pair.sharded.zero_grad()
    pair.train()


@on_ranks(2)
def test_gradients_of_no_sync_alone_are_not_stepped(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    with pair.reducers[1].no_sync():
        backward(pair.models[1], comm.rank)
    comm.barrier()  # or the first rank's refusal reaches the other before it has come to its own
    with pytest.raises(FastcommError, match=r"parameter 4\.bias is this rank's own"):
        pair.sharded.step()
    pair.reducers[1].reduce()
    pair.sharded.step()


@on_ranks(2)
def test_another_optimizer_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    other = torch.optim.Adam(pair.models[1].parameters())
    backward(pair.models[1], comm.rank)
    with pytest.raises(FastcommError, match="this Adam has parameters"):
        other.step()
    with pytest.raises(ValueError, match="give the one that is there more groups"):
        fastcomm.ShardedOptimizer(pair.reducers[1], torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_after_the_optimizer_is_gone(comm):
    model, reducer, _ = attached(comm)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    del optimizer
    gc.collect()
    with pytest.raises(FastcommError, match="ShardedOptimizer of this model is gone"):
        backward(model, comm.rank)
    reducer.detach()
    reducer.attach(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, comm.rank)
    plain.step()
    reducer.check_in_sync()


@on_ranks(2)
def test_after_detach(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    pair.train()
    pair.reducers[1].detach()
    with pytest.raises(FastcommError, match="was detached"):
        pair.sharded.step()
    pair.sharded = fastcomm.ShardedOptimizer(
        pair.reducers[1].attach(pair.models[1]), torch.optim.SGD, lr=0.1
    )
    pair.train(first=STEPS)


@on_ranks(2)
def test_gradients_are_used_up(comm):
    pair = Pair(comm, Heads(2), torch.optim.AdamW, {"lr": 0.01})
    for step in range(STEPS):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            loss_of(model, comm.rank, step, step % 2).backward()  # adds to none of an earlier step
            optimizer.step()
            if optimizer is pair.sharded:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad()
        pair.check()


@on_ranks(2)
def test_a_step_that_raises_on_one_rank(comm):
    class Breaks(torch.optim.SGD):
        def step(self, closure=None):
            if comm.rank == 1:
                raise RuntimeError("broken")
            return super().step(closure)

    pair = Pair(comm, mlp(), Breaks, {"lr": 0.1})
    backward(pair.models[1], comm.rank)
    with pytest.raises(
        AbandonedError if comm.rank == 0 else RuntimeError,
        match="rank 1" if comm.rank == 0 else "broken",
    ):
        pair.sharded.step()
        hear_of_it(comm)  # rank 0, where its step has not waited for rank 1's shard
    assert pair.sharded.is_torn or comm.backend == "nccl"
    if pair.sharded.is_torn:
        with pytest.raises(FastcommError, match=r"has failed.*refresh\(\)"):
            backward(pair.models[1], comm.rank)
    pair.reducers[1].refresh()
    pair.reducers[1].check_in_sync()
    backward(pair.models[1], comm.rank)


@pytest.mark.transports("shm", "group", "hierarchical")
@pytest.mark.parametrize("mends", ["loads", "begins anew"])
@on_ranks(2)
def test_a_step_that_raises_on_the_way_mixes_the_state(comm, mends):
    class Breaks(torch.optim.AdamW):
        n_steps = 0

        def step(self, closure=None):
            type(self).n_steps += 1
            if comm.rank == 1 and self.n_steps == STEPS + 1:
                raise RuntimeError("broken")
            return super().step(closure)

    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    model, reducer = pair.models[1], pair.reducers[1]
    reducer.detach()
    pair.sharded = optimizer = fastcomm.ShardedOptimizer(
        reducer.attach(model), Breaks, lr=0.01, elementwise=True
    )
    pair.train()
    saved = copy.deepcopy((optimizer.full_state_dict(), model.state_dict()))
    backward(model, comm.rank)
    with pytest.raises((AbandonedError, RuntimeError), match="rank 1|broken"):
        optimizer.step()
    with pytest.raises(FastcommError, match=r"its state is of two steps: load one whole state"):
        reducer.refresh()
    with pytest.raises(MismatchError, match=r"step of parameter .* is 4.0 on rank 0 and 3.0 on"):
        optimizer.full_state_dict()
    if mends == "loads":
        optimizer.load_state_dict(saved[0])
        model.load_state_dict(saved[1])
        reducer.refresh()
    else:
        with pytest.raises(FastcommError, match=r"load_state_dict\(\)"):
            optimizer.state = dict(pair.plain.state)
        optimizer.state = pair.plain.state = defaultdict(dict)
        reducer.refresh()  # with rank 0's parameters
        pair.models[0].load_state_dict(model.state_dict())
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_state_that_one_rank_has_dropped(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    pair.train()
    if comm.rank == 1:
        pair.sharded.state = {}
    for call in (
        pair.sharded.full_state_dict,
        pair.reducers[1].refresh,
        lambda: pair.reducers[1].check_in_sync(pair.sharded),
    ):
        with pytest.raises(MismatchError, match=r"step of parameter .* is 3\.0 on rank 0 and None"):
            call()


@pytest.mark.transports("shm", "group")
@pytest.mark.parametrize("instead", ["barrier", "backward"])
@on_ranks(2)
def test_a_step_is_told_from_what_another_rank_calls_instead(comm, instead):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    model = pair.models[1]
    calls = {"barrier": comm.barrier, "backward": lambda: backward(model, comm.rank)}
    pair.train()
    before = copy.deepcopy(model.state_dict())
    backward(model, comm.rank)
    if comm.rank == 0:
        pair.sharded.zero_grad()
    with pytest.raises(MismatchError, match="all_gather_v") as caught:
        try:
            (calls[instead] if comm.rank == 0 else pair.sharded.step)()
        finally:
            comm.abandon()
    advice = "in the step() of a ShardedOptimizer"
    assert (advice in str(caught.value)) == (instead == "backward")
    if comm.rank == 1:
        assert "(in ShardedOptimizer.step(), which every rank must call)" in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    pair.sharded.zero_grad()
    pair.train(first=STEPS)


@pytest.mark.transports("shm", "group", "hierarchical")
@pytest.mark.parametrize("sharding", [{}, {"keep_gradients": True}])
@on_ranks(2)
def test_a_failure_between_backward_and_step_leaves_no_rank_ahead(comm, sharding):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, sharding=sharding)
    pair.train()
    before = copy.deepcopy(pair.models[1].state_dict())
    backward(pair.models[1], comm.rank)
    try:  # the handler of docs/skip_steps.md
        if comm.rank == 1:
            raise ValueError("between backward and step")
        pair.sharded.step()
    except (ValueError, AbandonedError) as error:
        assert "between" in str(error) or "rank 1 abandoned" in str(error)
        comm.abandon()
    else:
        raise AssertionError("this rank has stepped")
    torch.testing.assert_close(pair.models[1].state_dict(), before, rtol=0, atol=0)
    backward(pair.models[1], comm.rank)  # without zero_grad(): the shards hold no gradient
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_refresh_that_one_rank_must_refuse(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    model, reducer = pair.models[1], pair.reducers[1]
    pair.train()
    backward(model, comm.rank)
    if comm.rank == 0:
        pair.sharded.zero_grad()
    with pytest.raises(FastcommError, match=r"refresh\(\) would lose the gradients"):
        reducer.refresh()
    pair.sharded.zero_grad()
    if comm.rank == 1:
        model[2].weight.data = torch.zeros(16, 8)
    with pytest.raises(FastcommError, match=r"parameter 2\.weight is .* \[16, 8\], and was"):
        reducer.refresh()
    if comm.rank == 1:
        model[2].weight.data = torch.zeros(16, 16)
    reducer.refresh()
    reducer.check_in_sync()


@on_ranks(2)
def test_the_state_is_there_after_a_refresh_that_failed(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    model, reducer = pair.models[1], pair.reducers[1]
    pair.train()
    model.register_buffer("mean", torch.zeros(2 + comm.rank))
    with pytest.raises(MismatchError):
        reducer.refresh()
    del model.mean
    saved = pair.sharded.full_state_dict()
    assert len(saved["state"]) == len(list(model.parameters()))
    for use in (lambda: backward(model, comm.rank), pair.sharded.step):
        with pytest.raises(FastcommError, match=r"refresh\(\) failed: call it again"):
            use()
    model.zero_grad()
    reducer.refresh()
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_class_that_raises_on_one_rank(comm):
    class Breaks(torch.optim.AdamW):
        fails = ""

        def __init__(self, params, **options):
            self._fail("making")
            super().__init__(params, **options)

        def load_state_dict(self, state_dict):
            self._fail("loading")
            super().load_state_dict(state_dict)

        def _fail(self, what):
            if comm.rank == 1 and self.fails == what:
                raise KeyError(f"not while {what}")

    def refused(call, what):
        Breaks.fails = what
        match = f"KeyError: 'not while {what}'" if comm.rank == 0 else what
        with pytest.raises(KeyError if comm.rank == 1 else FastcommError, match=match):
            call()
        Breaks.fails = ""

    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    model, reducer = pair.models[1], pair.reducers[1]
    reducer.detach()
    reducer.attach(model)

    def make():
        return fastcomm.ShardedOptimizer(reducer, Breaks, lr=0.01, elementwise=True)

    refused(make, "making")
    pair.sharded = make()
    pair.train()
    other = copy.deepcopy(pair.sharded.full_state_dict())
    other["param_groups"][0]["lr"] = 0.5
    refused(lambda: pair.sharded.load_state_dict(other), "loading")
    refused(reducer.refresh, "making")
    reducer.refresh()
    pair.train(first=STEPS)  # with the state and the learning rate it had


@on_ranks(2)
def test_an_optimizer_that_could_not_be_made_holds_nothing(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    model, reducer = pair.models[0], pair.reducers[0]
    model.register_buffer("mean", torch.zeros(2 + comm.rank))
    with pytest.raises(MismatchError):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    del model.mean
    reducer.refresh()
    pair.train()  # by the plain one


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.LBFGS, {}, "LBFGS looks at all parameters together"),
    (torch.optim.SparseAdam, {}, "SparseAdam steps sparse gradients"),
    (torch.optim.SGD, {"lr": 0.1, "differentiable": True}, "differentiable"),
    (torch.optim.SGD, {"lr": -1.0}, "Invalid learning rate"),
    (torch.optim.SGD, {"params": 0.1}, "'float' object is not iterable"),
    (torch.optim.SGD([torch.zeros(1)], lr=0.1), {}, "class of an optimizer"),
]


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused(comm):
    model, reducer, _ = attached(comm)
    for kind, options, match in REFUSED:
        with pytest.raises((ValueError, TypeError), match=match):
            fastcomm.ShardedOptimizer(reducer, kind, **options)


@on_ranks(2)
def test_parameters_without_a_group_or_a_model_are_refused(comm):
    model = mlp()
    with pytest.raises(TypeError, match="takes a Reducer"):
        fastcomm.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(ValueError, match=r"parameter 2\.weight is in no group"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, model[0].parameters(), lr=0.1)
    strange = [*model.parameters(), nn.Parameter(torch.zeros(3, 5))]
    with pytest.raises(ValueError, match=r"shape \(3, 5\) is not in the reducer's model"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, strange, lr=0.1)


@on_ranks(2)
def test_parameters_in_the_same_memory_are_refused(comm):
    rows = mlp()
    rows.register_buffer("rows", rows[2].weight.detach()[4:6, 3:])  # from the middle of it
    with pytest.raises(ValueError, match=r"2\.weight and rows lie in the same memory"):
        fastcomm.ShardedOptimizer(fastcomm.Reducer(comm).attach(rows), torch.optim.SGD, lr=0.1)
    for other in ("2.bias", "mean"):
        model = mlp()
        if other == "mean":
            model.register_buffer("mean", model[0].bias.detach())
        else:
            model[2].bias.data = model[0].bias.data
        reducer = fastcomm.Reducer(comm).attach(model)
        with pytest.raises(ValueError, match=rf"0\.bias and {other} lie in the same memory"):
            fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
        reducer.detach()
        model[0].requires_grad_(False)
        model[2].bias.requires_grad_(False)  # then nothing is moved
        fastcomm.ShardedOptimizer(reducer.attach(model), torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_ranks_that_disagree(comm):
    model, reducer, _ = attached(comm)
    lr = 0.1 + comm.rank / 2**20
    for tried in (lr, torch.tensor(lr)):
        with pytest.raises(MismatchError, match=r"different optimizers: lr of group 0 is 0\.1"):
            fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=tried)
    parameters = list(model.parameters())[:: 1 - 2 * comm.rank]
    with pytest.raises(MismatchError, match=r"place of parameter 0\.weight is group 0, index 0 on"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, parameters, lr=0.1)
    with pytest.raises(MismatchError, match=r"rank 0 calls ShardedOptimizer\(\), and rank 1 calls"):
        if comm.rank:
            fastcomm.Reducer(comm).attach(mlp())
        else:
            fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    with pytest.raises((FastcommError, ValueError), match="Invalid learning rate"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1 if comm.rank else -1.0)


@every_transport
@on_ranks(2)
def test_new_layers_in_another_order_are_an_error_on_all_ranks(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    pair.train()
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pair.models[0].extend(copy.deepcopy(layers))
    pair.models[1].extend(layers)
    groups = [{"params": list(layer.parameters())} for layer in layers]
    for group in groups if comm.rank == 0 else groups[::-1]:
        pair.sharded.add_param_group(group)
    match = r"place of parameter 5\.weight is group 1, index 0 on rank 0 and group 2, index 0"
    for _ in range(2):
        with pytest.raises(MismatchError, match=match):
            pair.reducers[1].refresh()
    pair.sharded.param_groups[1:] = groups
    pair.reducers[0].refresh()
    pair.reducers[1].refresh()
    for layer in pair.models[0][-2:]:
        pair.plain.add_param_group({"params": list(layer.parameters())})
    pair.train(first=STEPS)


@on_ranks(2)
def test_groups_that_one_rank_has_reordered_are_an_error_on_all_ranks(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    optimizer = pair.sharded
    whole, part = copy.deepcopy((optimizer.full_state_dict(), optimizer.state_dict()))
    group = optimizer.param_groups[0]
    if comm.rank == 1:
        group["params"][2:] = group["params"][:1:-1]
    for call in (
        optimizer.full_state_dict,
        lambda: optimizer.load_state_dict(whole),
        lambda: optimizer.load_state_dict(part),
        lambda: pair.reducers[1].check_in_sync(optimizer),
    ):
        with pytest.raises(MismatchError, match=r"parameter 2\.weight is group 0, index 2 on"):
            call()


@on_ranks(2)
def test_check_in_sync_of_another_object_on_one_rank_is_an_error_on_all(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    elsewhere = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    plain = torch.optim.SGD(pair.models[1].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 1.0)
    for other in (plain, elsewhere.sharded, None, scheduler):
        with pytest.raises(
            (FastcommError, AttributeError), match=r"optimizer is .* on rank|param_grou"
        ):
            pair.reducers[1].check_in_sync(pair.sharded if comm.rank == 0 else other)
        comm.barrier()  # both have come here


@on_ranks(2)
def test_options_that_are_objects(comm):
    class Decaying(torch.optim.SGD):
        def __init__(self, params, lr, decay):
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group["decay"] = decay

    Pair(comm, mlp(), Decaying, {"lr": 0.1, "decay": lambda step: 1.0}).train()


@on_ranks(2)
def test_a_refresh_with_a_parameter_that_one_rank_gives_to_no_group(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    pair.train()
    more = nn.Linear(4, 4, bias=False)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        model.add_module("more", copy.deepcopy(more))
        if optimizer is pair.plain or comm.rank == 0:
            optimizer.add_param_group({"params": [model.more.weight], "lr": 0.1})
    pair.reducers[0].refresh()
    with pytest.raises(
        FastcommError if comm.rank == 0 else ValueError,
        match=r"parameter more\.weight is in no group of the ShardedOptimizer",
    ):
        pair.reducers[1].refresh()
    with pytest.raises(FastcommError, match=r"refresh\(\) failed: call it again"):
        backward(pair.models[1], comm.rank)
    pair.models[1].zero_grad()
    if comm.rank == 1:
        pair.sharded.add_param_group({"params": [pair.models[1].more.weight], "lr": 0.1})
    pair.reducers[1].refresh()
    pair.train(first=STEPS)
