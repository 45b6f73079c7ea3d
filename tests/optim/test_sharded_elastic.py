"""ShardedOptimizer in Reducer.elastic(): each rank's shards have a copy on another rank."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import fastcomm
from fastcomm import FastcommError
from fastcomm.optim import shard_copies
from tests.reducer.features.test_elastic import Training, _check_trajectory, _run
from tests.support.bodies import Place, communicator, leave, note, wait_for_note
from tests.support.outcomes import values_of
from tests.support.transports import EVERY_TRANSPORT

over_every_transport = pytest.mark.parametrize("backend", EVERY_TRANSPORT)


class ShardedTraining(Training):
    def __init__(self, place: Place, comm: Any, **options: Any) -> None:
        super().__init__(place, comm)
        self.optimizer = fastcomm.ShardedOptimizer(
            self.reducer, torch.optim.Adam, lr=0.1, **options
        )

    def end(self) -> tuple[list[int], Any, Any]:
        self.reducer.check_in_sync(self.optimizer)
        states = self.model.state_dict(), self.optimizer.full_state_dict()
        return self.sizes, *tree_map_only(torch.Tensor, torch.Tensor.cpu, states)


def _lose_one(place: Place, victim: int, when: str, options: dict[str, Any]) -> Any:
    training = ShardedTraining(place, communicator(place), **options)
    for step in training.loop():
        if step == 5 and place.rank == victim:
            _die_in(training, when)
        training.make(step)
    return training.end()


def _die_in(training: ShardedTraining, when: str) -> None:
    def die(*_: Any) -> None:
        leave(training.place, training.reducer.comm, "killed")

    if when == "before backward":
        die()
    elif when == "inside backward":
        training.model[0].weight.register_hook(die)
    elif when == "before its step":
        training.optimizer.register_step_pre_hook(die)
    elif when == "before its parameters are sent":
        training.optimizer._spread = die
    elif when == "before its copy is sent":
        shard_copies._pass_on = die


@over_every_transport
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "when",
    [
        "before backward",
        "inside backward",
        "before its step",
        "before its parameters are sent",
        "before its copy is sent",
    ],
)
def test_the_ranks_that_are_left_go_on_from_the_last_step_that_counted(backend, when, victim):
    ends = values_of(_run(backend, 3, _lose_one, victim, when, {}), victim)
    assert [one[0] for one in ends] == [[3] * 5 + [2] * 7] * 2
    _check_trajectory(backend, ends)


def _count_on_one_rank_alone(place: Place) -> Any:
    """Rank 2 is lost when a step has counted on rank 0, and rank 1 does not hear of that."""
    training = ShardedTraining(place, communicator(place))

    @contextlib.contextmanager
    def hear_of_it(_: str) -> Iterator[None]:
        yield
        wait_for_note(place, "has counted")
        if place.rank == 2:
            leave(place, training.reducer.comm, "killed")
        training.reducer.comm.barrier()

    for step in training.loop():
        with pytest.MonkeyPatch.context() as patch:
            if step == 5 and place.rank and training.reducer.comm.world_size == 3:
                patch.setattr(shard_copies, "called_by", hear_of_it)
            training.make(step)
        if step == 5 and not training.reducer.skipped:
            note(place, **{"has counted": ""})
    return training.end()


@over_every_transport
def test_a_step_that_counts_on_one_rank_counts_on_all(backend):
    ends = values_of(_run(backend, 3, _count_on_one_rank_alone), 2)
    assert [one[0] for one in ends] == [[3] * 6 + [2] * 6, [3] * 5 + [2] * 6]
    _check_trajectory(backend, ends)


def _lose_several(place: Place, victims: list[int]) -> Any:
    """At once: where the others hear of the first, the last is gone, too."""
    training = ShardedTraining(place, communicator(place))
    for step in training.loop():
        if step == 5 and place.rank in victims:
            note(place, **{f"victim {place.rank}": ""})
            for other in victims:
                wait_for_note(place, f"victim {other}")
            leave(place, training.reducer.comm, "killed")
        training.make(step)
    return training.end()


@over_every_transport
def test_ranks_whose_copies_are_elsewhere_may_be_lost_together(backend):
    ends = values_of(_run(backend, 4, _lose_several, [0, 2]), 0, 2)
    assert ends[0][0][:5] == [4] * 5 and ends[0][0][-6:] == [2] * 6
    _check_trajectory(backend, ends)


def _lose_neighbours(place: Place) -> str:
    with pytest.raises(FastcommError) as caught:
        _lose_several(place, [1, 2])
    return str(caught.value)


def test_a_rank_that_is_lost_with_the_one_that_has_its_copy_is_an_error_on_all():
    seen = values_of(_run("shm", 4, _lose_neighbours), 1, 2)
    assert [one.split(":")[0] for one in seen] == [
        "the shards of rank 1 are lost, and so is the rank that had a copy of them"
    ] * 2


def _lose_all_others(place: Place) -> Any:
    training = ShardedTraining(place, communicator(place))
    for step in training.loop():
        if step == 3 * place.rank and place.rank:
            leave(place, training.reducer.comm, "killed")
        training.make(step)
    return training.end()


def test_one_rank_may_be_all_that_is_left():
    ends = values_of(_run("shm", 3, _lose_all_others), 1, 2)
    assert [one[0] for one in ends] == [[3] * 3 + [2] * 3 + [1] * 6]
    _check_trajectory("shm", ends)


# ---- a rank comes --------------------------------------------------------------------------------


def _take_in(place: Place, victim: int) -> Any:
    """The last process is started in place of the victim. All make a few more steps together, with
    learning rates that a scheduler has changed before.
    """
    n_ranks = place.world_size - 1
    own = dataclasses.replace(place, world_size=n_ranks)
    if place.rank == n_ranks:
        wait_for_note(place, "left_at")
        own = dataclasses.replace(own, rank=victim)
    training = ShardedTraining(place, communicator(own))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    training.last, rates = 10**9, []
    loop = training.reducer.elastic(training._batches(), state=[training.optimizer, scheduler])
    for _ in loop:
        step, comm = training.reducer.n_rounds, training.reducer.comm
        if step == 3 and place.rank == victim:
            leave(place, comm, "exits at once")
        has_come = comm.membership.is_rebuilt and comm.world_size == n_ranks
        training.last = min(training.last, step + 3) if has_come else training.last
        rates.append((step, training.optimizer.param_groups[0]["lr"]))
        training.make(step)
        if not training.reducer.skipped:
            scheduler.step()
        time.sleep(0.01)
    assert rates == [(step, pytest.approx(0.1 * 0.9**step)) for step, _ in rates]
    return training.sizes, training.end()[1:]


@over_every_transport
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_in_place_of_a_lost_one_gets_all_that_the_others_have(backend, victim):
    ends = values_of(_run(backend, 4, _take_in, victim, of_hosts=[0, 1, 2, victim]), victim)
    assert ends[0][0][:3] == ends[0][0][-3:] == ends[-1][0] == [3] * 3
    for _, states in ends:
        torch.testing.assert_close(states, ends[0][1], rtol=0, atol=0)
