"""bucket_cap_mb="auto": the ranks choose together, and nothing but the buckets changes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import fastcomm
from fastcomm.reducer import plan
from fastcomm.reducer.options import DEFAULT_CAP_MB, NETWORK_CAP_MB
from tests.support.bodies import Interrupted
from tests.support.models import backward, mlp, seed
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("transport")

WINDOW = plan.WARM_UP_ROUNDS + plan.MEASURED_ROUNDS
ROUNDS = 3 * WINDOW  # with the default, with the other size, and with the default once more
TINY_MB = 0.0002


def default_of(comm):
    """As repr() has it."""
    return f"{NETWORK_CAP_MB if comm.crosses_network else DEFAULT_CAP_MB:g}"


def said_by(reducer):
    return repr(reducer).partition("auto: ")[2].partition(";")[0]


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
def _trying(*caps_mb):
    with mock.patch.object(plan, "CAPS_MB", caps_mb):
        yield


@contextlib.contextmanager
def _choosing(cap_mb, pays=True):
    """This size is tried, and pays or not."""
    fastest = (lambda *_: cap_mb) if pays else (lambda _, default_mb: default_mb)
    with _trying(cap_mb), mock.patch.object(plan, "fastest", fastest):
        yield


@on_ranks(2, 3)
def test_gradients_are_the_same_bits_before_and_after_the_buckets_change(comm):
    with _choosing(TINY_MB):
        pairs = _models(comm)
        optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model, _ in pairs
        ]
        for step in range(ROUNDS + 4):
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
            said.append(said_by(reducer))
    default = default_of(comm)
    tried = [default, f"{TINY_MB:g}", default]
    so_far = [f"{cap} so far" for cap in tried for _ in range(WINDOW)]
    assert said == [*so_far[1:], default]


@pytest.mark.parametrize("is_quick_on", [[0], [0, 1]], ids=["one rank", "all ranks"])
@on_ranks(2)
def test_the_slowest_rank_decides(comm, is_quick_on):
    """With the other size a step takes half as long, or twice."""
    _, (model, reducer) = _models(comm)
    with _trying(TINY_MB):
        reducer.refresh()
        seconds = {TINY_MB: 0.5 if comm.rank in is_quick_on else 2.0}
        median = SimpleNamespace(median=lambda _: seconds.get(reducer.core.planner.cap_mb, 1.0))
        with mock.patch.object(plan, "statistics", median):
            for step in range(ROUNDS):
                backward(model, comm.rank, step)
    assert said_by(reducer) == (f"{TINY_MB:g}" if is_quick_on == [0, 1] else default_of(comm))


@on_ranks(2)
def test_ranks_measure_and_come_to_one_choice(comm):
    with _trying(TINY_MB, 2 * TINY_MB):
        _, (model, reducer) = _models(comm)
        for step in range(ROUNDS + WINDOW):
            backward(model, comm.rank, step)
    said = said_by(reducer)
    assert "so far" not in said
    chosen = torch.tensor([float(said)])
    total = chosen.clone()
    comm.all_reduce(total)
    assert total == comm.world_size * chosen
    assert reducer.core.recorder is None


@on_ranks(2)
def test_where_every_size_gives_the_same_buckets_nothing_is_measured(comm):
    _, (_, reducer) = _models(comm)
    assert said_by(reducer) == default_of(comm)


@pytest.mark.parametrize("votes", [False, True], ids=["by hand", "vote"])
@on_ranks(2)
def test_a_rank_without_a_backward_takes_part_in_what_the_round_decides(comm, votes):
    """Where it votes to drop the step, the round decides nothing: the next one does."""
    decides = [n * WINDOW + (n - 1) * votes for n in (1, 2, 3)]
    with _choosing(TINY_MB):
        _, (model, reducer) = _models(comm, skip_nonfinite=votes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, ROUNDS + 3 * votes + 1):
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
        with mock.patch.object(plan, "_PATIENCE_ROUNDS", 1):
            for step in range(WINDOW + 1):
                assert f"auto: {default_of(comm)} so far" in repr(reducer)
                reducer.skip_step()
                backward(model, comm.rank, step)
    assert f"auto: {default_of(comm)};" in repr(reducer)


@contextlib.contextmanager
def _interrupted_while_deciding(times):
    """So many signals, in the deciding round."""

    def handle(*_):
        raise Interrupted

    def gather(*args):
        # on a GPU backward ends on a thread of autograd's, where no handler runs
        if times == 2 and threading.current_thread() is not threading.main_thread():
            raise Interrupted
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGUSR2)
        return gather_objects(*args)

    gather_objects, before = plan.gather_objects, signal.signal(signal.SIGUSR2, handle)
    try:
        with mock.patch.object(plan, "gather_objects", gather):
            yield
    finally:
        assert signal.signal(signal.SIGUSR2, before) is handle


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
            is_interrupted = comm.rank == 1 and step == ROUNDS - 1
            with _interrupted_while_deciding(times if is_interrupted else 0):
                try:
                    backward(model, comm.rank, step)
                except (Interrupted, fastcomm.AbandonedError) as error:
                    assert step == ROUNDS - 1 and raised is None
                    raised = type(error)
                    if times == 2:
                        comm.abandon()  # does nothing: it has been
            optimizer.step()
    victim = None if times == 1 else fastcomm.AbandonedError
    assert raised is (Interrupted if comm.rank == 1 else victim)
    chosen = f"{TINY_MB:g}" if times == 1 else default_of(comm)
    assert f"auto: {chosen};" in repr(reducer)
    reducer.check_in_sync(optimizer)


@on_ranks(1)
def test_one_rank_has_nothing_to_choose(comm):
    reducer = fastcomm.Reducer(comm, bucket_cap_mb="auto").attach(mlp())
    assert f"bucket_cap_mb auto: {default_of(comm)};" in repr(reducer)


@on_ranks(1)
def test_what_cannot_be_chosen_is_refused(comm):
    with pytest.raises(ValueError, match="a number or \"auto\"; got 'automatic'"):
        fastcomm.Reducer(comm, bucket_cap_mb="automatic")


def test_the_size_with_the_shortest_steps_is_kept():
    assert plan.fastest({25: 1.0, 5: 0.9, 100: 0.95}, 25) == 5


def test_a_size_must_save_more_than_noise():
    assert plan.fastest({25: 1.0, 5: 0.985}, 25) == 25
