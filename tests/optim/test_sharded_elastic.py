"""ShardedOptimizer in Reducer.elastic(): each rank's shards have a copy on another rank."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import fastcomm
from fastcomm import FastcommError
from fastcomm.optim import shard_copies
from fastcomm.optim.shard_copies import ShardCopies
from tests.reducer.features.test_elastic import (
    STEPS,
    Training,
    _check_trajectory,
    _lose_all_others,
    _run,
)
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


_WHEN = [
    "before backward",
    "inside backward",
    "before its step",
    "before its parameters are sent",
    "before its copy is sent",
]


@pytest.mark.parametrize(
    "backend, when, victim",
    [
        *itertools.product(["shm"], _WHEN, [0, 2]),
        *itertools.product(sorted({*EVERY_TRANSPORT} - {"shm"}), _WHEN[3:], [1]),
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


def test_one_rank_may_be_all_that_is_left():
    ends = values_of(_run("shm", 3, _lose_all_others, ShardedTraining), 1, 2)
    assert [one[0] for one in ends] == [[3] * 3 + [2] * 3 + [1] * 6]
    _check_trajectory("shm", ends)


def _lose_another_before_its_shards_have_copies(place: Place) -> Any:
    """Of 4 ranks, 1 is lost, and 3 when the rest have put the shards together and cut them anew."""
    training = ShardedTraining(place, communicator(place))
    keep = ShardCopies.keep

    def die(self: ShardCopies, comm: Any, kept: Any) -> None:
        if comm.world_size == 3:
            leave(place, comm, "killed")
        keep(self, comm, kept)

    if place.rank == 3:
        ShardCopies.keep = die
    for step in training.loop():
        if step == 5 and place.rank == 1:
            leave(place, training.reducer.comm, "killed")
        training.make(step)
    return training.end()


@over_every_transport
def test_copies_stay_until_the_shards_that_are_cut_anew_have_theirs(backend):
    ends = values_of(_run(backend, 4, _lose_another_before_its_shards_have_copies), 1, 3)
    assert [one[0] for one in ends] == [[4] * 5 + [2] * 7] * 2
    _check_trajectory(backend, ends)


def _lose_one_before_the_first_copies(place: Place, n_before: int) -> Any:
    training = ShardedTraining(place, communicator(place))
    for step in range(n_before):
        training.make(step)
    if place.rank == 1:
        shard_copies._pass_on = lambda *_: leave(place, training.reducer.comm, "killed")
    if not n_before:
        for step in training.loop():
            training.make(step)
        return training.end()
    with pytest.raises(FastcommError) as caught:
        next(training.loop())
    return str(caught.value)


def test_a_rank_that_is_lost_before_the_first_copies_is_an_error_on_all():
    for seen in values_of(_run("shm", 3, _lose_one_before_the_first_copies, 1), 1):
        assert seen.startswith("a rank was lost before the ranks' shards had their first copies")


@over_every_transport
def test_a_rank_may_be_lost_before_the_first_step(backend):
    ends = values_of(_run(backend, 3, _lose_one_before_the_first_copies, 0), 1)
    assert [one[0] for one in ends] == [[2] * STEPS] * 2
    _check_trajectory(backend, ends)


# ---- optimizers, options, and what a loop does ---------------------------------------------------


class WithHistory(torch.optim.Optimizer):
    """Keeps a list of gradients, and numbers of Python's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["n"] = state.get("n", 0) + 1
                state["last"] = [*state.get("last", []), parameter.grad.clone()][-3:]
                parameter.add_(sum(state["last"]), alpha=-group["lr"] / state["n"])


_KINDS = {
    "share_parameters": (torch.optim.Adam, {"share_parameters": True}),
    "keep_gradients": (torch.optim.Adam, {"keep_gradients": True}),
    "whole parameters": (torch.optim.Adam, {"elementwise": False}),
    "no state": (torch.optim.SGD, {}),
    "state from the start": (torch.optim.Adagrad, {}),
    "state of another shape": (torch.optim.Adafactor, {}),
    "state of lists and numbers": (WithHistory, {}),
}


