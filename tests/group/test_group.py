"""backend="group": the communicator's contract over a torch.distributed group, and what the others
hear when a rank leaves. What the reducer needs of it is in tests/reducer.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastcomm
from fastcomm import FastcommError, MismatchError, PeerLostError, TimeoutError
from fastcomm.group.call import reduce_rows
from fastcomm.group.communicator import GroupCommunicator
from fastcomm.group.exchange import CARRIED_NBYTES, SMALL_NBYTES, Exchange
from tests.support import ranks as harness
from tests.support.ranks import Ranks, fresh_ranks, gloo, note, on_ranks, values_of
from tests.support.reference import (
    DTYPES,
    INTEGERS,
    OPS,
    assert_same_bits,
    check_all_reduce,
    check_async_collectives,
    integer_mean,
    reduced,
    shards_of,
)

# Of float32: empty; what travels with the announcement, and one more; what takes one exchange, and
# one more; of two, and no multiple of any number of ranks here.
SIZES = (
    0,
    1,
    37,
    CARRIED_NBYTES // 4,
    CARRIED_NBYTES // 4 + 1,
    SMALL_NBYTES // 4,
    SMALL_NBYTES // 4 + 1,
    65_537,
)


@pytest.fixture(autouse=True)
def over_group(ranks: Ranks) -> Iterator[None]:
    ranks.transport = "group"
    yield
    ranks.transport = "shm"


def communicator(place, **options):
    return fastcomm.init(
        "group",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        **options,
    )


def outcomes_of(world_size, body, *args):
    return fresh_ranks(world_size, body, *args, transport="group")


# Results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(1, 2, 3)
def test_all_reduce_is_the_reduction_in_rank_order(comm, dtype):
    for numel in SIZES:
        for op in OPS:
            check_all_reduce(comm, numel, dtype, op, "comm.empty", seed=numel)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_mean_of_integers_is_exact_where_their_sum_overflows(dtype, n):
    limits = torch.iinfo(dtype)
    near = [limits.min, limits.min + 1, -2, -1, 0, 1, 2, limits.max - 1, limits.max]
    values = torch.tensor([value for value in near if value >= limits.min], dtype=dtype)
    rows = torch.cartesian_prod(*[values] * n).view(-1, n).T.contiguous()
    assert_same_bits(reduce_rows(rows, "mean"), integer_mean(list(rows)))


@on_ranks(2, 3)
def test_reduce_scatter_single_keeps_the_ranks_own_part(comm):
    for part in SIZES:
        shards = shards_of(torch.bfloat16, comm.world_size, part * comm.world_size)
        out = torch.empty(part, dtype=torch.bfloat16)
        comm.reduce_scatter_single(out, shards[comm.rank].clone(), "mean")
        assert_same_bits(
            out, reduced([shard.view(comm.world_size, part)[comm.rank] for shard in shards], "mean")
        )


@on_ranks(2, 3)
def test_all_gather_single_concatenates_by_rank(comm):
    for numel in SIZES:
        shards = shards_of(torch.int32, comm.world_size, numel)
        out = torch.empty(numel * comm.world_size, dtype=torch.int32)
        comm.all_gather_single(out, shards[comm.rank])
        assert_same_bits(out, torch.cat(shards))


@on_ranks(2, 3)
def test_broadcast_copies_from_any_rank(comm):
    for src in range(comm.world_size):
        shards = shards_of(torch.float64, comm.world_size, 1000, seed=src)
        tensors = [shards[comm.rank].clone(), torch.tensor(float(comm.rank)), torch.empty(0)]
        comm.broadcast_all(tensors, src)
        assert_same_bits(tensors[0], shards[src])
        assert tensors[1].item() == src


def _arrive_one_after_the_other(comm):
    time.sleep(0.1 * comm.rank)
    before = time.monotonic()
    comm.barrier()
    return before, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(ranks):
    came, left = zip(*ranks(3, _arrive_one_after_the_other), strict=True)
    assert min(left) >= max(came)


@on_ranks(2, 3)
def test_any_number_of_collectives_may_be_under_way(comm):
    shards = [shards_of(torch.float32, comm.world_size, 97 * i * i, seed=i) for i in range(20)]
    tensors = [of_one[comm.rank].clone() for of_one in shards]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for tensor, of_one in zip(tensors, shards, strict=True):
        assert_same_bits(tensor, reduced(of_one, "sum"))


@on_ranks(2, 3)
def test_collectives_of_every_kind_may_be_under_way(comm):
    check_async_collectives(comm)


def _wait_for_a_late_rank(comm):
    tensor = torch.ones(5000)
    if comm.rank == 1:
        while not Path(harness._place.directory, "launched").exists():
            time.sleep(0.01)
        comm.all_reduce(tensor)
        return True
    work = comm.all_reduce(tensor, async_op=True)
    was_completed = work.is_completed()
    Path(harness._place.directory, "launched").touch()
    work.wait()
    return work.is_completed() and not was_completed


def test_an_async_all_reduce_does_not_wait_for_anybody(ranks):
    assert ranks(2, _wait_for_a_late_rank) == [True, True]


# Arguments. Rank 0 calls what is wrong, the others nothing.


BAD_CALLS = {
    "not contiguous": (
        ValueError,
        "contiguous",
        lambda comm: comm.all_reduce(torch.zeros(6, 4)[:, :2]),
    ),
    "elsewhere": (ValueError, "CPU", lambda comm: comm.all_reduce(torch.zeros(4, device="meta"))),
    "negative bit": (
        ValueError,
        "resolve_neg",
        lambda comm: comm.all_reduce(torch._neg_view(torch.ones(4))),
    ),
    "sparse": (ValueError, "CPU", lambda comm: comm.broadcast(torch.zeros(4).to_sparse())),
    "dtype": (TypeError, "int16", lambda comm: comm.all_reduce(torch.zeros(4, dtype=torch.int16))),
    "no tensor": (TypeError, "list", lambda comm: comm.all_reduce([1.0])),
    "op": (ValueError, "median", lambda comm: comm.all_reduce(torch.zeros(4), "median")),
    "out too small": (
        ValueError,
        "8 elements.*has 7",
        lambda comm: comm.all_gather_single(torch.zeros(7), torch.zeros(4)),
    ),
    "indivisible": (
        ValueError,
        "multiple of 2",
        lambda comm: comm.reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
    ),
    "two dtypes": (
        TypeError,
        "float64.*float32",
        lambda comm: comm.reduce_scatter_single(torch.zeros(2).double(), torch.zeros(4)),
    ),
    "source": (ValueError, "0 to 1.*2", lambda comm: comm.broadcast(torch.zeros(4), src=2)),
    "negative size": (ValueError, "-1", lambda comm: comm.empty(-1, dtype=torch.float32)),
    "dtype of empty": (TypeError, "bool", lambda comm: comm.empty(1, dtype=torch.bool)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@on_ranks(2)
def test_a_bad_argument_is_refused_before_any_peer_is_involved(comm, case):
    error, words, call = BAD_CALLS[case]
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            call(comm)
    check_all_reduce(comm)


# Ranks that disagree, or abandon

MISMATCHES = {
    "op": (
        lambda comm: comm.all_reduce(torch.zeros(9)),
        lambda comm: comm.all_reduce(torch.zeros(9), "max"),
        "op sum",
        "op max",
    ),
    "size": (
        lambda comm: comm.all_reduce(torch.zeros(9)),
        lambda comm: comm.all_reduce(torch.zeros(8)),
        "9 float32",
        "8 float32",
    ),
    "kind": (
        lambda comm: comm.all_reduce(torch.zeros(9)),
        lambda comm: comm.barrier(),
        "all_reduce of 9 float32",
        "barrier",
    ),
    "source": (
        lambda comm: comm.broadcast(torch.zeros(4), 0),
        lambda comm: comm.broadcast(torch.zeros(4), 1),
        "from rank 0",
        "from rank 1",
    ),
}


def _disagree(comm, case):
    usual, other, _, _ = MISMATCHES[case]
    (other if comm.rank == comm.world_size - 1 else usual)(comm)


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_disagree_all_hear_of_it_and_of_both_sides(ranks, case):
    _, _, usual, other = MISMATCHES[case]
    ranks.raises(
        3,
        MismatchError,
        _disagree,
        case,
        match=f"rank 0: .*{usual}.*rank 2: .*{other}",
        survives=True,
    )
    ranks(3, check_all_reduce)


@on_ranks(3)
def test_abandon_ends_the_round_on_all_ranks_and_the_next_one_is_as_good_as_new(comm):
    before = comm.n_abandoned
    for _ in range(20):
        if comm.rank == 1:
            comm.abandon()
        else:
            with pytest.raises(FastcommError, match="rank 1 abandoned"):
                works = [comm.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
        check_all_reduce(comm)
    assert comm.n_abandoned == before + 20


@on_ranks(3)
def test_several_ranks_may_abandon_at_once(comm):
    for abandoning in ((0, 1, 2), (0, 2)):
        work = comm.all_reduce(torch.ones(10), async_op=True)
        if comm.rank in abandoning:
            time.sleep(0.05 * comm.rank)
            comm.abandon()
        else:
            with pytest.raises(FastcommError, match="abandoned"):
                work.wait()  # good if the others' threads had begun it before they abandoned
                comm.barrier()
        check_all_reduce(comm)


@on_ranks(2)
def test_what_is_called_before_the_abandonment_is_known_is_not_taken_for_the_next_round(comm):
    if comm.rank == 0:
        comm.abandon()
    else:
        late = comm.all_reduce(torch.ones(10), async_op=True)
        while not late.is_completed():
            time.sleep(0.01)
        with pytest.raises(FastcommError, match="rank 0 abandoned"):
            comm.all_reduce(torch.ones(20), async_op=True)
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
    assert values_of(outcomes_of(2, _init_from_a_group_in_use)) == [("group", 2, {60_000})] * 2


def _go_through_a_group_itself(place):
    """As over a backend of which no second group can be made from a store."""
    with fastcomm.init("group", group=gloo()) as model:
        comm = GroupCommunicator(
            place.rank,
            place.world_size,
            0,
            model._notes,
            timedelta(seconds=20),
            [place.rank],
            Exchange(place.rank, place.world_size, gloo()),
        )
        for op in OPS:
            check_all_reduce(comm, 10_000, op=op)
        comm.broadcast(torch.ones(3))
        comm.close()
        dist.barrier()


def test_any_group_of_torch_distributed_will_do():
    values_of(outcomes_of(2, _go_through_a_group_itself))


# Peers that go away. The last rank does.


def _lose_a_peer(place, how):
    comm = communicator(place)
    check_all_reduce(comm)
    if place.rank == place.world_size - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        {"closes": comm.close, "aborts": comm.abort}[how]()
        time.sleep(1.5)
        return None
    before = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        while True:
            comm.all_reduce(torch.ones(100_000))
    seconds = time.monotonic() - before
    with pytest.raises(PeerLostError):
        comm.barrier()
    dead = (place.world_size - 1,) if how == "killed" else ()
    assert lost.value.ranks == comm.failure.ranks == dead
    assert comm.close() is None
    return str(lost.value), seconds


@pytest.mark.parametrize(
    "how, word", [("killed", "died"), ("closes", "closed"), ("aborts", "aborted")]
)
def test_a_peer_that_leaves_is_named_on_all_ranks_within_seconds(how, word):
    *others, _ = outcomes_of(3, _lose_a_peer, how)
    for message, seconds in values_of(others):
        assert re.search(rf"rank 2 \(pid \d+\) {word}", message), message
        assert seconds < 3


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
        announce, announced = comm._exchange.announce, []

        def announce_once(*arguments):
            if announced:  # that this rank abandons, too: what the others wait for
                threading.Event().wait()
            announced.append(True)
            return announce(*arguments)

        comm._exchange.announce = announce_once
        comm.all_reduce(torch.ones(3), async_op=True)
        while not Path(place.directory, "joins").exists():
            time.sleep(0.01)
        comm.abort()
        return
    with pytest.raises(PeerLostError, match="rank 2"):
        comm.abandon()


def test_a_peer_may_be_lost_while_the_ranks_meet():
    values_of(outcomes_of(3, _lose_a_peer_while_ranks_meet))


def _lose_rank_0(place):
    comm = communicator(place)
    if place.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        comm.all_reduce(torch.ones(100_000))


def test_the_rank_at_whose_store_all_have_met_may_be_the_one_that_dies():
    values_of(outcomes_of(3, _lose_rank_0)[1:])


def _miss_the_deadline(place):
    comm = communicator(place, timeout=timedelta(seconds=1))
    if place.rank == 1:
        time.sleep(4)
        with pytest.raises(FastcommError):
            comm.all_reduce(torch.ones(5000))
        return ""
    with pytest.raises(TimeoutError) as late:
        comm.all_reduce(torch.ones(5000))
    return str(late.value)


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    message, _ = values_of(outcomes_of(2, _miss_the_deadline))
    assert re.search(
        r"waited 1 s.*all_reduce of 5000 float32.*missing: rank 1 \(pid \d+\)", message
    ), message


def _fork(place):
    comm = communicator(place)
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except FastcommError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    check_all_reduce(comm)
    return status


def test_a_forked_child_is_told_that_the_communicator_is_its_parents():
    assert values_of(outcomes_of(2, _fork)) == [0, 0]


def _drop(place):
    comm = communicator(place)
    check_all_reduce(comm)
    del comm
    gc.collect()
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("fastcomm") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_communicator_that_nobody_holds_takes_its_threads_with_it():
    values_of(outcomes_of(2, _drop))
