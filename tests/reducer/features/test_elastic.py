"""Reducer.elastic() and catch_up(): training that goes on when ranks are lost and others come."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import fastcomm
from fastcomm import FastcommError, PeerLostError
from fastcomm.reducer import plan
from fastcomm.reducer.core import Core
from fastcomm.reducer.features import elastic
from fastcomm.reducer.round import Round
from tests.support.bodies import Place, communicator, leave, note, noted, wait_for_note
from tests.support.models import attached
from tests.support.outcomes import Outcome, values_of
from tests.support.ranks import fresh_ranks
from tests.support.transports import EVERY_TRANSPORT, environment_of

over_every_transport = pytest.mark.parametrize("backend", EVERY_TRANSPORT)
over_two = pytest.mark.parametrize("backend", ["shm", "group"])
STEPS = 12
ROWS = 12  # of all ranks together in a step, which 1 to 4 ranks share out


def _run(
    backend: str, n: int, body: Any, *args: Any, of_hosts: Sequence[int] = ()
) -> list[Outcome]:
    """of_hosts: ranks, by process, on whose hosts these are; else on their own."""
    env = [environment_of(backend, rank) for rank in of_hosts or range(n)]
    return fresh_ranks(n, body, *args, transport=backend, env=env)


# ---- a training ----------------------------------------------------------------------------------


class Training:
    """Of a rank, which can begin where another has ended."""

    def __init__(self, place: Place, comm: Any, start: Any = None) -> None:
        torch.manual_seed(place.rank)  # attach() makes them equal
        self.place = place
        self.model = self.new_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        if start is not None:
            self.model.load_state_dict(start[0])
            self.optimizer.load_state_dict(start[1])
        caps = {"bucket_cap_mb": 1e-5}
        self.reducer = fastcomm.Reducer(comm, **caps).attach(self.model)
        self.sizes: list[int] = []  # of the world, by step
        self.last = STEPS
        self.misses_none = True  # of the steps, from the one on with which it begins

    def new_model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))

    def loop(self) -> Iterator[int]:
        """The number of the step that is to be made, each time, which is that of its batch."""
        for batch in self.reducer.elastic(self._batches(), state=[self.optimizer]):
            assert batch == self.reducer.n_rounds or not self.misses_none
            yield self.reducer.n_rounds

    def _batches(self) -> Iterator[int]:
        number = self.reducer.n_rounds
        while self.reducer.n_rounds < self.last:
            yield number
            number += 1

    def loss(self, step: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(step)
        data = torch.randn(ROWS, 6, generator=random, device="cpu").to(self.reducer.comm.device)
        own = data[self.reducer.comm.rank :: self.reducer.comm.world_size]
        return ((self.model(own) - own.sum(1, keepdim=True)) ** 2).mean()

    def make(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        if not self.reducer.skipped:
            self.sizes.append(self.reducer.comm.world_size)

    def shard(self) -> None:
        self.optimizer = fastcomm.ShardedOptimizer(self.reducer, torch.optim.Adam, lr=0.1)

    def end(self) -> tuple[list[int], Any, Any]:
        self.reducer.check_in_sync(self.optimizer)
        is_sharded = isinstance(self.optimizer, fastcomm.ShardedOptimizer)
        state_dict = self.optimizer.full_state_dict if is_sharded else self.optimizer.state_dict
        states = self.model.state_dict(), state_dict()
        return self.sizes, *tree_map_only(torch.Tensor, torch.Tensor.cpu, states)


def _train_some(place: Place, first: int, n: int, start: Any) -> Any:
    training = Training(place, communicator(place), start)
    for step in range(first, first + n):
        training.make(step)
    return training.end()[1:]


def _check_trajectory(backend: str, ends: list[Any]) -> None:
    """All have what a training by so many ranks at each step comes to: the same bits."""
    sizes = max((one[0] for one in ends), key=len)
    start, first = None, 0
    for n_ranks, run in itertools.groupby(sizes):
        n = len(list(run))
        start = values_of(_run(backend, n_ranks, _train_some, first, n, start))[0]
        first += n
    for _, model, optimizer in ends:
        torch.testing.assert_close((model, optimizer), start, rtol=0, atol=0)


def _loop_in_a_loop(place: Place) -> list[str]:
    training, seen = Training(place, communicator(place)), []
    outer = training.loop()
    training.make(next(outer))
    with pytest.raises(FastcommError) as caught:
        next(training.loop())
    seen.append(str(caught.value))
    outer.close()
    for step in training.loop():
        training.make(step)
    return [*seen, str(training.reducer.n_rounds)]


def test_a_loop_inside_a_loop_is_refused():
    for rank, (message, n_rounds) in enumerate(values_of(_run("shm", 2, _loop_in_a_loop))):
        assert message.startswith(f"elastic() is under way already on rank {rank}: leave that")
        assert n_rounds == str(STEPS)


# ---- a rank is lost ------------------------------------------------------------------------------


def _lose_one(place: Place, victim: int, when: str) -> Any:
    # One that closes its communicator and lives on is waited for.
    options = {"timeout": timedelta(seconds=5)} if when == "closes" else {}
    training = Training(place, communicator(place, **options))
    for step in training.loop():
        if step == 5 and place.rank == victim:
            if when == "inside backward":
                last = training.model[0].weight  # whose bucket is launched last
                last.register_hook(lambda _: leave(place, training.reducer.comm, "killed"))
            else:
                leave(place, training.reducer.comm, when)
                return None
        training.make(step)
    return training.end()


@pytest.mark.parametrize(
    "backend, when",
    [*itertools.product(EVERY_TRANSPORT, ["killed", "inside backward"]), ("shm", "closes")],
)
def test_the_ranks_that_are_left_go_on(backend, when):
    ends = values_of(_run(backend, 3, _lose_one, 1, when), 1)
    assert [one[0] for one in ends] == [[3] * 5 + [2] * 7] * 2
    _check_trajectory(backend, ends)


def _lose_all_others(place: Place, kind: type[Training]) -> Any:
    training = kind(place, communicator(place))
    for step in training.loop():
        if step == 3 * place.rank and place.rank:
            leave(place, training.reducer.comm, "killed")
        training.make(step)
    return training.end()


def test_one_rank_may_be_all_that_is_left():
    ends = values_of(_run("shm", 3, _lose_all_others, Training), 1, 2)
    assert [one[0] for one in ends] == [[3] * 3 + [2] * 3 + [1] * 6]
    _check_trajectory("shm", ends)


def _be_behind(place: Place) -> Any:
    """Rank 2 is lost when rank 0 has the gradients of a step, and rank 1 does not get them."""

    def hear_of_it(round: Round) -> None:
        for bucket in round.buckets:
            bucket.finish()
        wait_for_note(place, "has stepped")  # over NCCL, rank 0's GPU reads this rank's until then
        raise PeerLostError("rank 2 died", [2])

    training = Training(place, communicator(place))
    for step in training.loop():
        if step == 5 and place.rank == 1 and training.reducer.comm.world_size == 3:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Round, "_settle", hear_of_it)
                training.make(step)
            continue
        training.optimizer.zero_grad()
        training.loss(step).backward()
        if step == 5 and place.rank == 2:
            wait_for_note(place, "has stepped")
            leave(place, training.reducer.comm, "killed")
        training.step()
        if step == 5:
            note(place, **{"has stepped": ""})
            time.sleep(0.2)
    return training.end()


def _lose_those_that_are_ahead(place: Place) -> str:
    """Rank 0 is lost, too, before rank 1 has what it missed."""
    if place.rank == 0:
        elastic.load_states = lambda *_, **__: os._exit(0)
    with pytest.raises(FastcommError) as caught:
        _be_behind(place)
    return str(caught.value)


def test_what_nobody_has_any_more_is_an_error():
    (seen,) = values_of(_run("shm", 3, _lose_those_that_are_ahead), 0, 2)
    assert seen.startswith("the ranks that had made most steps were lost before the others")


@over_every_transport
def test_a_rank_that_has_missed_a_step_gets_it_from_one_that_has_not(backend):
    ends = values_of(_run(backend, 3, _be_behind), 2)
    assert sorted(one[0] for one in ends) == [[3] * 5 + [2] * 6, [3] * 6 + [2] * 6]
    _check_trajectory(backend, ends)


def _lose_one_while_planning(place: Place, where: str) -> Any:
    """Where all ranks decide, after a round, whether other buckets are better."""
    training = Training(place, communicator(place))
    plan.Planner._seen_order = lambda *_: tuple(range(4))  # other buckets are
    if place.rank == 1:
        owner = Core if where == "remake_buckets" else plan
        setattr(owner, where, lambda *_: leave(place, training.reducer.comm, "exits at once"))
    for step in training.loop():
        training.make(step)
    return training.end()


@pytest.mark.parametrize("where", ["gather_objects", "remake_buckets"])
def test_a_rank_may_be_lost_while_buckets_are_planned_again(where):
    ends = values_of(_run("group", 3, _lose_one_while_planning, where), 1)
    sizes = ends[0][0]
    assert len(sizes) == STEPS and 0 < sizes.count(3) < STEPS
    _check_trajectory("group", ends)


# ---- a rank comes --------------------------------------------------------------------------------


def _take_in(place: Place, victim: int) -> Any:
    """The last process is started in place of the victim. All make a few more steps together."""
    n_ranks = place.world_size - 1
    own, options = dataclasses.replace(place, world_size=n_ranks), {}
    if place.rank == n_ranks:
        wait_for_note(place, "left_at")
        own = dataclasses.replace(own, rank=victim)
        options = {"timeout": timedelta(seconds=60)}  # if the others raise, pytest shows why
    training = Training(place, communicator(own, **options))
    training.last = 10**9
    for step in training.loop():
        comm = training.reducer.comm
        if step == 3 and place.rank == victim:
            leave(place, comm, "exits at once")
        has_come = comm.membership.is_rebuilt and comm.world_size == n_ranks
        training.last = min(training.last, step + 3) if has_come else training.last
        training.make(step)
        time.sleep(0.01)
    return training.end()


@over_every_transport
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_in_place_of_a_lost_one_gets_all_that_the_others_have(backend, victim):
    ends = values_of(_run(backend, 4, _take_in, victim, of_hosts=[0, 1, 2, victim]), victim)
    assert ends[0][0][:3] == ends[0][0][-3:] == ends[-1][0] == [3] * 3
    _check_trajectory(backend, ends)


# ---- steps and batches ---------------------------------------------------------------------------


def _use_batches(place: Place, fails_at: int) -> list[int]:
    """A step takes two batches. One rank cannot make one of its backwards."""
    training, used, coming = Training(place, communicator(place)), [], []
    for batch in training.reducer.elastic(range(8), state=[training.optimizer]):
        coming.append(batch)
        if batch % 2 == 0:
            training.optimizer.zero_grad()
            with training.reducer.no_sync():
                training.loss(batch).backward()
            continue
        if batch == fails_at and place.rank == 1 and not used[fails_at - 1 :]:
            fails_at = -1
            with contextlib.suppress(ZeroDivisionError):
                training.model[0].weight.register_hook(lambda _: 1 / 0)
                training.loss(batch).backward()
            coming = []
            training.model[0].weight._backward_hooks.clear()
            continue
        training.loss(batch).backward()
        training.optimizer.step()
        if not training.reducer.skipped:
            used += coming
        coming = []
    training.end()
    return used


@over_two
def test_batches_of_a_step_that_was_abandoned_come_again_on_all_ranks(backend):
    assert values_of(_run(backend, 2, _use_batches, 3)) == [list(range(8))] * 2


def _lose_one_while_accumulating(place: Place) -> list[float]:
    """It is lost after the first of two backwards of a step, and heard of before the second."""
    comm = communicator(place)
    model = nn.Linear(1, 1, bias=False)
    reducer, seen = fastcomm.Reducer(comm).attach(model), []
    for batch in reducer.elastic(range(1, 9)):
        loss = model(torch.full((1, 1), float(batch))).sum()
        if batch % 2:
            model.zero_grad()
            with reducer.no_sync():
                loss.backward()
            if batch == 3 and place.rank == 1:
                leave(place, comm, "killed")
            continue
        loss.backward()
        if not reducer.skipped:
            assert model.weight.grad is not None
            seen.append(model.weight.grad.item())
    return seen


@over_two
def test_what_was_accumulated_is_made_again_when_a_rank_is_lost(backend):
    seen = values_of(_run(backend, 3, _lose_one_while_accumulating), 1)
    assert seen == [[3.0, 7.0, 11.0, 15.0]] * 2


def _have_unequal_numbers(place: Place) -> int:
    training = Training(place, communicator(place))
    for step in training.reducer.elastic(range(4 + place.rank), state=[training.optimizer]):
        training.make(step)
    training.end()
    return len(training.sizes)


@over_two
def test_the_loop_ends_with_the_first_rank_that_has_no_batch(backend):
    assert values_of(_run(backend, 2, _have_unequal_numbers)) == [4, 4]


def _train_two_models(place: Place) -> Any:
    comm = communicator(place)
    one, other = Training(place, comm), Training(place, comm)
    both = one.optimizer, other.optimizer
    for _ in one.reducer.elastic(iter(lambda: one.reducer.n_rounds < STEPS, False), state=both):
        step = one.reducer.n_rounds
        one.make(step)
        if step == 5 and place.rank == 2:  # the others have stepped one of them
            wait_for_note(place, "stepped 0")
            wait_for_note(place, "stepped 1")
            leave(place, comm, "killed")
        note(place, **{f"stepped {place.rank}": ""} if step == 5 else {})
        other.make(step)
    return one.end(), other.end(), one.reducer.skipped


@over_two
def test_what_comes_after_a_dropped_round_of_one_model_is_dropped_with_it(backend):
    ends = values_of(_run(backend, 3, _train_two_models), 2)
    for one, other, is_skipped in ends:
        assert one[0] == [3] * 6 + [2] * 6
        assert other[0] == [3] * 5 + [2] * 6  # that step of the other model nobody has made
        assert not is_skipped
    _check_trajectory(backend, [one for one, _, _ in ends])


# ---- by hand, and what goes wrong ----------------------------------------------------------------


def _go_on_by_hand(place: Place) -> Any:
    training = Training(place, communicator(place))
    try:
        for step in range(STEPS):
            if step == 5 and place.rank == 2:
                note(place, **{"n_made": training.reducer.n_rounds})
                leave(place, training.reducer.comm, "killed")
            training.make(step)
    except PeerLostError:
        training.reducer.comm.rebuild()
    training.reducer.refresh()
    assert training.reducer.comm.world_size == 2
    fastcomm.catch_up(training.reducer, training.optimizer)
    for step in range(int(noted(place, "n_made")), STEPS):
        training.make(step)
    return training.end()


def test_rebuild_refresh_and_catch_up_do_the_same_by_hand():
    ends = values_of(_run("shm", 3, _go_on_by_hand), 2)
    assert [one[0] for one in ends] == [[3] * 5 + [2] * 7] * 2
    _check_trajectory("shm", ends)


def _come_without_state(place: Place) -> list[str]:
    own = dataclasses.replace(place, world_size=2)
    if place.rank == 2:
        wait_for_note(place, "left_at")
        own = dataclasses.replace(own, rank=1)
    training = Training(place, communicator(own))
    if place.rank < 2:
        for step in range(3):
            training.make(step)
        if place.rank == 1:
            leave(place, training.reducer.comm, "exits at once")
        with pytest.raises(PeerLostError):
            training.make(3)
        while training.reducer.comm.rebuild().world_size < 2:
            training.reducer.comm = training.reducer.comm.membership.newest
            time.sleep(0.1)
        training.reducer.refresh()
    training.optimizer.zero_grad()
    training.loss(3).backward()
    seen = []
    for call in training.step, lambda: fastcomm.catch_up(training.reducer), training.shard:
        with pytest.raises((FastcommError, ValueError)) as caught:
            call()
        seen.append(str(caught.value))
    fastcomm.catch_up(training.reducer, training.optimizer)
    training.make(4)
    training.end()
    return seen


def test_no_optimizer_steps_before_the_ranks_have_its_state():
    for refusal, trouble, sharded in values_of(_run("shm", 3, _come_without_state), 1):
        assert "have made different numbers of steps: call fastcomm.catch_up(" in refusal
        assert "was not given Adam, which keeps state" in trouble
        assert "call catch_up(reducer), then make the ShardedOptimizer" in sharded


_SHARDED = ["with ShardedOptimizer: a lost rank's shards"]


def _refuse(place: Place) -> list[str]:
    comm, seen = communicator(place), []

    def refused(reducer: Any, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            reducer.elastic([], **options)
        seen.append(str(caught.value))

    model, reducer, _ = attached(comm, nn.Linear(2, 1))
    refused(reducer, state=[0])
    with reducer.join():
        refused(reducer)
    steps = fastcomm.LocalSGD(reducer, every=2)
    refused(reducer)
    steps.finish()
    other = nn.Linear(2, 1)
    sharded = fastcomm.Reducer(comm).attach(other)
    optimizer = fastcomm.ShardedOptimizer(sharded, torch.optim.SGD, lr=0.1)
    refused(sharded, state=[optimizer])
    refused(reducer)  # it is for all reducers of the communicator
    sharded.detach()
    return seen


def test_what_cannot_go_on_without_a_rank_is_refused_at_the_start():
    for seen in values_of(_run("shm", 2, _refuse)):
        words = ["state takes", "join() ends", "with LocalSGD: ranks have", *_SHARDED * 2]
        assert [word in one for one, word in zip(seen, words, strict=True)] == [True] * 5, seen


def _shard_in_the_loop(place: Place) -> str:
    training = Training(place, communicator(place))
    loop = training.loop()
    next(loop)
    with pytest.raises(ValueError) as caught:
        training.shard()
    loop.close()
    return str(caught.value)


def test_a_sharded_optimizer_is_refused_in_the_loop():
    for seen in values_of(_run("shm", 2, _shard_in_the_loop)):
        assert seen.startswith("ShardedOptimizer cannot be combined with elastic()")


def _lose_shards(place: Place) -> Any:
    training = Training(place, communicator(place))
    training.shard()
    for step in range(5):
        training.make(step)
    _, weights, saved = copy.deepcopy(training.end())
    if place.rank == 2:
        leave(place, training.reducer.comm, "killed")
    with pytest.raises(PeerLostError):
        training.make(5)
    comm = training.reducer.comm.rebuild()
    with pytest.raises(ValueError, match="ShardedOptimizer: a lost rank's shards are gone"):
        training.reducer.refresh()
    training.reducer.detach()
    training.reducer = fastcomm.Reducer(comm, bucket_cap_mb=1e-5).attach(training.model)
    training.shard()
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(saved)
    for step in range(5, STEPS):
        training.make(step)
    return training.end()


@over_two
def test_a_sharded_optimizer_goes_on_from_a_checkpoint_alone(backend):
    ends = values_of(_run(backend, 3, _lose_shards), 2)
    assert [one[0] for one in ends] == [[3] * 5 + [2] * 7] * 2
    _check_trajectory(backend, ends)
