"""ShardedOptimizer: the parameters are those of the plain optimizer, whatever the loop does, and
what it cannot do is refused.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError
from fastcomm.communicator import Communicator
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
from tests.support.transports import EVERY_TRANSPORT

pytestmark = pytest.mark.usefixtures("transport")
every_transport = pytest.mark.transports(*EVERY_TRANSPORT)

STEPS = 3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Lion(torch.optim.Optimizer):
    """As users write their own: fastcomm knows nothing of it."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(average.mul(group["beta"]).add(p.grad).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["beta"])


class Pair:
    """A model with a plain optimizer and its copy with a sharded one, each with a reducer."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
        sharding: dict[str, Any] | None = None,
        **reducing: Any,
    ) -> None:
        self.comm = comm
        self.models = [model, copy.deepcopy(model)]
        self.reducers = [fastcomm.Reducer(comm, **reducing).attach(m) for m in self.models]
        self.plain = kind(groups(self.models[0]), **options)
        self.sharded = fastcomm.ShardedOptimizer(
            self.reducers[1], kind, groups(self.models[1]), **(sharding or {}), **options
        )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.plain, self.sharded]

    def train(self, run: Callable[[nn.Module, int, int], None] = backward, first: int = 0) -> None:
        for step in range(first, first + STEPS):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                optimizer.zero_grad()
                run(model, self.comm.rank, step)
                optimizer.step()
            self.check()

    def check(self) -> None:
        """The parameters have the same bits."""
        for (name, mine), theirs in zip(
            self.models[1].named_parameters(), self.models[0].parameters(), strict=True
        ):
            assert torch.equal(mine, theirs), name
        self.reducers[1].sync_buffers()  # which are each rank's own
        self.reducers[1].check_in_sync(self.sharded)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_the_parameters_are_those_of_the_plain_optimizer(comm, name):
    kind, options = OPTIMIZERS[name]
    Pair(comm, mlp(), kind, options, bucket_cap_mb=0.001).train()


@every_transport
@on_ranks(3)
def test_on_every_transport(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)
    pair.train()
    assert all(p.grad is None for p in pair.models[1].parameters())


@on_ranks(4)
def test_a_rank_may_have_no_share(comm):
    model = nn.Linear(2, 3, bias=False)
    pair = Pair(comm, model, torch.optim.AdamW, {"lr": 0.01})

    def run(model, rank, step):
        (model.weight * (rank + step + 1.0)).sum().backward()

    pair.train(run)


@on_ranks(2)
def test_convolutions_and_buffers(comm, buckets):
    model = convnet().to(memory_format=torch.channels_last)
    pair = Pair(comm, model, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, **buckets)
    pair.train(image_backward)
    assert pair.models[1][0].weight.is_contiguous(memory_format=torch.channels_last)


@on_ranks(2)
def test_tied_parameters(comm, buckets):
    Pair(comm, Transformer(), torch.optim.AdamW, {"lr": 0.01}, **buckets).train(text_backward)


@on_ranks(2)
def test_an_optimizer_of_the_users_own_steps_whole_parameters(comm, buckets):
    Pair(comm, mlp(), Lion, {"lr": 0.01}, **buckets).train()


@on_ranks(2)
def test_an_elementwise_optimizer_of_the_users_own_may_be_cut(comm, buckets):
    Pair(comm, mlp(), Lion, {"lr": 0.01}, sharding={"elementwise": True}, **buckets).train()


@on_ranks(2)
def test_muon_steps_matrices_whole(comm):
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))

    def run(model, rank, step):
        model(torch.full((2, 16), rank + step + 1.0)).square().sum().backward()

    Pair(comm, model, torch.optim.Muon, {"lr": 0.01}, bucket_cap_mb=0.001).train(run)


@on_ranks(2)
def test_gradients_in_another_dtype_on_the_wire(comm, buckets):
    Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, wire_dtype=torch.bfloat16, **buckets).train()


@on_ranks(2)
def test_parameters_of_several_dtypes(comm):
    model = nn.Sequential(nn.Linear(8, 16).bfloat16(), nn.Linear(16, 4).double())

    def run(model, rank, step):
        x, y = batch(rank, step)
        hidden = model[0](x.bfloat16()).double()
        nn.functional.mse_loss(model[1](hidden), y.double()).backward()

    Pair(comm, model, torch.optim.AdamW, {"lr": 0.01}).train(run)


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
def test_frozen_parameters_and_refresh(comm, buckets):
    model = mlp()
    model[0].requires_grad_(False)
    pair = Pair(comm, model, torch.optim.AdamW, {"lr": 0.01}, **buckets)
    pair.train()
    for model, reducer in zip(pair.models, pair.reducers, strict=True):
        model[0].requires_grad_(True)
        model[4].requires_grad_(False)
        model.zero_grad()  # what a frozen parameter's .grad holds is stepped by plain optimizers
        reducer.refresh()
    pair.train(first=STEPS)


@on_ranks(2)
def test_a_group_for_parameters_that_were_added(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    pair.train()
    for model, reducer, optimizer in zip(pair.models, pair.reducers, pair.optimizers, strict=True):
        torch.manual_seed(1)
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.1})
        reducer.refresh()
    pair.train(first=STEPS)


@on_ranks(2)
def test_no_sync_accumulates(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)

    def run(model, rank, step):
        with pair.reducers[pair.models.index(model)].no_sync():
            backward(model, rank, step + 10)
        backward(model, rank, step)

    pair.train(run)


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

    pair.train(run)
    for mine, theirs in zip(*(m.parameters() for m in pair.models), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


# norms, clipping, GradScaler


@every_transport
@on_ranks(3)
def test_norm_clipping_and_counts_over_shares(comm):
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
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1}, bucket_cap_mb=0.001)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, comm.rank, step)
            if step == 3:  # in one element, so in one rank's share
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
def test_torch_clipping_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    backward(pair.models[1], comm.rank)
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(FastcommError, match="reducer.clip_grad_norm_"):
            clip(pair.models[1].parameters(), 1.0)
        backward(pair.models[0], comm.rank)
        clip(pair.models[0].parameters(), 1.0)


# checkpoints


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adafactor", "NAdam", "ASGD"])
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
    pair.sharded.load_full_state_dict(copy.deepcopy(theirs))
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
def test_a_ranks_own_state(comm, buckets):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01}, **buckets)
    pair.train()
    saved = copy.deepcopy(pair.sharded.state_dict())
    n_elements = sum(s["exp_avg"].numel() for s in saved["state"].values())
    n_parameters = sum(p.numel() for p in pair.models[1].parameters())
    assert n_elements < 0.6 * n_parameters
    pair.sharded.load_state_dict(saved)
    pair.train(first=STEPS)
    saved["fastcomm"] = (1 - comm.rank, *saved["fastcomm"][1:])
    with pytest.raises(ValueError, match=f"rank {1 - comm.rank} of 2.*full_state_dict"):
        pair.sharded.load_state_dict(saved)


@on_ranks(2)
def test_a_state_of_other_groups_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="other parameter groups"):
        pair.sharded.load_full_state_dict(other.state_dict())


# what goes wrong


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
    with pytest.raises(ValueError, match="has a ShardedOptimizer already"):
        fastcomm.ShardedOptimizer(pair.reducers[1], torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_after_the_optimizer_is_gone(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
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
def test_nothing_is_kept_alive(comm):
    import weakref

    pair = Pair(comm, mlp(), torch.optim.AdamW, {"lr": 0.01})
    pair.train()
    models = [weakref.ref(model[0]) for model in pair.models]
    del pair
    gc.collect()
    assert [model() for model in models] == [None, None]


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


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "LBFGS": (torch.optim.LBFGS, {}, "LBFGS looks at all parameters together"),
    "SparseAdam": (torch.optim.SparseAdam, {}, "sparse gradients"),
    "differentiable": (torch.optim.SGD, {"lr": 0.1, "differentiable": True}, "differentiable"),
    "bad option": (torch.optim.SGD, {"lr": -1.0}, "Invalid learning rate"),
    "no class": (torch.optim.SGD([torch.zeros(1)], lr=0.1), {}, "class of an optimizer"),
    "Muon": (torch.optim.Muon, {}, "2D"),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_cannot_be_sharded_is_refused(comm, what):
    kind, options, match = REFUSED[what]
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises((ValueError, TypeError), match=match):
        fastcomm.ShardedOptimizer(reducer, kind, **options)


@on_ranks(2)
def test_parameters_without_a_group_or_a_model_are_refused(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(ValueError, match=r"parameter 2\.weight is in no group"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, model[0].parameters(), lr=0.1)
    strange = [*model.parameters(), nn.Parameter(torch.zeros(3, 5))]
    with pytest.raises(ValueError, match=r"shape \(3, 5\) is not in the reducer's model"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, strange, lr=0.1)


@on_ranks(2)
def test_ranks_that_disagree(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(MismatchError, match="different reducers: groups"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1 * (1 + comm.rank))
    with pytest.raises((FastcommError, ValueError), match="Invalid learning rate"):
        fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1 if comm.rank else -1.0)


@on_ranks(2)
def test_create_graph_is_refused(comm):
    pair = Pair(comm, mlp(), torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(FastcommError, match="keep_gradients=True"):
        loss_of(pair.models[1], comm.rank).backward(create_graph=True)
