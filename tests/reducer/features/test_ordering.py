"""Buckets that are planned anew in the order in which gradients arrive: over a network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.comm.objects import gather_objects
from tests.support.models import (
    SMALL_BUCKETS,
    assert_gradients,
    backward,
    mean_gradients,
    seed,
)
from tests.support.ranks import on_ranks
from tests.support.transports import TRANSPORTS_OVER_TORCH

pytestmark = [pytest.mark.usefixtures("transport")]
over_a_network = pytest.mark.transports(*TRANSPORTS_OVER_TORCH)


class Shuffled(nn.Module):
    """Layers are used in another order than the one in which they are registered.

    turns: two of them change places in every second forward.
    """

    def __init__(self, *, turns: bool = False) -> None:
        super().__init__()
        seed(0)
        self.last, self.first = nn.Linear(16, 4), nn.Linear(8, 16)
        self.middle, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.n_forwards, self.turns = 0, turns

    def forward(self, x):
        self.n_forwards += 1
        x = torch.tanh(self.first(x))
        parts = [self.norm, self.middle]
        for part in reversed(parts) if self.turns and self.n_forwards % 2 else parts:
            x = torch.tanh(part(x))
        return self.last(x)


AS_REGISTERED = ["norm", "middle", "first", "last"]  # in the reverse of it
AS_ARRIVED = ["last", "middle", "norm", "first"]


def layers_in(reducer):
    """In the order of the buckets."""
    names = [name.partition(".")[0] for bucket in reducer.buckets for name in bucket.names]
    assert names[::2] == names[1::2]
    return names[::2]


def check_steps(comm, reducer, model, n):
    """Makes steps. Returns the layers as they lie in the buckets at first and after each step."""
    found = [layers_in(reducer)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(n):
        model.zero_grad()
        expected = mean_gradients(
            model, comm.world_size, lambda replica, rank, step=number: backward(replica, rank, step)
        )
        backward(model, comm.rank, number)
        found.append(layers_in(reducer))
        assert_gradients(model, expected)
        optimizer.step()
    return found


@over_a_network
@on_ranks(1, 2, 3)
def test_buckets_follow_the_arrival_of_gradients_after_two_rounds(comm):
    model = Shuffled()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    layers = check_steps(comm, reducer, model, 5)
    if comm.world_size == 1:  # nothing travels
        assert layers == [AS_REGISTERED] * 6
    else:
        assert layers == [AS_REGISTERED] * 2 + [AS_ARRIVED] * 4
        assert "by arrival" in repr(reducer)


@over_a_network
@on_ranks(2)
def test_another_model_is_traced_anew(comm):
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS)
    for _ in range(2):
        model = Shuffled()
        reducer.attach(model)
        assert check_steps(comm, reducer, model, 3) == [AS_REGISTERED] * 2 + [AS_ARRIVED] * 2
        reducer.detach()


@pytest.mark.parametrize("differs", ["from round to round", "from rank to rank"])
@over_a_network
@on_ranks(2)
def test_graphs_that_differ_leave_the_buckets_alone(comm, differs):
    model = Shuffled(turns=differs == "from round to round")
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    for number in range(4):
        if differs == "from rank to rank":
            model.turns, model.n_forwards = comm.rank == 1, 0
        backward(model, comm.rank, number)
        assert layers_in(reducer) == AS_REGISTERED


@over_a_network
@on_ranks(2)
def test_a_sharded_optimizer_keeps_the_buckets_it_has(comm):
    model = Shuffled()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    for number in range(4):
        backward(model, comm.rank, number)
        optimizer.step()
        assert layers_in(reducer) == AS_REGISTERED


@over_a_network
@on_ranks(2)
def test_ranks_in_a_join_wait_until_it_is_over(comm):
    model = Shuffled()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    with reducer.join(range(3 + comm.rank)) as numbers:
        for number in numbers:
            backward(model, comm.rank, number)
            assert layers_in(reducer) == AS_REGISTERED
    backward(model, comm.rank)
    on_all_ranks = gather_objects(comm, layers_in(reducer), "a test")
    assert on_all_ranks[0] == on_all_ranks[1]


@pytest.mark.transports("shm")
@on_ranks(2)
def test_over_shared_memory_buckets_stay_as_they_are(comm):
    model = Shuffled()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    assert check_steps(comm, reducer, model, 4) == [AS_REGISTERED] * 5


@over_a_network
@on_ranks(2)
def test_after_a_refresh_the_parameters_that_are_left_are_traced_anew(comm):
    model = Shuffled()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    check_steps(comm, reducer, model, 1)
    for parameter in model.middle.parameters():
        parameter.requires_grad_(False)
    reducer.refresh()
    layers = check_steps(comm, reducer, model, 3)
    without = [[one for one in all_ if one != "middle"] for all_ in (AS_REGISTERED, AS_ARRIVED)]
    assert layers == without[:1] * 2 + without[1:] * 2