def _train(place: Place, kind: str, victim: int | None) -> Any:
    """On two ranks from the sixth step on, where the third is lost or leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    reducer = fastcomm.Reducer(communicator(place), bucket_cap_mb=1e-4).attach(model)
    optimizer_class, options = _KINDS[kind]
    optimizer = fastcomm.ShardedOptimizer(reducer, optimizer_class, lr=0.1, **options)
    for step in reducer.elastic(range(12), state=[optimizer]):
        if step == 5 and place.rank == victim:
            leave(place, reducer.comm, "killed")
        random = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        # the same on all ranks: the mean is that of any number of them
        model(torch.randn(4, 6, generator=random)).square().mean().backward()
        reducer.clip_grad_norm_(0.5)
        optimizer.step()
    reducer.check_in_sync(optimizer)
    return model.state_dict(), optimizer.full_state_dict()


@pytest.mark.parametrize("kind", _KINDS)
def test_every_kind_of_sharding_outlives_a_rank(kind):
    expected, *_ = values_of(_run("shm", 2, _train, kind, None))
    for seen in values_of(_run("shm", 3, _train, kind, 1), 1):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


def _lose_one_with_a_history_of_pieces(place: Place) -> str:
    torch.manual_seed(0)
    model = nn.Linear(6, 8)
    reducer = fastcomm.Reducer(communicator(place)).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, WithHistory, lr=0.1, elementwise=True)
    with pytest.raises(FastcommError) as caught:
        for step in reducer.elastic(range(4), state=[optimizer]):
            if step == 2 and place.rank == 1:
                leave(place, reducer.comm, "killed")
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
    return str(caught.value)


def test_lists_of_pieces_cannot_be_put_together():
    for seen in values_of(_run("shm", 3, _lose_one_with_a_history_of_pieces), 1):
        assert seen.startswith("the state 'last' of parameter 0 of the ShardedOptimizer differs")


def _lose_one_while_clipping(place: Place, call: str) -> Any:
    """The gradients are reduced, and the ranks add up their shards' norms, or infinities."""
    training = ShardedTraining(place, communicator(place))
    reducer, optimizer = training.reducer, training.optimizer
    for step in reducer.elastic(training._batches(), state=[optimizer]):
        step = reducer.n_rounds
        optimizer.zero_grad()
        training.loss(step).backward()
        if step == 5 and place.rank == 2:
            leave(place, reducer.comm, "killed")
        getattr(reducer, call)(*[1e9][: call == "clip_grad_norm_"])
        optimizer.step()
        if not reducer.skipped:
            training.sizes.append(reducer.comm.world_size)
    return training.end()


@pytest.mark.parametrize("call", ["grad_norm", "clip_grad_norm_", "nonfinite_count"])
def test_a_rank_may_be_lost_between_the_backward_and_the_step(call):
    ends = values_of(_run("shm", 3, _lose_one_while_clipping, call), 2)
    assert [one[0] for one in ends] == [[3] * 5 + [2] * 7] * 2
    _check_trajectory("shm", ends)


def _lose_one_in_the_first_of_two_steps(place: Place) -> Any:
    training = ShardedTraining(place, communicator(place))
    for _ in training.reducer.elastic(range(4), state=[training.optimizer]):
        for i in range(2):
            step = training.reducer.n_rounds
            if (step, i, place.rank) == (4, 0, 2):
                _die_in(training, "before its parameters are sent")
            training.make(step)
    return training.end()


def test_a_loop_may_go_on_to_another_step_after_one_that_was_dropped():
    ends = values_of(_run("shm", 3, _lose_one_in_the_first_of_two_steps), 2)
    assert [one[0] for one in ends] == [[3] * 4 + [2] * 4] * 2
    _check_trajectory("shm", ends)


def _end_by_an_error_in_its_step(place: Place) -> Any:
    training = ShardedTraining(place, communicator(place))
    for step in training.loop():
        if step == 5 and place.rank == 2:
            training.optimizer._inner.step = _fail
            with pytest.raises(RuntimeError, match="of the user's own making"):
                training.make(step)
            leave(place, training.reducer.comm, "exits at once")
        training.make(step)
    return training.end()


def _fail() -> None:
    raise RuntimeError("of the user's own making")


@over_every_transport
def test_the_others_go_on_where_a_rank_ends_by_an_error_in_its_step(backend):
    ends = values_of(_run(backend, 3, _end_by_an_error_in_its_step), 2)
    assert [one[0] for one in ends] == [[3] * 5 + [2] * 7] * 2
    _check_trajectory(backend, ends)


def _train_two_models(place: Place) -> Any:
    """A process comes in place of one that is lost when a step of the first model has counted."""
    n_ranks = place.world_size - 1
    own = dataclasses.replace(place, world_size=n_ranks)
    if place.rank == n_ranks:
        wait_for_note(place, "left_at")
        own = dataclasses.replace(own, rank=1)
    comm = communicator(own)
    torch.manual_seed(0)
    models = [nn.Linear(6, 8), nn.Linear(8, 1)]
    reducers = [fastcomm.Reducer(comm).attach(model) for model in models]
    optimizers = [
        fastcomm.ShardedOptimizer(one, torch.optim.SGD, lr=0.1, momentum=0.9) for one in reducers
    ]
    last = 10**9
    while_there_are = iter(lambda: reducers[0].n_rounds < last, False)
    for _ in reducers[0].elastic(while_there_are, state=optimizers):
        step, comm = reducers[0].n_rounds, reducers[0].comm
        if comm.membership.is_rebuilt and comm.world_size == n_ranks:
            last = min(last, step + 3)
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(torch.ones(4, model.in_features)).square().mean().backward()
            if (step, i, place.rank) == (3, 1, 1):
                leave(place, comm, "exits at once")
            optimizer.step()
        time.sleep(0.01)
    for reducer, optimizer in zip(reducers, optimizers, strict=True):
        reducer.check_in_sync(optimizer)
    ends = [one.full_state_dict() for one in optimizers], [one.state_dict() for one in models]
    return [one.n_rounds for one in reducers], ends


