"""backend="group" in what only it promises: groups of the user's, its thread, and how it meets
after an abandon.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastcomm
from fastcomm import AbandonedError, FastcommError, MismatchError, PeerLostError
from fastcomm.comm.transport import Part
from fastcomm.transports.group import work_queue
from fastcomm.transports.group.call import reduce_rows
from fastcomm.transports.group.exchange import FUSABLE_NBYTES, FUSED_NBYTES
from tests.support.bodies import communicator, gloo, meeting_place, note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.reference import INTEGERS, assert_same_bits, check_all_reduce, integer_mean

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("group")]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_mean_of_integers_is_exact_where_their_sum_overflows(dtype, n):
    limits = torch.iinfo(dtype)
    near = [limits.min, limits.min + 1, -2, -1, 0, 1, 2, limits.max - 1, limits.max]
    values = torch.tensor([value for value in near if value >= limits.min], dtype=dtype)
    rows = torch.cartesian_prod(*[values] * n).view(-1, n).T.contiguous()
    assert_same_bits(reduce_rows(rows, "mean"), integer_mean(list(rows)))


@on_ranks(2)
def test_what_was_called_before_abandon_and_has_not_begun_is_not_begun(comm):
    called = meeting_place() / f"called {comm.backend}"
    while comm.rank == 1 and not called.exists():
        time.sleep(0.01)
    time.sleep(0.3 * comm.rank)  # rank 0 waits in abandon(), its thread in the first of the works
    before = comm.number
    works = []
    with contextlib.suppress(AbandonedError):  # rank 1 may hear of it as it calls
        for op in ("sum", "max", "sum"):  # none of which is fused with the next
            works.append(comm.all_reduce(torch.ones(5000), op, async_op=True))
    if comm.rank == 0:
        while comm.number == before:
            time.sleep(0.01)
        called.touch()
        comm.abandon()
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(FastcommError, match="rank 0 (has )?abandoned"):
            work.wait()
    check_all_reduce(comm)


# All-reductions that wait are fused, as far as all ranks have come to them.


@contextlib.contextmanager
def _nothing_ahead():
    """The thread announces all works, one after the other."""
    before, work_queue.MOST_ANNOUNCED = work_queue.MOST_ANNOUNCED, 0
    try:
        yield
    finally:
        work_queue.MOST_ANNOUNCED = before


def _post_while_the_first_is_announced(comm, calls):
    """calls: functions that return works. Returns these, and how many collectives had been
    announced before each announcement.
    """
    announcer = comm._exchange.announcer
    announce, numbers, posted = announcer.announce, [], threading.Event()

    def announce_late(*arguments):
        posted.wait()
        numbers.append(comm.number + 1 - before)
        return announce(*arguments)

    comm.barrier()
    before = comm.number
    announcer.announce = announce_late
    try:
        with _nothing_ahead():
            works = [call() for call in calls]
            posted.set()
            for work in works:
                with contextlib.suppress(FastcommError):
                    work.wait()
    finally:
        announcer.announce = announce
    return works, numbers


def _reductions(comm, tensors, ops):
    return [
        functools.partial(comm.all_reduce, tensor, op, async_op=True)
        for tensor, op in zip(tensors, ops, strict=True)
    ]


@pytest.mark.transports("group", "hierarchical")
@on_ranks(3)
def test_what_waits_behind_an_all_reduce_is_fused_with_it(comm):
    calls = [
        (1000, torch.float32, "sum"),  # whatever waits behind it is not known yet
        (700, torch.float32, "mean"),
        (5000, torch.float32, "mean"),
        (3, torch.float32, "mean"),  # travels with its announcement
        (900, torch.float32, "mean"),
        (900, torch.float64, "mean"),
        (900, torch.float64, "max"),
        (901, torch.float64, "max"),
        (FUSABLE_NBYTES // 4, torch.float32, "max"),
        (FUSABLE_NBYTES // 4 + 1, torch.float32, "max"),  # goes alone
        (1000, torch.float32, "max"),
        *[(FUSABLE_NBYTES // 4, torch.float32, "max")] * (FUSED_NBYTES // FUSABLE_NBYTES),
    ]
    tensors = [
        torch.full((numel,), comm.rank + i, dtype=dtype)
        for i, (numel, dtype, _) in enumerate(calls)
    ]
    ops = [op for *_, op in calls]
    _, numbers = _post_while_the_first_is_announced(comm, _reductions(comm, tensors, ops))
    assert numbers == [1, 2, 4, 5, 6, 7, 9, 10, 11, 11 + FUSED_NBYTES // FUSABLE_NBYTES]
    kept = [entry.number for entry in comm.flight.entries()[-len(calls) :]]
    assert kept == list(range(kept[0], kept[0] + len(calls)))  # also of what is fused
    for i, (tensor, op) in enumerate(zip(tensors, ops, strict=True)):
        expected = {"sum": 3 * i + 3, "mean": i + 1, "max": i + 2}[op]
        assert_same_bits(tensor, torch.full_like(tensor, expected))
    check_all_reduce(comm)


@on_ranks(2)
def test_only_what_all_ranks_have_come_to_is_fused(comm):
    numels = [1000, 1001, 1002, 1003 + comm.rank, 1005, 1006]
    late = numels.pop() if comm.rank == 1 else 0
    tensors = [torch.full((numel,), comm.rank + 1.0) for numel in numels]
    ops = ["max", *["sum"] * (len(numels) - 1)]
    works, numbers = _post_while_the_first_is_announced(comm, _reductions(comm, tensors, ops))
    if late:
        comm.all_reduce(torch.ones(late))
    assert numbers[:4] == [1, 2, 4, 5]
    for i, (tensor, work) in enumerate(zip(tensors[:5], works, strict=False)):
        if i == 3:
            with pytest.raises(MismatchError, match="of 1003 .* of 1004 "):
                work.wait()
        assert tensor.unique().item() == {0: 2, 3: comm.rank + 1}.get(i, 3)
    check_all_reduce(comm)


@pytest.mark.transports("group", "hierarchical")
@on_ranks(2)
def test_buckets_that_wait_are_fused_if_all_ranks_count_alike(comm):
    part = Part(3.0 - 2 * comm.rank, 3.0 - 2 * comm.rank)  # 3 and 1
    launches = [
        ("sum", 1, None, ()),
        ("mean", 2, None, ()),
        ("mean", 3, None, ()),
        ("mean", 4, torch.bfloat16, ()),
        ("mean", 5, torch.bfloat16, ()),
        ("weighted mean", 6, None, (part,)),
        ("weighted mean", 7, None, (part,)),
        ("mean", 8, None, ()),
        ("mean", 9 + comm.rank, None, ()),
        ("mean", 11, None, ()),
        ("mean", 12, None, ()),
        ("mean", 13, None, ()),
    ]
    steps = [100 + i for i in range(11)] + [111 + comm.rank]  # each bucket has a checksum in it
    flats = [torch.full((300 + i,), comm.rank + i + 1.0) for i in range(len(launches))]
    buckets = [
        comm.bind_bucket(flat, [flat[:-1]], [0], wire_dtype=wire_dtype, label=label)
        for flat, (_, label, wire_dtype, _) in zip(flats, launches, strict=True)
    ]
    works, numbers = _post_while_the_first_is_announced(
        comm,
        [
            functools.partial(bucket.launch, op, [], step, *part)
            for bucket, (op, _, _, part), step in zip(buckets, launches, steps, strict=True)
        ],
    )
    assert numbers == [1, 2, 4, 5, 6, 7, 8, 9, 10, 12]
    for i in (8, 11):
        with pytest.raises(MismatchError, match="bucket"):
            works[i].wait()
    for i, (flat, (op, *_)) in enumerate(zip(flats, launches, strict=True)):
        if i not in (8, 11):
            expected = {"sum": 2 * i + 3, "mean": i + 1.5, "weighted mean": i + 1.25}[op]
            assert_same_bits(flat[:-1], torch.full_like(flat[:-1], expected))
            assert works[i].present() == [True]
    check_all_reduce(comm)


@pytest.mark.parametrize("moment", ["announced", "fused"])
@pytest.mark.transports("group", "hierarchical")
@on_ranks(3)
def test_what_is_fused_is_finished_by_a_rank_that_abandons(comm, moment):
    """Rank 1 does, while the second to fourth of its calls are announced, or fused."""
    exchange, posted, may_abandon = comm._exchange, threading.Event(), threading.Event()
    announcer = exchange.announcer
    announce, fuse = announcer.announce, exchange.fused_transfer_of

    def see_it_abandon():
        may_abandon.set()
        while comm.rank == 1 and comm._queue._own_abandonment() is None:
            time.sleep(0.001)

    def announce_late(*arguments):
        posted.wait()
        if moment == "announced" and comm.number == before + 1:
            see_it_abandon()
        return announce(*arguments)

    def fuse_late(*arguments):
        if moment == "fused":
            see_it_abandon()
        return fuse(*arguments)

    comm.barrier()
    before = comm.number
    announcer.announce, exchange.fused_transfer_of = announce_late, fuse_late
    try:
        ops = ["max", "sum", "sum", "sum", "max", "max"]
        tensors = [torch.full((1000,), comm.rank + 1.0) for _ in ops]
        calls = zip(tensors, ops, strict=True)
        with _nothing_ahead():
            works = [comm.all_reduce(tensor, op, async_op=True) for tensor, op in calls]
        posted.set()
        if comm.rank == 1:
            may_abandon.wait()
            comm.abandon()
        for work in works[:4]:
            work.wait()
        for work in works[4:]:
            with pytest.raises(FastcommError, match="rank 1 (has )?abandoned"):
                work.wait()
        comm.barrier()  # they have met
    finally:
        announcer.announce, exchange.fused_transfer_of = announce, fuse
    assert [tensor.unique().item() for tensor in tensors[:4]] == [3, 6, 6, 6]
    numbers = torch.empty(3, dtype=torch.int64)
    comm.all_gather_single(numbers, torch.tensor([comm.number]))
    assert numbers.unique().numel() == 1
    check_all_reduce(comm)


# Groups of the user's


def _init_from_a_group_in_use(place):
    group = gloo()
    with fastcomm.init("group", group=group) as comm:
        tensors = [torch.ones(30_000) for _ in range(5)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        ours = torch.ones(1000)
        dist.all_reduce(
            ours, group=group
        )  # in between: the communicator's thread is not in its way
        for work in works:
            work.wait()
        check_all_reduce(comm)
        return comm.backend, ours[0].item(), {tensor.sum().item() for tensor in tensors}


def test_the_user_may_go_on_using_the_group():
    assert (
        values_of(fresh_ranks(2, _init_from_a_group_in_use, transport="group"))
        == [("group", 2, {60_000})] * 2
    )


def _lose_a_peer_while_ranks_meet(place):
    """Rank 1 abandons, rank 0 joins it before it has heard of that, rank 2 is gone."""
    comm = communicator(place)
    comm.barrier()
    if place.rank == 0:
        work = comm.all_reduce(torch.ones(3), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        note(place, joins=True)
    elif place.rank == 2:
        announcer = comm._exchange.announcer
        announce, announced = announcer.announce, []

        def announce_once(*arguments):
            if announced:  # that this rank abandons, too: what the others wait for
                threading.Event().wait()
            announced.append(True)
            return announce(*arguments)

        announcer.announce = announce_once
        comm.all_reduce(torch.ones(3), async_op=True)
        while not Path(place.directory, "joins").exists():
            time.sleep(0.01)
        comm.abort()
        return
    with pytest.raises(PeerLostError, match="rank 2"):
        comm.abandon()


def test_a_peer_may_be_lost_while_the_ranks_meet():
    values_of(fresh_ranks(3, _lose_a_peer_while_ranks_meet, transport="group"))


OF_A_COMMUNICATOR = ("fastcomm group", "fastcomm connecting", "fastcomm watchdog")  # its threads


def _drop(place):
    comm = communicator(place)
    assert {one.name for one in threading.enumerate()} & set(OF_A_COMMUNICATOR)
    check_all_reduce(comm)
    del comm
    gc.collect()
    deadline = time.monotonic() + 60
    while any(one.name in OF_A_COMMUNICATOR for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_communicator_that_nobody_holds_takes_its_threads_with_it():
    values_of(fresh_ranks(2, _drop, transport="group"))
