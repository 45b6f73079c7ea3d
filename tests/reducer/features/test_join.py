"""Reducer.join(): ranks with different numbers of batches train to the end, as one process would
that averages over those with data.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError
from tests.support.models import SMALL_BUCKETS, attached
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT, over
from tests.support.uneven import ANNOUNCING, LR, data_of, loss_of, small

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]
only_shm = pytest.mark.transports("shm")
announcing = pytest.mark.transports(*ANNOUNCING)


@dataclass(frozen=True)
class Plan:
    """counts: by epoch, how many batches each rank has. every: batches that make one step. critic:
    how many of them there are for one of a second model; 0: there is none. early: batches that a
    rank has beyond its count when it breaks out of the loop.
    """

    counts: tuple[tuple[int, ...], ...]
    is_loop: bool = False
    every: int = 1
    critic: int = 0
    is_weighted: bool = False
    early: tuple[int, ...] = ()

    def steps_of(self, number, rank, epoch):
        """The batches of each step of a model: the second one's are single ones."""
        batches = range(self.counts[epoch][rank])
        if number:
            return [[i] for i in batches if i % self.critic == self.critic - 1]
        return [list(batches[i : i + self.every]) for i in batches[:: self.every]]

    def n_steps(self, number):
        """Of a model on every rank: as many as the rank with most data makes."""
        ranks, epochs = range(len(self.counts[0])), range(len(self.counts))
        return sum(max(len(self.steps_of(number, r, e)) for r in ranks) for e in epochs)


def run(comm, plan, **options):
    """Trains by the plan; returns the models and what is counted."""
    models = [small(number) for number in range(2 if plan.critic else 1)]
    reducers = [fastcomm.Reducer(comm, **options).attach(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    for counts in plan.counts:
        n = counts[comm.rank]
        early = plan.early[comm.rank] if plan.early else 0
        batches = range(n + early)
        with reducers[0].join(batches if plan.is_loop else None) as given:
            for i in given if plan.is_loop else batches:
                if i == n:
                    break
                one_batch(plan, i, n, models, reducers, optimizers)
        assert reducers[0].data_exhausted == (early == 0 or not plan.is_loop)
    return models, reducers


def one_batch(plan, i, n, models, reducers, optimizers):
    x = data_of(reducers[0].comm.rank, i)
    is_last = i % plan.every == plan.every - 1 or i == n - 1
    if plan.is_weighted:
        reducers[0].set_weight(len(x))
    with contextlib.nullcontext() if is_last else reducers[0].no_sync():
        loss_of(models[0], x).backward()
    if is_last:
        optimizers[0].step()
        optimizers[0].zero_grad()
    if plan.critic and i % plan.critic == plan.critic - 1:
        loss_of(models[1], x).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()


def alone(plan, number=0):
    """One process, that averages over the ranks with data."""
    model = small(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for epoch, counts in enumerate(plan.counts):
        ranks = [plan.steps_of(number, rank, epoch) for rank in range(len(counts))]
        for step in range(max(map(len, ranks))):
            optimizer.zero_grad()
            parts = [
                [data_of(rank, i) for i in steps[step]]
                for rank, steps in enumerate(ranks)
                if step < len(steps)
            ]
            if plan.is_weighted and not number:
                loss_of(model, torch.cat(list(itertools.chain(*parts)))).backward()
            else:
                losses = [sum(loss_of(model, x) for x in part) for part in parts]
                (sum(losses) / len(losses)).backward()
            optimizer.step()
    return model


def check(comm, plan, **options):
    """Rank 0 compares with one process alone; the others need the bits of rank 0."""
    models, reducers = run(comm, plan, **options)
    for number, (model, reducer) in enumerate(zip(models, reducers, strict=True)):
        assert reducer.n_rounds == reducer.core.steps.n == plan.n_steps(number), plan
        expected = alone(plan, number) if comm.rank == 0 else model
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda m: f"{plan}: {m}")
        reducer.check_in_sync()
        reducer.detach()


def drawn(world_size, number):
    """A plan, the same on all ranks."""
    draw = random.Random(number)
    epochs = draw.choice((1, 1, 2, 3))
    longest = draw.choice((1, 3, 7))
    counts = tuple(
        tuple(draw.choice((0, draw.randint(0, longest), longest)) for _ in range(world_size))
        for _ in range(epochs)
    )
    # Not both: ranks that end differently would reduce for the two models in different orders.
    every, critic = draw.choice(((1, 0), (2, 0), (3, 0), (1, 1), (1, 3)))
    plan = Plan(counts, draw.random() < 0.5, every, critic)
    if draw.random() < 0.3:
        plan = replace(plan, is_weighted=True)
    if draw.random() < 0.3:
        plan = replace(plan, early=tuple(draw.choice((0, 1, 5)) for _ in range(world_size)))
    return plan


@over(2, shm=(2, 3, 4), nccl=(2, 3))
def test_random_plans(ranks, transport, world_size):
    ranks(world_size, check_drawn, 20 if transport == "shm" else 10)


def check_drawn(comm, n):
    for number in range(n):
        check(comm, drawn(comm.world_size, number), **(SMALL_BUCKETS if number % 2 else {}))


# What all ranks have in the end


@on_ranks(2)
def test_buffers_become_those_of_the_rank_that_went_furthest(comm):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    mean = None
    for counts in ((2, 5), (4, 1), (3, 3)):
        with reducer.join():
            for _ in range(counts[comm.rank]):
                model(torch.randn(6, 4) + comm.rank).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        furthest = counts.index(max(counts))
        if comm.rank == furthest:
            mean = model[1].running_mean.clone()
        reducer.check_in_sync()
        if comm.rank == furthest:
            assert torch.equal(model[1].running_mean, mean)


def epoch(reducer, model, optimizer, n, scheduler=None, **options):
    with reducer.join(**options):
        for i in range(n):
            optimizer.zero_grad()
            loss_of(model, data_of(reducer.comm.rank, i)).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


@on_ranks(2)
def test_state_goes_to_the_ranks_that_have_ended_earlier(comm):
    model, reducer, _ = attached(comm, small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = [optimizer, scheduler]
    for counts in ((2, 5), (3, 0), (2, 2)):
        epoch(reducer, model, optimizer, counts[comm.rank], scheduler, state=state)
        reducer.check_in_sync(optimizer)
    assert scheduler.last_epoch == 10
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**10)


@on_ranks(2)
def test_an_optimizer_whose_state_has_fallen_behind_does_not_step(comm):
    model, reducer, _ = attached(comm, small())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    epoch(reducer, model, optimizer, 3)
    epoch(reducer, model, optimizer, 2 + comm.rank)
    reducer.check_in_sync()
    loss_of(model, data_of(comm.rank, 0)).backward()
    with pytest.raises(FastcommError, match=r"rank 0: 5, rank 1: 6.*SGD keeps state from step"):
        optimizer.step()
    reducer.refresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    epoch(reducer, model, optimizer, 2 + comm.rank, state=[optimizer])
    epoch(reducer, model, optimizer, 3)
    reducer.check_in_sync(optimizer)


def scaled_epoch(reducer, model, optimizer, scaler, n_batches, state):
    with reducer.join(range(n_batches), state=state) as batches:
        for i in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, data_of(reducer.comm.rank, i))).backward()
            scaler.step(optimizer)
            scaler.update()


