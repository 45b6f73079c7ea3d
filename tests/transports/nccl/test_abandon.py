"""abandon() over NCCL: notes tell the other ranks; all end their communicators and meet again."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, NcclError, PeerLostError
from tests.fakes.stand_ins import assert_all_ended, failing, loaded
from tests.support.bodies import finish_together, leave, raised
from tests.support.models import (
    SMALL_BUCKETS,
    Fail,
    assert_gradients,
    backward,
    batch,
    mean_gradients,
    mlp,
)
from tests.support.outcomes import values_of
from tests.transports.nccl import SOON, communicator, outcomes_of


def _fragile_backward(model, rank, step, fails):
    """Raises, where it `fails`, when the gradients of the last layers are under way."""
    x, y = batch(rank, step)
    torch.nn.functional.mse_loss(model[2:](Fail.apply(model[:2](x), fails)), y).backward()


def _fail_in_backward(place, streams, *unlucky):
    """Backward fails in step i on the ranks of unlucky[i]. Returns what this rank heard of it, and
    how often.
    """
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, streams=streams, **SMALL_BUCKETS).attach(model)
    heard = []
    for step, who in enumerate(unlucky):
        model.zero_grad()
        expected = mean_gradients(
            model, place.world_size, lambda replica, rank, step=step: backward(replica, rank, step)
        )
        try:
            _fragile_backward(model, place.rank, step, place.rank in who)
        except RuntimeError as error:
            heard.append((step, str(error)))
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            assert_gradients(model, expected)
        finish_together(comm)  # else an early rank's next failure could end a late one's backward
    assert loaded("nccl").stand_in_live_comms() == streams
    return heard, comm.n_abandoned


@pytest.mark.parametrize("streams", [1, 2])
def test_backwards_that_raise_on_one_rank_or_several_cost_one_step(streams):
    unlucky = (), (0, 2), (0, 1, 2), (0, 1), (), (2,), (1, 2), ()
    outcomes = values_of(outcomes_of(3, _fail_in_backward, streams, *unlucky))
    for rank, (heard, n_abandoned) in enumerate(outcomes):
        assert [step for step, _ in heard] == [step for step, who in enumerate(unlucky) if who]
        assert n_abandoned == len(heard)
        message = dict(heard)[5]
        assert message == "out of luck" if rank == 2 else "rank 2 abandoned" in message


def _leave_before_the_ranks_meet_anew(place, how):
    comm = communicator(place)
    if place.rank == 1:
        comm.abandon()
        time.sleep(1)
        leave(place, comm, how)
        time.sleep(2)
        return None
    with pytest.raises(FastcommError, match="rank 1 abandoned"):
        comm.all_reduce(torch.ones(10))
    message, seconds = raised(PeerLostError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < 4
    assert_all_ended()
    return message


@pytest.mark.parametrize(
    "how, words", [("killed", "died"), ("closes", "closed"), ("aborts", "aborted")]
)
def test_a_peer_that_leaves_before_the_ranks_meet_anew_is_named(how, words):
    (message,) = values_of(outcomes_of(2, _leave_before_the_ranks_meet_anew, how)[:1])
    assert "rank 1" in message and words in message


def _fail_to_meet_anew(place):
    comm = communicator(place)
    if place.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            comm.all_reduce(torch.ones(10))
    with failing("ncclCommInitRankConfig", 2) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(NcclError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < 4
    with pytest.raises(NcclError):
        comm.barrier()
    return message


def test_ranks_that_cannot_meet_anew_all_hear_why():
    for message in values_of(outcomes_of(2, _fail_to_meet_anew)):
        assert "ncclCommInitRankConfig failed with code 2" in message


def _close_after_the_ranks_have_met_anew(place):
    comm = communicator(place)
    if place.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            comm.all_reduce(torch.ones(10))  # which rank 1 has never launched
    comm.all_reduce(torch.ones(10))
    if place.rank == 0:
        comm.close()
        return None
    return raised(PeerLostError, lambda: comm.all_reduce(torch.ones(10)))


def test_numbers_begin_anew_when_the_ranks_have_met():
    message, seconds = values_of(outcomes_of(2, _close_after_the_ranks_have_met_anew))[1]
    # The ranks' meeting is number 1.
    assert "rank 0" in message and "waits for collective number 3" in message
    assert seconds < SOON
