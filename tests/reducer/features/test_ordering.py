"""Buckets that are planned again in the order in which gradients arrive: over a network."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.reducer import plan
from fastcomm.reducer.round import Round
from tests.support.bodies import Interrupted
from tests.support.models import assert_gradients, attached, backward, mean_gradients, seed
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


SMALL_BUCKETS = {"bucket_cap_mb": 0.0001}  # for each layer one
AS_REGISTERED = ["norm", "middle", "first", "last"]  # in the reverse of it
AS_ARRIVED = ["last", "middle", "norm", "first"]


def layers_in(reducer):
    """In the order of the buckets."""
    names = [name.partition(".")[0] for bucket in reducer.core.buckets for name in bucket.names]
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
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    layers = check_steps(comm, reducer, model, 5)
    if comm.world_size == 1:  # nothing travels
        assert layers == [AS_REGISTERED] * 6
    else:
        assert layers == [AS_REGISTERED] * 2 + [AS_ARRIVED] * 4
        assert "by arrival" in repr(reducer)


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
def test_ranks_in_a_join_wait_until_it_is_over(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    with reducer.join(range(3 + comm.rank)) as numbers:
        for number in numbers:
            backward(model, comm.rank, number)
            assert layers_in(reducer) == AS_REGISTERED
    backward(model, comm.rank)
    assert layers_in(reducer) == AS_ARRIVED


@over_a_network
@on_ranks(2)
def test_a_long_join_is_not_traced_for_ever(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    n = plan.TRACED_ROUNDS + plan._PATIENCE_ROUNDS
    with reducer.join(range(n + comm.rank)) as numbers:
        for number in numbers:
            assert (reducer.core.recorder is None) == (number >= n)
            backward(model, comm.rank, number)
    backward(model, comm.rank)
    assert layers_in(reducer) == AS_REGISTERED


@over_a_network
@on_ranks(2)
def test_where_the_round_that_decides_is_skipped_the_next_one_does(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    for number in range(4):
        if number == 1 and comm.rank == 1:
            reducer.skip_step()
        backward(model, comm.rank, number)
        model.zero_grad()
        assert layers_in(reducer) == (AS_REGISTERED if number < 2 else AS_ARRIVED)


@over_a_network
@on_ranks(2)
def test_a_rank_that_is_interrupted_takes_part_in_the_decision(comm):
    """A signal comes while rank 1 waits for the last bucket of the round that decides."""
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    backward(model, comm.rank, 0)
    advance = Round.advance

    def interrupted(round, *, is_end=False):
        advance(round, is_end=is_end)
        if is_end:
            raise Interrupted

    with contextlib.ExitStack() as stack:
        if comm.rank == 1:
            stack.enter_context(mock.patch.object(Round, "advance", interrupted))
            stack.enter_context(pytest.raises(Interrupted))
        backward(model, comm.rank, 1)
    layers = check_steps(comm, reducer, model, 2)
    assert layers == [AS_REGISTERED] + [AS_ARRIVED] * 2  # with the round behind it


def _with_error_feedback(comm, model):
    options = {"wire_dtype": torch.bfloat16, "error_feedback": True}
    return fastcomm.Reducer(comm, **options, **SMALL_BUCKETS).attach(model)


def _with_sparse_gradients(comm, model):
    model.table = nn.Embedding(5, 8, sparse=True)
    return fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)


@pytest.mark.parametrize(
    "attach", [_with_error_feedback, _with_sparse_gradients], ids=lambda f: f.__name__
)
@over_a_network
@on_ranks(2)
def test_who_keeps_something_of_each_bucket_keeps_the_buckets(comm, attach):
    model = Shuffled()
    reducer = attach(comm, model)
    before = [bucket.names for bucket in reducer.core.buckets]
    for number in range(4):
        backward(model, comm.rank, number)
        model.zero_grad()
    assert [bucket.names for bucket in reducer.core.buckets] == before


@over_a_network
@on_ranks(2)
def test_local_steps_keep_the_buckets(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with fastcomm.LocalSGD(reducer, every=1) as syncs:
        for number in range(3):
            backward(model, comm.rank, number)
            optimizer.step()
        assert syncs.n_syncs == 3 and layers_in(reducer) == AS_REGISTERED


@over_a_network
@on_ranks(2)
def test_an_elastic_loop_follows_the_arrival(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    for number in reducer.elastic(range(plan.TRACED_ROUNDS + 1)):
        backward(model, comm.rank, number)
        model.zero_grad()
    assert layers_in(reducer) == AS_ARRIVED


@over_a_network
@on_ranks(2)
def test_sizes_are_tuned_in_the_order_of_arrival(comm):
    model = Shuffled()
    window = plan.WARM_UP_ROUNDS + plan.MEASURED_ROUNDS
    small_mb = SMALL_BUCKETS["bucket_cap_mb"]
    with mock.patch.multiple(plan, CAPS_MB=(0.0005,), NETWORK_CAP_MB=small_mb):
        reducer = fastcomm.Reducer(comm, bucket_cap_mb="auto").attach(model)
        for number in range(plan.TRACED_ROUNDS + 3 * window):
            assert "so far" in repr(reducer)
            assert (reducer.core.recorder is None) == (number >= plan.TRACED_ROUNDS)
            backward(model, comm.rank, number)
            model.zero_grad()
    assert "so far" not in repr(reducer) and layers_in(reducer) == AS_ARRIVED


@pytest.mark.transports("shm")
@on_ranks(2)
def test_over_shared_memory_buckets_stay_as_they_are(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    assert check_steps(comm, reducer, model, 4) == [AS_REGISTERED] * 5


@over_a_network
@on_ranks(2)
def test_after_a_refresh_the_parameters_that_are_left_are_traced_again(comm):
    model, reducer, _ = attached(comm, Shuffled(), **SMALL_BUCKETS)
    check_steps(comm, reducer, model, 1)
    for parameter in model.middle.parameters():
        parameter.requires_grad_(False)
    reducer.refresh()
    layers = check_steps(comm, reducer, model, 3)
    without = [[one for one in all_ if one != "middle"] for all_ in (AS_REGISTERED, AS_ARRIVED)]
    assert layers == without[:1] * 2 + without[1:] * 2
