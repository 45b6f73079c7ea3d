"""bucket_cap_mb="auto": the ranks choose together, and nothing but the buckets changes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from unittest import mock

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.insight.advice import CAPS_MB, DEFAULT_CAP_MB, NETWORK_CAP_MB
from fastcomm.insight.collectives import Cost, MeasuredCosts
from fastcomm.insight.step_model import Gradient, LocalStep
from fastcomm.reducer.features import autotune
from fastcomm.reducer.options import Options
from tests.support.bodies import Interrupted
from tests.support.models import backward, mlp, seed
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("transport")

ROUNDS = 2 * (autotune.WARM_UP_ROUNDS + autotune.MEASURED_ROUNDS)
TINY_MB = 0.0002


def default_of(comm):
    """As repr() has it."""
    return f"{NETWORK_CAP_MB if comm.crosses_network else DEFAULT_CAP_MB:g}"


def _models(comm, **options):
    """A model with buckets of the default size, and an equal one with "auto"."""
    seed(0)
    fixed = mlp()
    tuned = copy.deepcopy(fixed)
    return (
        (fixed, fastcomm.Reducer(comm, **options).attach(fixed)),
        (tuned, fastcomm.Reducer(comm, bucket_cap_mb="auto", **options).attach(tuned)),
    )


@contextlib.contextmanager
def _choosing(cap_mb, pays=True):
    """The model promises much of this size, and its steps keep the promise or not."""
    promise = {DEFAULT_CAP_MB: 1.0, NETWORK_CAP_MB: 1.0, cap_mb: 0.5}
    with (
        mock.patch.object(autotune, "predict_caps", lambda *_: promise),
        mock.patch.object(autotune, "pays", lambda *_: pays),
    ):
        yield


@on_ranks(2, 3)
def test_gradients_are_the_same_bits_before_and_after_the_buckets_change(comm):
    with _choosing(TINY_MB):
        pairs = _models(comm)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model, _ in pairs
        ]
        for step in range(ROUNDS + 2):
            for (model, reducer), optimizer in zip(pairs, optimizers, strict=True):
                optimizer.zero_grad()
                with reducer.no_sync():
                    backward(model, comm.rank, 100 + step)
                backward(model, comm.rank, step)
            (fixed, by_default), (tuned, by_choice) = pairs
            for one, other in zip(fixed.parameters(), tuned.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad), step
            assert by_default.grad_norm().item() == pytest.approx(by_choice.grad_norm().item())
            for optimizer in optimizers:
                optimizer.step()
    assert f"bucket_cap_mb auto: {TINY_MB:g};" in repr(by_choice)
    assert "bucket_cap_mb" not in repr(by_default)
    by_choice.check_in_sync(optimizers[1])


@on_ranks(2)
def test_buckets_that_do_not_pay_are_given_up(comm):
    with _choosing(TINY_MB, pays=False):
        _, (model, reducer) = _models(comm)
        said = []
        for step in range(ROUNDS):
            backward(model, comm.rank, step)
            said.append(repr(reducer).partition("auto: ")[2].partition(";")[0])
    before, trial = ROUNDS // 2 - 1, ROUNDS // 2
    tried = [f"{TINY_MB:g} so far"] * trial
    default = default_of(comm)
    assert said == [f"{default} so far"] * before + tried + [default]


@on_ranks(2)
def test_ranks_measure_and_come_to_one_choice(comm):
    _, (model, reducer) = _models(comm)
    for step in range(ROUNDS + 1):
        backward(model, comm.rank, step)
    said = repr(reducer).partition("auto: ")[2].partition(";")[0]
    assert "so far" not in said
    chosen = torch.tensor([float(said)])
    total = chosen.clone()
    comm.all_reduce(total)
    assert total == comm.world_size * chosen
    assert reducer.recorder is None


@on_ranks(2)
def test_a_new_model_is_measured_anew(comm):
    with _choosing(TINY_MB):
        _, (model, reducer) = _models(comm)
        for step in range(ROUNDS):
            backward(model, comm.rank, step)
        reducer.refresh()
        assert f"auto: {default_of(comm)} so far" in repr(reducer)
        backward(model, comm.rank)


@on_ranks(2)
def test_a_backward_inside_another_leaves_the_buckets_alone(comm):
    with _choosing(TINY_MB):
        _, (model, reducer) = _models(comm)
        with mock.patch.object(reducer, "tuning", reducer.tuning) as watched:
            for step in range(ROUNDS // 2 - 1):
                backward(model, comm.rank, step)
            before = reducer.buckets
            watched.after_round(reducer, can_replan=False)
            assert reducer.buckets is before


@pytest.mark.parametrize("votes", [False, True], ids=["by hand", "vote"])
@on_ranks(2)
def test_a_rank_without_a_backward_takes_part_in_what_the_round_decides(comm, votes):
    """Where it votes to drop the step, the round decides nothing: the next one does."""
    decides = (ROUNDS // 2, ROUNDS + votes)
    with _choosing(TINY_MB):
        _, (model, reducer) = _models(comm, skip_nonfinite=votes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, ROUNDS + 2 * votes + 1):
            assert "so far" in repr(reducer)
            optimizer.zero_grad()
            is_without = comm.rank == 1 and step in decides
            if votes:
                reducer.skip_step() if is_without else backward(model, comm.rank, step)
            else:
                reducer.set_weight(int(not is_without))
                reducer.reduce() if is_without else backward(model, comm.rank, step)
            optimizer.step()
    assert f"auto: {TINY_MB:g};" in repr(reducer)
    reducer.check_in_sync(optimizer)


@on_ranks(2)
def test_a_decision_that_is_put_off_for_long_is_given_up(comm):
    with _choosing(TINY_MB):
        _, (model, reducer) = _models(comm, skip_nonfinite=True)
        with mock.patch.object(autotune, "_PATIENCE_ROUNDS", 1):
            for step in range(ROUNDS // 2 + 1):
                assert f"auto: {default_of(comm)} so far" in repr(reducer)
                reducer.skip_step()
                backward(model, comm.rank, step)
    assert f"auto: {default_of(comm)};" in repr(reducer)


@contextlib.contextmanager
def _interrupted_while_measuring(times):
    """So many signals, in the deciding round."""

    def handle(*_):
        raise Interrupted

    def measure(comm):
        # on a GPU backward ends on a thread of autograd's, where no handler runs
        if times == 2 and threading.current_thread() is not threading.main_thread():
            raise Interrupted
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGUSR2)
        return measure_costs(comm)

    measure_costs, before = autotune.measure_costs, signal.signal(signal.SIGUSR2, handle)
    try:
        with mock.patch.object(autotune, "measure_costs", measure):
            yield
    finally:
        assert signal.signal(signal.SIGUSR2, before) is handle


@on_ranks(2)
def test_another_model_is_measured_by_itself(comm):
    """The first is let go while its rounds are traced."""
    reducer = fastcomm.Reducer(comm, bucket_cap_mb="auto")
    for model in (mlp(), nn.Sequential(mlp(), nn.Linear(4, 4))):
        reducer.attach(model)
        for step in range(autotune.WARM_UP_ROUNDS + 1):
            backward(model, comm.rank, step)
        reducer.detach()
        assert reducer.recorder is None


@pytest.mark.parametrize("times", [1, 2])
@on_ranks(2)
def test_a_decision_that_is_interrupted_is_made_by_all_ranks_or_none(comm, times):
    """The first signal waits until it is made."""
    raised = None
    with _choosing(TINY_MB):
        _, (model, reducer) = _models(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(ROUNDS + 1):
            optimizer.zero_grad()
            with _interrupted_while_measuring(times if comm.rank == 1 else 0):
                try:
                    backward(model, comm.rank, step)
                except (Interrupted, fastcomm.AbandonedError) as error:
                    assert step == ROUNDS // 2 - 1 and raised is None
                    raised = type(error)
                    if times == 2:
                        comm.abandon()  # does nothing: it has been
            optimizer.step()
    victim = None if times == 1 else fastcomm.AbandonedError
    assert raised is (Interrupted if comm.rank == 1 else victim)
    chosen = f"{TINY_MB:g}" if times == 1 else default_of(comm)
    assert f"auto: {chosen};" in repr(reducer)
    reducer.check_in_sync(optimizer)


@on_ranks(2)
def test_ranks_with_another_overlap_come_to_one_choice(comm):
    def promise(step, planner, costs, delays, overlap, caps):
        return {float(default_of(comm)): 1.0, TINY_MB: 0.5 if overlap else 1.5}

    model = mlp()
    reducer = fastcomm.Reducer(comm, bucket_cap_mb="auto", overlap=comm.rank == 0).attach(model)
    with mock.patch.object(autotune, "predict_caps", promise):
        for step in range(ROUNDS // 2 + 1):
            backward(model, comm.rank, step)
    assert f"auto: {default_of(comm)};" in repr(reducer)


def _attach_with_different_sizes(comm):
    caps = ["auto", 25]
    fastcomm.Reducer(comm, bucket_cap_mb=caps[comm.rank]).attach(mlp())


def test_ranks_that_do_not_all_say_auto_are_told(ranks):
    ranks.raises(
        2,
        fastcomm.MismatchError,
        _attach_with_different_sizes,
        match="bucket_cap_mb is auto on rank 0 and 25 on rank 1",
        survives=True,
    )


@on_ranks(1)
def test_one_rank_has_nothing_to_choose(comm):
    reducer = fastcomm.Reducer(comm, bucket_cap_mb="auto").attach(mlp())
    assert f"bucket_cap_mb auto: {default_of(comm)};" in repr(reducer)


@on_ranks(1)
def test_what_cannot_be_chosen_is_refused(comm):
    with pytest.raises(ValueError, match="a number or \"auto\"; got 'automatic'"):
        fastcomm.Reducer(comm, bucket_cap_mb="automatic")


# What the model makes of it

MIB = 1 << 20


def _predicted(latency_s, bytes_per_s, delays):
    """Of 64 gradients of 4 MiB that become ready one after the other."""
    kinds = [(MIB, torch.float32, 4)] * 64
    gradients = tuple(Gradient(4 * MIB, (64 - i) / 64) for i in range(64))
    points = [(n, Cost(latency_s + n / bytes_per_s, n / bytes_per_s)) for n in (1, 1 << 30)]
    planner = autotune.planner_of(kinds, Options(25, "mean", None, 1))
    step = LocalStep(gradients, 1.0)
    return autotune.predict_caps(
        step, planner, MeasuredCosts(points), delays, overlap=True, caps=CAPS_MB
    )


def test_a_long_latency_asks_for_large_buckets():
    seconds = _predicted(latency_s=0.2, bytes_per_s=1e12, delays=False)
    assert min(seconds, key=seconds.get) >= 50


def test_a_slow_link_asks_for_small_buckets():
    seconds = _predicted(latency_s=1e-6, bytes_per_s=1e9, delays=False)
    assert min(seconds, key=seconds.get) <= 5


def test_where_communication_takes_the_core_the_size_hardly_matters():
    seconds = _predicted(latency_s=1e-6, bytes_per_s=1e9, delays=True)
    assert max(seconds.values()) <= 1.01 * min(seconds.values())


def test_a_trial_must_be_quicker():
    assert autotune.pays([0.9, 0.8], 1.0) and not autotune.pays([0.9, 1.0], 1.0)


def test_a_trial_must_be_quicker_by_more_than_noise():
    assert not autotune.pays([0.985], 1.0)