@only_shm
@on_ranks(2)
def test_a_sharded_optimizer_is_refused_and_goes_with_weights_of_0(comm):
    model, alone = small(), small()
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.01)
    with pytest.raises(ValueError, match=r"let a rank without data set_weight\(0\) and reduce"):
        reducer.join()
    of_all = torch.optim.AdamW(alone.parameters(), lr=0.01)
    counts = (1, 3)
    for i in range(max(counts)):
        has_data = i < counts[comm.rank]
        reducer.set_weight(int(has_data))
        if has_data:
            loss_of(model, data_of(comm.rank, i)).backward()
        else:
            reducer.reduce()
        optimizer.step()
        optimizer.zero_grad()
        losses = [loss_of(alone, data_of(rank, i)) for rank in range(2) if i < counts[rank]]
        torch.stack(losses).mean().backward()
        of_all.step()
        of_all.zero_grad()
    reducer.check_in_sync(optimizer)
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@only_shm
@on_ranks(2)
def test_a_grad_scaler_that_has_fallen_behind_is_found_after_the_next_step(comm):
    model, reducer, _ = attached(comm, small())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    scaled_epoch(reducer, model, optimizer, scaler, 2 + 3 * comm.rank, [optimizer, scaler])
    assert scaler.get_scale() == 8.0
    scaled_epoch(reducer, model, optimizer, scaler, 2 + 3 * comm.rank, [optimizer])
    scaler.scale(loss_of(model, data_of(comm.rank, 0))).backward()
    scaler.step(optimizer)
    with pytest.raises(fastcomm.MismatchError, match="have not stepped alike"):
        loss_of(model, data_of(comm.rank, 0)).backward()


@only_shm
@pytest.mark.parametrize("counts", [(2, 4), (0, 3)], ids=str)
@on_ranks(2)
def test_a_learning_rate_that_has_fallen_behind_is_found(comm, counts):
    """A scheduler does not load its optimizer's, and a rank that has made no step does not know
    the optimizer.
    """
    for given in ([], ["scheduler"], ["optimizer", "scaler"], ["optimizer", "scheduler"]):
        model = small()
        reducer = fastcomm.Reducer(comm).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        kept = {"optimizer": optimizer, "scheduler": scheduler, "scaler": GradScaler("cpu")}
        state = [kept[name] for name in given]
        epoch(reducer, model, optimizer, counts[comm.rank], scheduler, state=state)
        loss_of(model, data_of(comm.rank, 0)).backward()
        if given == ["optimizer", "scheduler"]:
            optimizer.step()
            reducer.check_in_sync(optimizer)
            continue
        with pytest.raises(FastcommError, match="the options of SGD differ now"):
            optimizer.step()


