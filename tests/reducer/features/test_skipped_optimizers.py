"""What optimizers, schedulers and GradScaler do in steps that all ranks drop: nothing."""

from __future__ import annotations

import copy

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
from tests.support.models import Heads, attached, backward, loss_of, mlp
from tests.support.ranks import on_ranks
from tests.support.sharded_pairs import Pair
from tests.support.skips import INF, NAN, Trainee, spoil

pytestmark = pytest.mark.usefixtures("transport")
only_shm = pytest.mark.transports("shm")

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.Adafactor, {"lr": 0.1}),
    (torch.optim.Rprop, {}),
]


@only_shm
@on_ranks(2)
def test_no_optimizer_of_torch_changes_anything(comm):
    for kind, defaults in OPTIMIZERS:
        trainee = Trainee(comm)
        trainee.optimizer = kind(trainee.model.parameters(), **defaults)
        for i in range(3):
            changed = trainee.train(i, spoil if i == 1 else None)
            assert changed == (i != 1), kind
        trainee.reducer.detach()


class Decaying(torch.optim.Optimizer):
    """Changes parameters without a gradient, too, and itself."""

    n_steps = 0

    def step(self, closure=None):
        self.n_steps += 1
        for group in self.param_groups:
            group["lr"] *= 0.5
            for parameter in group["params"]:
                parameter.data.mul_(1 - group["lr"])


class Halving(Decaying):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})


@only_shm
@on_ranks(2)
def test_an_optimizer_that_decays_without_gradients_does_not(comm):
    trainee = Trainee(comm, optimizer=lambda parameters, lr: Decaying(parameters, {"lr": lr}))
    assert not trainee.train(0, spoil)
    assert (trainee.optimizer.n_steps, trainee.optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert trainee.train(1)
    assert (trainee.optimizer.n_steps, trainee.optimizer.param_groups[0]["lr"]) == (1, 0.05)
    model, reducer, _ = attached(comm, skip_nonfinite=True)
    optimizer = fastcomm.ShardedOptimizer(reducer, Halving, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    (loss_of(model, comm.rank) + spoil(model)).backward()
    optimizer.step()
    assert reducer.skipped and all(map(torch.equal, before, model.parameters()))


@only_shm
@on_ranks(2)
def test_what_a_closure_finds_is_skipped(comm):
    trainee = Trainee(comm)
    for i in range(4):
        before = trainee.snapshot()

        def closure(i=i):
            trainee.optimizer.zero_grad()
            poison = spoil(trainee.model) if comm.rank and i in (1, 2) else 0
            (loss_of(trainee.model, comm.rank, i) + poison).backward()
            return i

        given = {"closure": closure} if i % 2 else closure
        loss = trainee.optimizer.step(**given) if i % 2 else trainee.optimizer.step(given)
        assert loss == i
        unchanged = trainee.snapshot() == before
        assert unchanged == trainee.reducer.skipped == (i in (1, 2))


@only_shm
@on_ranks(2)
def test_a_step_of_lbfgs_cannot_be_skipped(comm):
    trainee = Trainee(comm, optimizer=torch.optim.LBFGS)

    def closure():
        trainee.optimizer.zero_grad()
        loss = loss_of(trainee.model, comm.rank)
        (loss + (spoil(trainee.model) if comm.rank else 0)).backward()
        return loss

    with pytest.raises(FastcommError, match="LBFGS"):
        trainee.optimizer.step(closure)


@only_shm
@pytest.mark.parametrize("with_closure", [False, True], ids=["plain", "closure"])
@on_ranks(2)
def test_an_optimizer_of_two_models_skips_for_either(comm, with_closure):
    models = [mlp(), Heads()]
    reducers = [fastcomm.Reducer(comm, skip_nonfinite=True).attach(model) for model in models]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    for i in range(3):
        before = [copy.deepcopy(model.state_dict()) for model in models]

        def compute_gradients(i=i):
            backward(models[0], comm.rank, i)
            poison = models[1].trunk.bias[0] * NAN if i == 1 and comm.rank else 0
            (loss_of(models[1], comm.rank, i, 0) + poison).backward()

        if with_closure:
            optimizer.step(compute_gradients)
        else:
            compute_gradients()
            optimizer.step()
        optimizer.zero_grad()
        for model, state in zip(models, before, strict=True):
            same = all(torch.equal(state[name], p) for name, p in model.state_dict().items())
            assert same == (i == 1)
        assert [reducer.skipped for reducer in reducers] == [False, i == 1]


@on_ranks(2)
def test_a_model_of_two_goes_on_though_the_other_one_has_dropped_its_last_round(comm):
    models = [mlp(), Heads()]
    reducers = [fastcomm.Reducer(comm, skip_nonfinite=True).attach(model) for model in models]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    for i in range(4):
        before = copy.deepcopy(models[0].state_dict())
        backward(models[0], comm.rank, i)
        if i in (0, 2):
            if comm.rank:
                reducers[1].skip_step()
            loss_of(models[1], comm.rank, i, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        same = all(torch.equal(before[name], p) for name, p in models[0].state_dict().items())
        assert same == (i in (0, 2))
    for reducer in reducers:
        reducer.check_in_sync(optimizer)


@pytest.mark.transports("shm", "nccl")
@pytest.mark.parametrize("keep_gradients", [False, True])
@on_ranks(2)
def test_a_sharded_optimizer_skips(comm, keep_gradients):
    pair = Pair(
        comm,
        mlp(),
        torch.optim.AdamW,
        {"lr": 0.1},
        sharding={"keep_gradients": keep_gradients},
        bucket_cap_mb=0.001,
        skip_nonfinite=True,
    )
    for i in range(5):
        before = [p.detach().clone() for p in pair.models[1].parameters()]
        for model, reducer, optimizer in zip(
            pair.models, pair.reducers, pair.optimizers, strict=True
        ):
            optimizer.zero_grad()
            if i == 3 and comm.rank:
                reducer.skip_step()
            else:
                poison = model[0].weight[0, 0] * NAN if i == 1 and comm.rank else 0
                (loss_of(model, comm.rank, i) + poison).backward()
                if i == 4:
                    with pytest.raises(FastcommError, match="too late"):
                        reducer.skip_step()
            reducer.clip_grad_norm_(1e6)
            optimizer.step()
            assert reducer.skipped == (i in (1, 3))
        same = all(map(torch.equal, before, pair.models[1].parameters()))
        assert same == (i in (1, 3))
        pair.check()


@pytest.mark.transports("shm", "nccl")
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_a_grad_scaler_is_left_out_of_a_dropped_step(comm, unscales, sharded):
    model, reducer, _ = attached(comm, skip_nonfinite=True)
    if sharded:
        optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1, keep_gradients=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for i in range(4):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        loss = scaler.scale(loss_of(model, comm.rank, i))
        if i == 2 and comm.rank:
            reducer.skip_step()
            reducer.synchronize()
        else:
            (loss + (spoil(model, INF) if i == 1 and comm.rank else 0)).backward()
        assert reducer.skipped == (i in (1, 2))
        if reducer.skipped:
            hasty = torch.amp.GradScaler("cpu")
            hasty.scale(torch.ones(()))
            with pytest.raises(AssertionError, match="No inf checks were recorded"):
                hasty.step(optimizer)
        else:
            if unscales:
                scaler.unscale_(optimizer)
                reducer.clip_grad_norm_(1e6)
            scaler.step(optimizer)
            scaler.update()
        assert all(map(torch.equal, before, model.parameters())) == (i in (1, 2))
    assert scaler.get_scale() == 16.0  # after two steps that count