@over_every_transport
def test_two_models_each_go_on_from_their_own_last_step(backend):
    (rounds, ends), *others = values_of(_run(backend, 4, _train_two_models), 1)
    assert rounds[0] == rounds[1] + 1  # a step of the second model nobody has made
    for other in others:
        torch.testing.assert_close(other, (rounds, ends), rtol=0, atol=0)


def _load_in_the_loop(place: Place, victim: int | None) -> Any:
    """The state before the third step comes back before the sixth, in which a rank is lost."""
    training, saved = ShardedTraining(place, communicator(place)), None
    training.misses_none = False
    for step in training.loop():
        if step == 2:
            saved = copy.deepcopy(training.model.state_dict()), training.optimizer.full_state_dict()
        if step == 5 and training.reducer.comm.world_size == place.world_size:
            training.model.load_state_dict(saved[0])
            training.optimizer.load_full_state_dict(saved[1])
        if step == 5 and place.rank == victim:
            leave(place, training.reducer.comm, "killed")
        training.make(step)
    return training.end()


def test_a_state_that_was_loaded_in_the_loop_outlives_a_rank():
    for _, _, optimizer in values_of(_run("shm", 3, _load_in_the_loop, 1), 1):
        assert optimizer["state"][0]["step"].item() == STEPS - 3


def _unfreeze_in_the_loop(place: Place) -> Any:
    training = ShardedTraining(place, communicator(place))
    first = training.model[0].weight
    for step in training.loop():
        if step in (2, 4):
            first.requires_grad_(step == 4)
            training.optimizer.zero_grad()
            training.reducer.refresh()
        if step == 3 and place.rank == 1:
            leave(place, training.reducer.comm, "killed")
        training.make(step)
    return training.end()


def test_the_state_of_a_frozen_parameter_outlives_a_rank():
    ends = values_of(_run("shm", 3, _unfreeze_in_the_loop), 1)
    for _, model, optimizer in ends:
        assert optimizer["state"][0]["step"].item() == STEPS - 2
        torch.testing.assert_close((model, optimizer), ends[0][1:], rtol=0, atol=0)


# ---- what is refused, and where copies are -------------------------------------------------------


def _refuse(place: Place) -> str:
    training = ShardedTraining(place, communicator(place))
    if place.rank == 1:
        leave(place, training.reducer.comm, "killed")
    with pytest.raises(fastcomm.PeerLostError):
        training.make(0)
    training.reducer.comm.rebuild()
    with pytest.raises(ValueError) as caught:
        training.reducer.refresh()
    return str(caught.value)


def test_what_the_copies_do_not_cover_is_refused():
    (seen,) = values_of(_run("nccl", 2, _refuse), 1)
    assert "the shards of a lost rank are gone" in seen


@pytest.mark.parametrize(
    "hosts, ring",
    [("aaa", [0, 1, 2]), ("aabb", [0, 2, 1, 3]), ("abab", [0, 1, 2, 3]), ("aab", [0, 2, 1])],
)
def test_copies_lie_on_other_hosts_where_there_are_any(hosts, ring):
    assert shard_copies._across_hosts(hosts) == ring


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


class TrainingThatHasFrozen(ShardedTraining):
    """As the others are when this process comes: the first weight was trained, and is frozen."""

    def new_model(self) -> nn.Sequential:
        model = super().new_model()
        model[0].weight.requires_grad_(False)
        return model

    def __init__(self, place: Place, comm: Any) -> None:
        Training.__init__(self, place, comm)
        self.optimizer = fastcomm.ShardedOptimizer(
            self.reducer, torch.optim.Adam, self.model.parameters(), lr=0.1
        )


def _take_in_while_one_is_frozen(place: Place) -> Any:
    """The last process takes the place of rank 1. A step after it has come all thaw the weight."""
    own = dataclasses.replace(place, world_size=2)
    if place.rank == 2:
        wait_for_note(place, "left_at")
        own = dataclasses.replace(own, rank=1)
    kind = TrainingThatHasFrozen if place.rank == 2 else ShardedTraining
    training = kind(place, communicator(own))
    training.last, first = 10**9, training.model[0].weight
    for step in training.loop():
        comm = training.reducer.comm
        has_come = comm.membership.is_rebuilt and comm.world_size == 2
        if step == 2 and not comm.membership.is_rebuilt:
            first.requires_grad_(False)
            training.optimizer.zero_grad()
            training.reducer.refresh()
        if step == 3 and place.rank == 1:
            leave(place, comm, "killed")
        training.last = min(training.last, step + 4) if has_come else training.last
        if step == training.last - 2:
            first.requires_grad_(True)
            training.optimizer.zero_grad()
            training.reducer.refresh()
        training.make(step)
        time.sleep(0.01)
    return training.end()[1:]


def test_a_new_process_gets_the_state_of_a_frozen_parameter():
    ends = values_of(_run("shm", 3, _take_in_while_one_is_frozen, of_hosts=[0, 1, 1]), 1)
    assert ends[0][1]["state"][0]["step"].item() == 2 + 2
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
