"""Which rank the others wait for, in which phase, and what that costs."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import time

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.insight import stragglers
from fastcomm.insight.recorder import WAITING, Phases
from fastcomm.insight.stragglers import find
from tests.support.bodies import Interrupted
from tests.support.ranks import on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = pytest.mark.usefixtures("transport")
MS = 1_000_000
LATE_S = 0.02
PHASES = ("data and other", "forward", "backward", "logging", "optimizer")


class _Model(nn.Sequential):
    """sleeps: in which phase, or none."""

    sleeps = ""

    def forward(self, x):
        self.sleep("forward")
        hidden = self[0](x)
        hidden.register_hook(lambda _: self.sleep("backward"))
        return self[2](self[1](hidden))

    def sleep(self, phase):
        if phase == self.sleeps:
            time.sleep(LATE_S)


def _train(comm, phase="", steps=0):
    """phase: in which rank 1 sleeps, each time."""
    model = _Model(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: model.sleep("optimizer"))
    model.sleeps = phase if comm.rank == 1 else ""
    _step(model, optimizer, steps)
    return model, reducer, optimizer


def _step(model, optimizer, steps):
    for _ in range(steps):
        model.sleep("data and other")
        optimizer.zero_grad()
        model(torch.ones(4, 16)).sum().backward()
        model.sleep("logging")
        optimizer.step()


def _telling_often(body):
    """For bodies: ranks tell each other every LEAST_ROUNDS rounds."""

    @functools.wraps(body)
    def telling_often(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stragglers, "MOST_ROUNDS", stragglers.LEAST_ROUNDS)
            return body(*arguments)

    return telling_often


# ---- on real ranks -------------------------------------------------------------------------------


@pytest.mark.transports(*EVERY_TRANSPORT)
@pytest.mark.parametrize("phase", PHASES)
@on_ranks(3)
@_telling_often
def test_a_rank_that_sleeps_is_named_with_the_phase(comm, phase):
    model, reducer, optimizer = _train(comm)
    assert reducer.stragglers() == []
    model.sleeps = phase if comm.rank == 2 else ""
    _step(model, optimizer, 48)
    (straggler, *others) = reducer.stragglers()
    named = "data and other" if phase == "logging" else phase
    assert (straggler.rank, straggler.phase) == (2, named), straggler
    assert straggler.late_ms >= 0.5 * LATE_S * 1e3
    assert straggler.share > 0.1 and not any(one.share for one in others)
    assert f"rank 2 is late by {straggler.late_ms:.1f} ms" in str(straggler)


@pytest.mark.transports("shm", "group", "hierarchical")
@on_ranks(2)
@_telling_often
def test_a_victim_that_waits_inside_its_backward_is_none(comm):
    """More buckets than can be under way: a launch waits for the other rank."""
    layers = [nn.Linear(64, 64) for _ in range(24)]
    model = _Model(nn.Sequential(*layers), nn.ReLU(), nn.Linear(64, 1)).to(comm.device)
    caps = {"bucket_cap_mb": 0.01}
    reducer = fastcomm.Reducer(comm, **caps).attach(model)
    assert len(reducer.core.buckets) > 20
    reducer.stragglers()
    for _ in range(48):
        if comm.rank == 1:
            time.sleep(LATE_S)
        model(torch.ones(4, 64)).sum().backward()
    straggler = reducer.stragglers()[0]
    assert (straggler.rank, straggler.phase) == (1, "data and other")
    assert straggler.late_ms >= 0.5 * LATE_S * 1e3


@pytest.mark.transports("shm")
@on_ranks(2)
@_telling_often
def test_a_forward_that_nobody_watches_is_not_told_from_data(comm):
    model, reducer, optimizer = _train(comm, "forward")
    _step(model, optimizer, stragglers.FIRST_ROUNDS)
    assert reducer.core.stragglers.newest[0].phase == "data, forward and other"
    assert reducer.stragglers()[0].phase == "data, forward and other"
    _step(model, optimizer, 2 * stragglers.LEAST_ROUNDS)
    assert reducer.stragglers()[0].phase == "forward"
    for _ in range(2 * stragglers.LEAST_ROUNDS):  # past the module's own call, as torch.compile
        optimizer.zero_grad()
        model.forward(torch.ones(4, 16)).sum().backward()
    assert reducer.stragglers()[0].phase == "data, forward and other"


@pytest.mark.transports("shm", "nccl")
@on_ranks(3)
@_telling_often
def test_the_wait_for_other_ranks_shards_is_no_work(comm):
    model = _Model(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.AdamW, lr=0.01)
    optimizer._inner.register_step_pre_hook(lambda *_: model.sleep("optimizer"))
    model.sleeps = "optimizer" if comm.rank == 1 else ""
    reducer.stragglers()
    _step(model, optimizer, 48)
    straggler = reducer.stragglers()[0]
    assert (straggler.rank, straggler.phase) == (1, "optimizer")
    assert straggler.late_ms >= 0.5 * LATE_S * 1e3


@pytest.mark.transports("shm")
@on_ranks(2)
@_telling_often
def test_rank_0_warns_once_of_a_rank_that_stays_late(comm):
    seen = []
    handler = logging.Handler()

    def emit(record):
        seen.append(record.getMessage())
        raise OSError("disk full")

    handler.emit = emit
    logging.getLogger("fastcomm").addHandler(handler)
    try:
        model, reducer, optimizer = _train(comm, "backward", steps=stragglers.FIRST_ROUNDS)
        _step(model, optimizer, stragglers.LEAST_ROUNDS)
        assert reducer.n_rounds == stragglers.FIRST_ROUNDS + stragglers.LEAST_ROUNDS
        assert seen == []  # twice only
        _step(model, optimizer, 3 * stragglers.LEAST_ROUNDS)
    finally:
        logging.getLogger("fastcomm").removeHandler(handler)
    assert len(seen) == (comm.rank == 0), seen
    assert not seen or "rank 1 is late by" in seen[0] and "most of it in backward" in seen[0]


@pytest.mark.transports("shm", "nccl")
@on_ranks(2)
@_telling_often
def test_unsynced_backwards_end_before_the_next_data(comm):
    model, reducer, optimizer = _train(comm)
    reducer.stragglers()
    model.sleeps = "data and other" if comm.rank else ""
    for _ in range(2 * stragglers.FIRST_ROUNDS):
        optimizer.zero_grad()
        with reducer.no_sync():
            model(torch.ones(4, 16)).sum().backward()
        model.sleep("data and other")
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
    assert reducer.stragglers()[0].phase == "data and other"


@pytest.mark.transports("shm")
@on_ranks(2)
@_telling_often
def test_ranks_tell_each_other_again_after_a_join(comm):
    model, reducer, optimizer = _train(comm, "backward")
    with reducer.join():  # rank 0 waits for rank 1 without data
        _step(model, optimizer, stragglers.FIRST_ROUNDS + 20 * comm.rank)
    model.sleeps = ""
    _step(model, optimizer, stragglers.FIRST_ROUNDS - 1)
    assert reducer.core.stragglers.newest == []  # nobody has told of the join()
    _step(model, optimizer, 1)
    assert reducer.core.stragglers.due_at > reducer.n_rounds


@pytest.mark.transports("nccl")
@pytest.mark.parametrize(
    "differs, words",
    [
        ("steps", r"made different numbers .*: rank 0 after \d+ steps .*; rank 1 after .*refresh"),
        ("records", r"not stepped alike.*: rank 0 after .*; rank 1 after (?s:.*)called clip_"),
    ],
)
@on_ranks(2)
@_telling_often
def test_over_nccl_ranks_that_have_not_stepped_alike_are_told_with_their_phases(
    comm, differs, words
):
    model, reducer, optimizer = _train(comm, steps=2)
    optimizer.zero_grad()
    model(torch.ones(4, 16)).sum().backward()
    reducer.clip_grad_norm_(1.0 + comm.rank * (differs == "records"))
    if comm.rank == 0 or differs == "records":
        optimizer.step()
    with pytest.raises(fastcomm.MismatchError, match=words):
        _step(model, optimizer, 2 * stragglers.FIRST_ROUNDS)
    reducer.refresh()
    _step(model, optimizer, 2 * stragglers.FIRST_ROUNDS)


@pytest.mark.transports("shm")
@pytest.mark.parametrize("where", ["before", "after"])
@on_ranks(2)
@_telling_often
def test_who_is_interrupted_between_a_round_and_the_telling_tells_all_the_same(comm, where):
    model, reducer, optimizer = _train(comm, steps=stragglers.FIRST_ROUNDS - 1)
    compare = reducer.core._compare_and_plan
    n_calls = []

    def interrupted(*, can_replan):
        n_calls.append(1)
        if where == "before" and len(n_calls) == 1:
            raise Interrupted
        compare(can_replan=can_replan)
        if len(n_calls) == 1:
            raise Interrupted

    if comm.rank:
        reducer.core._compare_and_plan = interrupted
        with pytest.raises(Interrupted):
            _step(model, optimizer, 1)
        optimizer.step()
        reducer.core._compare_and_plan = compare
    else:
        _step(model, optimizer, 1)
    _step(model, optimizer, stragglers.LEAST_ROUNDS)
    reducer.check_in_sync()


@pytest.mark.transports("shm")
@on_ranks(1)
def test_a_reducer_that_is_gone_is_in_no_dump(comm):
    model = nn.Linear(2, 2)
    reducer = fastcomm.Reducer(comm).attach(model)
    assert "reducer 0" in comm.flight.activities
    del model, reducer
    gc.collect()
    assert "reducer 0" not in comm.flight.activities


@pytest.mark.transports("shm")
@on_ranks(2)
def test_what_watches_a_forward_goes_with_no_copy_of_the_model(comm):
    model, reducer, _ = _train(comm)
    reducer.stragglers()
    reducer.timeline()
    before = reducer.core.phases.take()
    for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        other.sleeps = "forward"
        other(torch.ones(1, 16))
    assert reducer.core.phases.take()[1] == 0 and sum(before) > 0
    reducer.refresh()
    model(torch.ones(1, 16))
    assert reducer.core.phases.take()[1] > 0
    reducer.detach()
    assert not model._forward_pre_hooks or reducer.core.timeline.is_on
    reducer.timeline().stop()
    assert not model._forward_pre_hooks and not model._forward_hooks


# ---- what follows from what was told ------------------------------------------------------------


def _phases(other=10.0, forward=20.0, backward=40.0, waiting=20.0, optimizer=10.0):
    return [one * MS for one in (other, forward, backward, waiting, optimizer)]


def test_ranks_that_are_alike_are_no_stragglers():
    assert find([_phases(), _phases(waiting=22, optimizer=8), _phases()], True) == []


def test_the_cost_of_one_of_two_late_ranks_is_what_it_has_over_the_other():
    quick, late, later = _phases(waiting=60), _phases(forward=40, waiting=40), _phases(other=50)
    first, second = find([quick, late, quick, later, quick], sees_forward=True)
    assert (first.rank, first.phase, first.late_ms) == (3, "data and other", 40.0)
    assert first.share == pytest.approx(0.2 / 1.4 * 1.0, rel=0.01)
    assert (second.rank, second.phase, second.share) == (1, "forward", 0.0)


def test_a_fraction_of_a_ms_is_worth_no_warning():
    (straggler,) = find(
        [[one / 100 for one in _phases(other=50)], [0.8 * MS, 0, 0, 0.6 * MS, 0]], True
    )
    assert straggler.share > 0.2 and not straggler.is_worth_a_warning
    (straggler,) = find([_phases(other=50), _phases(waiting=60)], True)
    assert straggler.is_worth_a_warning


def test_a_forward_of_another_thread_changes_no_other_phase():
    phases = Phases()
    phases.enter(WAITING)
    phases.begin_forward()
    phases.end_forward()
    assert "the wait for gradients" in phases.in_words()
