"""Calls that are announced, and whose data is sent, while others run: what a rank has
sent must come to an end whatever the others call.
"""

from __future__ import annotations

import functools
import threading
import time
from unittest import mock

import pytest
import torch

from fastcomm import AbandonedError, MismatchError
from fastcomm.comm.transport import Part
from fastcomm.transports.group import work_queue
from fastcomm.transports.group.wire import Wire
from tests.support.bodies import communicator, note, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.reference import check_all_reduce
from tests.support.transports import TRANSPORTS_OVER_TORCH

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*TRANSPORTS_OVER_TORCH),
]

LARGE = 600_000  # float32: more than what is fused with others


def buckets_of(comm, n, wire_dtype=None):
    """n of them, which hold rank + 1 everywhere."""
    flats = [torch.full((LARGE + i,), comm.rank + 1.0) for i in range(n)]
    return flats, [
        comm.bind_bucket(flat, [flat[:-1]], [0], wire_dtype=wire_dtype, label=1 + i)
        for i, flat in enumerate(flats)
    ]


def assert_holds(flat, value):
    """The gradients of a bucket of buckets_of(), but for a rounding of its wire's scale."""
    torch.testing.assert_close(flat[:-1], torch.full_like(flat[:-1], value), rtol=1e-6, atol=0)


each_wire = pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8], ids=str)


@each_wire
@on_ranks(1, 2, 3)
def test_many_buckets_may_run_at_once(comm, wire_dtype):
    flats, buckets = buckets_of(comm, 2 * work_queue.MOST_RUNNING + 1, wire_dtype)
    for _ in range(2):
        for flat in flats:
            flat.fill_(comm.rank + 1)
        works = [bucket.launch("sum", []) for bucket in buckets]
        for work in reversed(works):
            work.wait()
        for flat in flats:
            assert_holds(flat, comm.world_size * (comm.world_size + 1) / 2)


