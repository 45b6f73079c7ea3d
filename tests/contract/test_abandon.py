"""abandon(): a rank that cannot go on ends the round on all, and the next one is as good as new."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from fastcomm import AbandonedError, FastcommError
from tests.contract import new_ranks
from tests.support.bodies import communicator, finish_together, hear_of_it
from tests.support.outcomes import values_of
from tests.support.ranks import on_ranks
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


@over(3)
@on_ranks()
def test_abandon_ends_the_round_on_all_ranks_and_the_next_one_is_as_good_as_new(comm):
    before = comm.n_abandoned
    rounds = 5 if comm.backend == "nccl" else 20  # over NCCL the ranks connect again each time
    for _ in range(rounds):
        if comm.rank == 1:
            comm.abandon()
        else:
            with pytest.raises(AbandonedError, match="rank 1 abandoned"):
                works = [comm.all_reduce(torch.ones(50_000), async_op=True) for _ in range(2)]
                many = [torch.ones(1), torch.ones(50_000)]
                works.append(comm.all_reduce_coalesced(many, async_op=True))
                for work in works:
                    work.wait()
                hear_of_it(comm)
        check_all_reduce(comm)
        finish_together(comm)
    assert comm.n_abandoned == before + rounds


@over(3)
@on_ranks()
def test_several_ranks_may_abandon_at_once(comm):
    for abandoning in ((0, 1, 2), (0, 2)):
        work = comm.all_reduce(torch.ones(10), async_op=True)
        finish_together(comm)
        if comm.rank in abandoning:
            time.sleep(0.05 * comm.rank)
            comm.abandon()
        else:
            with pytest.raises(FastcommError, match="abandoned"):
                work.wait()  # good if the others had begun it before they abandoned
                comm.barrier()
                hear_of_it(comm)
        check_all_reduce(comm)
        finish_together(comm)


@over(2)
@on_ranks()
def test_a_round_may_be_abandoned_twice_before_the_ranks_have_met_for_it(comm):
    before = comm.n_abandoned
    for _ in range(2):
        for _ in range(2):
            if comm.rank == 1:
                comm.abandon()
            else:
                with pytest.raises(AbandonedError, match="rank 1 abandoned"):
                    comm.all_reduce(torch.ones(10))
                    hear_of_it(comm)
        check_all_reduce(comm)
        finish_together(comm)
    assert comm.n_abandoned == before + 4


class _Activations:
    pass


def _reduce(comm, activations):
    comm.all_reduce(torch.ones(10))
    hear_of_it(comm)


def _poll(comm, activations):
    comm.all_reduce(torch.ones(10), async_op=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        comm.check()


@pytest.mark.parametrize("hear", [_reduce, _poll])
@over(2)
@on_ranks()
def test_an_abandonment_does_not_keep_what_the_frames_held_that_heard_of_it(comm, hear):
    if hear is _poll and comm.backend == "shm":
        return  # which does not hear of it by asking
    if comm.rank == 1:
        comm.abandon()
    else:
        activations = _Activations()
        alive = weakref.ref(activations)
        with pytest.raises(AbandonedError):
            hear(comm, activations)
        del activations
        gc.collect()
        assert alive() is None
    finish_together(comm)


def _outcome_of(comm, work):
    """Waits as a loop does whose one handler abandons after any exception."""
    try:
        work.wait()
        return "good"
    except FastcommError as error:
        comm.abandon()
        return type(error).__name__


def _works_before_an_abandonment(place, is_late):
    with communicator(place) as comm:
        before = comm.n_abandoned
        if is_late and comm.rank != 1:
            time.sleep(0.2)
        numbers = [torch.full((n,), float(comm.rank)) for n in (1, 50_000)]
        works = [comm.all_reduce(one, async_op=True) for one in numbers]
        if comm.rank == 1:
            comm.abandon()
        else:
            with pytest.raises(AbandonedError):
                comm.all_reduce(torch.ones(10))
                hear_of_it(comm)
        outcomes = [_outcome_of(comm, work) for work in works]
        for outcome, number in zip(outcomes, numbers, strict=True):
            assert outcome != "good" or number[0] == sum(range(comm.world_size))
        check_all_reduce(comm)
        assert comm.n_abandoned == before + 1
        return outcomes


@pytest.mark.parametrize("is_late", [False, True])
@over(3)
def test_works_posted_before_an_abandonment_end_alike_on_all_ranks(transport, world_size, is_late):
    """Also on the rank that abandons, whose handler does not abandon once more for them."""
    outcomes = values_of(new_ranks(transport, world_size, _works_before_an_abandonment, is_late))
    assert outcomes == [outcomes[0]] * world_size
    assert set(outcomes[0]) <= {"good", "AbandonedError"}


def _one_hears_and_closes(place, is_late):
    comm = communicator(place)
    comm.barrier()
    try:
        if place.rank == 1:
            if is_late:
                time.sleep(0.1)
            comm.abandon()
        else:
            with pytest.raises(AbandonedError):
                comm.barrier()
                hear_of_it(comm)
        if place.rank:
            comm.barrier()
        return "closed"
    except FastcommError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        comm.close()


@pytest.mark.parametrize("is_late", [False, True])
@over(3)
def test_who_closes_when_it_hears_of_an_abandonment_is_named(transport, world_size, is_late):
    """It has left while the ranks meet, or after that: the others say who it was."""
    first, *others = values_of(new_ranks(transport, world_size, _one_hears_and_closes, is_late))
    assert first == "closed"
    for told in others:
        assert told.startswith("PeerLostError: rank 0 (pid "), told
        assert "closed its communicator" in told


@over(3)
@on_ranks()
def test_works_that_others_had_abandoned_end_nothing_of_the_next_round(comm):
    """Though they are waited for in it. This rank has abandoned by itself, too."""
    works = []
    try:
        if comm.rank == 1:  # it may hear of the others before
            works += [comm.all_reduce(torch.ones(n), async_op=True) for n in (1, 50_000)]
        raise ValueError("bad batch")
    except Exception:
        comm.abandon()
    numbers = torch.ones(3)
    following = comm.all_reduce(numbers, async_op=True)
    for work in works:
        with pytest.raises(AbandonedError):
            work.wait()
    following.wait()
    assert numbers.tolist() == [comm.world_size] * 3
    finish_together(comm)