@on_ranks(2)
def test_gradients_of_different_steps_are_dropped(comm):
    model, reducer, _ = attached(comm, small())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    epoch(reducer, model, optimizer, 2)
    kept = [p.grad.clone() for p in model.parameters()]
    epoch(reducer, model, optimizer, 0)
    assert all(map(torch.equal, kept, (p.grad for p in model.parameters())))
    epoch(reducer, model, optimizer, comm.rank)
    assert [p.grad for p in model.parameters()] == [None] * len(kept)


# What it goes with


@announcing
@on_ranks(2)
def test_blocks_of_several_reducers_are_one(comm):
    models = [small(0), small(1)]
    reducers = [fastcomm.Reducer(comm).attach(model) for model in models]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    n_batches, of_first, of_second = 2 + 3 * comm.rank, optimizers[:1], optimizers[1:]
    with (
        reducers[0].join(state=of_first),
        reducers[1].join(range(n_batches), state=of_second) as batches,
    ):
        for i in batches:
            x = data_of(comm.rank, i)
            loss_of(models[1], models[0](x).repeat(1, 2)).backward()  # of both at once
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [reducer.data_exhausted for reducer in reducers] == [True, True]
    for reducer, optimizer in zip(reducers, optimizers, strict=True):
        reducer.check_in_sync(optimizer)


@announcing
@on_ranks(3)
def test_a_step_that_was_abandoned_is_no_end(comm):
    model, reducer, _ = attached(comm, small())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    n_skipped = 0
    with reducer.join(range(2 + 2 * comm.rank)) as batches:
        for i in batches:
            try:
                if comm.rank == 2 and i in (1, 4):
                    raise ValueError("a bad batch")
                loss_of(model, data_of(comm.rank, i)).backward()
            except (ValueError, AbandonedError):
                comm.abandon()
                n_skipped += 1
            else:
                optimizer.step()
            optimizer.zero_grad()
    assert n_skipped == (1, 1, 2)[comm.rank]
    assert reducer.n_rounds == 4
    reducer.check_in_sync()


@on_ranks(2)
def test_a_wire_dtype(comm):
    in_blocks = [torch.int8] if torch.int8 in comm.wire_dtypes else []
    for wire_dtype in (None, torch.bfloat16, *in_blocks):
        torch.manual_seed(0)
        model = nn.Linear(60, 80)  # a gradient that shared memory reads where it is
        reducer = fastcomm.Reducer(comm, wire_dtype=wire_dtype, **SMALL_BUCKETS).attach(model)
        with reducer.join():
            for i in range(1 + 2 * comm.rank):
                model.zero_grad()
                slope = 1.0 + i if i else float("nan")  # which is left in the buckets
                (model.weight * slope).sum().backward()
                expected = torch.full_like(model.weight, slope)
                torch.testing.assert_close(
                    model.weight.grad, expected, rtol=0.01, atol=0, equal_nan=True
                )
        reducer.detach()


@only_shm
@on_ranks(3)
def test_a_balanced_step_is_that_without_join(comm):
    found = []
    for is_joined in (False, True):
        model = small().float()
        reducer = fastcomm.Reducer(comm).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        numbers = [count_collectives(comm)]
        with reducer.join() if is_joined else contextlib.nullcontext():
            for i in range(3):
                loss_of(model, data_of(comm.rank, i).float()).backward()
                optimizer.step()
            numbers.append(count_collectives(comm))
        found.append((numbers[1] - numbers[0], [p.detach() for p in model.parameters()]))
        reducer.detach()
    (n, before), (n_joined, after) = found
    assert n_joined == n
    assert all(map(torch.equal, before, after))


def count_collectives(comm):
    """How many there were so far on the communicator."""
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(torch.zeros(1 + comm.rank))
    return int(re.search(r"number (\d+)", str(caught.value))[1])


@announcing
@on_ranks(2)
def test_a_weight_for_a_batch_that_has_not_come_is_forgotten(comm):
    """Else the next step would be a mismatch: only one rank has set it."""
    model, reducer, _ = attached(comm, small(0))
    with reducer.join([1, 2]) as batches:
        for n in batches:
            reducer.set_weight(n)
            loss_of(model, data_of(comm.rank, n)).backward()
            model.zero_grad()
        if comm.rank == 1:
            reducer.set_weight(3)
    loss_of(model, data_of(comm.rank, 3)).backward()
    reducer.check_in_sync()