@on_ranks(2)
def test_more_calls_wait_than_are_announced(comm):
    tensors = [torch.full((70_000,), float(i)) for i in range(work_queue.MOST_ANNOUNCED + 3)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    assert [tensor.unique().item() for tensor in tensors] == [2 * i for i in range(len(tensors))]


@on_ranks(3)
def test_ranks_that_call_different_collectives_leave_nothing_in_flight(comm):
    for numel in (LARGE + (comm.rank == 1), LARGE):
        mine = "max" if comm.rank == 2 else "sum"
        with pytest.raises(MismatchError):
            comm.all_reduce(torch.ones(numel), mine)
        check_all_reduce(comm, LARGE)
    if comm.rank == 0:
        call = functools.partial(comm.all_reduce, torch.ones(LARGE))
    else:
        call = functools.partial(comm.barrier)
    with pytest.raises(MismatchError):
        call()
    check_all_reduce(comm, LARGE)


@each_wire
@on_ranks(2)
def test_a_bucket_is_of_use_after_a_mismatch_though_the_other_rank_is_late(comm, wire_dtype):
    flats, buckets = buckets_of(comm, 2, wire_dtype)
    drain, exchange = comm._exchange.drain, comm._exchange

    def drain_late(gathered):
        time.sleep(0.3 * comm.rank)
        drain(gathered)

    with (
        mock.patch.object(exchange, "drain", drain_late),
        pytest.raises(MismatchError, match="bucket"),
    ):
        buckets[comm.rank].launch("sum", []).wait()
    for flat, bucket in zip(flats, buckets, strict=True):
        flat.fill_(comm.rank + 1)
        bucket.launch("sum", []).wait()
        assert_holds(flat, 3)


@on_ranks(2)
def test_no_other_thread_waits_while_a_bucket_is_encoded(comm):
    (flat,), (bucket,) = buckets_of(comm, 1, torch.int8)
    encode, others, are_over = Wire.encode, [], []

    def encode_slowly(*arguments):
        if not others:
            others.append(threading.Thread(target=check_all_reduce, args=(comm, LARGE)))
            others[0].start()
            others[0].join(timeout=5)
            are_over.append(not others[0].is_alive())
        encode(*arguments)

    with mock.patch.object(Wire, "encode", encode_slowly):
        bucket.launch("sum", []).wait()
    others[0].join()
    assert are_over == [True]
    assert_holds(flat, 3)


@on_ranks(2)
def test_a_mismatch_of_wires_leaves_nothing_in_flight(comm):
    """What is sent of one bucket has other sizes on each rank."""
    flats, (bucket,) = buckets_of(comm, 1, torch.int8 if comm.rank else None)
    with pytest.raises(MismatchError, match="int8"):
        bucket.launch("sum", []).wait()
    check_all_reduce(comm, LARGE)


@on_ranks(2)
def test_what_another_thread_calls_behind_an_abandonment_is_of_the_next_round(comm):
    numbers = torch.ones(LARGE)
    if comm.rank == 0:
        abandoning = threading.Thread(target=comm.abandon)
        abandoning.start()
        time.sleep(0.1)
        work = comm.all_reduce(numbers, async_op=True)
        abandoning.join()
        work.wait()
    else:
        time.sleep(0.3)
        with pytest.raises(AbandonedError):
            comm.barrier()
        comm.all_reduce(numbers)
    assert (numbers == 2).all()


def _abandon_with_buckets_announced(place):
    """Rank 0 has launched five buckets, rank 1 two."""
    comm = communicator(place)
    comm.barrier()
    flats, buckets = buckets_of(comm, 5)
    if place.rank == 0:
        works = [bucket.launch("sum", []) for bucket in buckets]
        note(place, launched=True)
    else:
        wait_for_note(place, "launched")
        works = [bucket.launch("sum", []) for bucket in buckets[:2]]
        comm.abandon()
        works[0].wait()
    outcomes = []
    for work in works:
        try:
            work.wait()
            outcomes.append("well")
        except AbandonedError:
            outcomes.append("abandoned")
    results = [flat[:-1].unique().tolist() for flat in flats[:2]]
    flats[0].fill_(1)
    buckets[0].launch("sum", []).wait()
    return outcomes, results, flats[0][:-1].unique().item()


def test_what_all_ranks_have_announced_ends_well_though_one_of_them_abandons(transport):
    outcomes = fresh_ranks(2, _abandon_with_buckets_announced, transport=transport)
    first, second = values_of(outcomes)
    assert first == (["well"] * 2 + ["abandoned"] * 3, [[3.0]] * 2, 2)
    assert second == (["well"] * 2, [[3.0]] * 2, 2)


@on_ranks(3)
def test_a_rank_that_hears_of_an_abandonment_has_nothing_in_flight_behind_it(comm):
    for culprit in range(3):
        _, buckets = buckets_of(comm, 4)
        if comm.rank == culprit:
            comm.abandon()
        else:
            with pytest.raises(AbandonedError):
                works = [bucket.launch("sum", []) for bucket in buckets]
                for work in works:
                    work.wait()
        check_all_reduce(comm, LARGE)


@each_wire
@on_ranks(2)
def test_a_vote_leaves_nothing_in_flight(comm, wire_dtype):
    for voter in (0, 1):
        _, (bucket,) = buckets_of(comm, 1, wire_dtype)
        work = bucket.launch("sum", [], part=Part(votes=comm.rank == voter))
        work.wait()
        assert work.is_skipped()
        check_all_reduce(comm, LARGE)


@each_wire
@on_ranks(3)
def test_a_shadow_takes_part_with_zeros(comm, wire_dtype):
    flats, (bucket,) = buckets_of(comm, 1, wire_dtype)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.1)  # the others' data is in flight
        assert not comm.follow()
    else:
        bucket.launch("mean", []).wait()
        assert_holds(flats[0], 2)
    check_all_reduce(comm, LARGE)
