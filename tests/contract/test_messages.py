"""send() and recv(): what one rank passes to another arrives as it is and in order, waits for no
collective, and fails by name on both. Channels stay as long as their communicator: that of all
tests gets none.
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, MismatchError, PeerLostError
from tests.contract import assert_ended, new_ranks
from tests.support.bodies import communicator, leave, note, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import on_ranks
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")

SHAPES = ((), (0,), (3, 5), (1_000_003,))


def message(src, dst, number, shape, dtype=torch.float32, device="cpu"):
    """What the number-th message from src to dst carries."""
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64, device=device)
    return (values % 50 + 7 * src + 3 * dst + number).reshape(shape).to(dtype)


@over(2, 3)
@on_ranks()
def test_what_is_sent_is_received_and_the_others_take_no_part(whole):
    with whole.split(0) as comm:
        src, dst = comm.world_size - 1, 0
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
            for number, shape in enumerate(SHAPES):
                expected = message(src, dst, number, shape, dtype, comm.device)
                if comm.rank == src:
                    assert comm.send(expected, dst) is None
                elif comm.rank == dst:
                    got = torch.zeros_like(expected)
                    assert comm.recv(got, src) is None
                    assert torch.equal(got, expected), (dtype, shape)
        check_all_reduce(comm)


@over(2, 3, shm=(2, 4))
@on_ranks()
def test_a_ring_of_messages_that_nobody_waits_for_yet_ends(whole):
    with whole.split(0) as comm:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        sent = [message(comm.rank, right, n, (20_000,), device=comm.device) for n in range(5)]
        got = [torch.zeros_like(one) for one in sent]
        works = [comm.send(one, right, async_op=True) for one in sent]
        works += [comm.recv(one, left, async_op=True) for one in got]
        check_all_reduce(comm)  # no message waits for it, nor it for them
        for work in works:
            work.wait()
            assert work.is_completed()
            work.wait()  # again
        for n, one in enumerate(got):
            assert torch.equal(one, message(left, comm.rank, n, (20_000,), device=comm.device)), n


@over(2)
@on_ranks()
def test_messages_of_one_rank_to_another_arrive_in_the_order_of_the_calls(whole):
    """Whether or not their ranks wait for each."""
    with whole.split(0) as comm:
        shapes = [(300_000,), (1,), (5, 7), (2,)]
        waits = [False, True, False, True] if comm.rank == 0 else [True, False, False, True]
        works = []
        got = []
        for n, (shape, waits_here) in enumerate(zip(shapes, waits, strict=True)):
            expected = message(0, 1, n, shape, device=comm.device)
            got.append(torch.zeros_like(expected))
            move = comm.send if comm.rank == 0 else comm.recv
            works.append(
                move(
                    expected if comm.rank == 0 else got[-1], 1 - comm.rank, async_op=not waits_here
                )
            )
        for work in works:
            if work is not None:
                work.wait()
        if comm.rank == 1:
            for n, (one, shape) in enumerate(zip(got, shapes, strict=True)):
                assert torch.equal(one, message(0, 1, n, shape, device=comm.device)), n


@over(3)
@on_ranks()
def test_the_parts_of_a_split_have_messages_of_their_own(comm):
    part = comm.split(None if comm.rank == 0 else 0, key=-comm.rank)
    if part is None:
        return
    with part:
        tensor = torch.full((4,), float(part.rank), device=comm.device)
        if part.rank == 0:  # comm's last rank
            part.send(tensor, 1)
        else:
            part.recv(tensor, 0)
        assert tensor.tolist() == [0.0] * 4


@over(2)
@on_ranks()
def test_bad_arguments_are_refused_before_the_other_rank_is_involved(whole):
    with whole.split(0) as comm:
        tensor = torch.ones(3, 2, device=comm.device)
        for move, name in ((comm.send, "dst"), (comm.recv, "src")):
            with pytest.raises(ValueError, match=f"{name} must be a rank from 0 to 1; got 2"):
                move(tensor, 2)
            with pytest.raises(ValueError, match=f"rank {comm.rank} cannot send to itself"):
                move(tensor, comm.rank)
            for async_op in (False, True):
                with pytest.raises(ValueError, match="contiguous"):
                    move(tensor.t(), 1 - comm.rank, async_op=async_op)
                with pytest.raises(TypeError, match="dtype must be one of"):
                    move(tensor.bool(), 1 - comm.rank, async_op=async_op)
                with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
                    move(3.0, 1 - comm.rank, async_op=async_op)


def _differ(place, async_op):
    with communicator(place, timeout=timedelta(seconds=20)) as comm:
        tensor = torch.ones(3 + place.rank)
        move = comm.send if place.rank == 0 else comm.recv
        with pytest.raises(MismatchError) as differ:  # over NCCL a later call tells
            for _ in range(100):
                work = move(tensor, 1 - place.rank, async_op=async_op)
                if work is not None:
                    work.wait()
                time.sleep(0.1)
        if comm.backend != "nccl":  # the channel goes on
            tensor = torch.full((5,), float(place.rank))
            move(tensor, 1 - place.rank)
            assert tensor.tolist() == [0.0] * 5
        check_all_reduce(comm)  # goes on
        return str(differ.value)


@pytest.mark.parametrize("async_op", [False, True])
@over(2)
def test_a_message_of_another_size_is_a_mismatch_on_both_ranks(transport, world_size, async_op):
    for text in values_of(new_ranks(transport, world_size, _differ, async_op)):
        assert text.startswith("a message from rank 0 (here rank 0) to rank 1 (here rank 1): ")
        assert "rank 0: broadcast of 3 float32" in text, text
        assert "rank 1: broadcast of 4 float32" in text, text


def _lose(place, how, is_met):
    comm = communicator(place, timeout=timedelta(seconds=20))
    tensor = torch.ones(1000)
    if is_met and place.rank:
        comm.send(tensor, 1) if place.rank == 2 else comm.recv(tensor, 2)
    if place.rank == 2:
        time.sleep(0.3)
        leave(place, comm, how)
        wait_for_note(place, "heard")
        return None
    began = time.monotonic()
    if place.rank == 1:
        with pytest.raises(PeerLostError) as lost:
            for _ in range(100):  # over NCCL a later call tells
                comm.recv(tensor, 2)
                time.sleep(0.1)
        assert lost.value.ranks == ((2,) if how == "killed" else ())
        assert time.monotonic() - began < 10
        note(place, heard=True)
        return str(lost.value)
    wait_for_note(place, "heard")
    comm.close()
    assert_ended(comm)
    return None


def cases():
    """That a process has ended on another host is known of one that has sent something."""
    for transport in ("shm", "nccl", "group", "hierarchical"):
        yield transport, "killed", True
        yield transport, "closes", True
    for transport in ("shm", "nccl", "group"):
        yield transport, "killed", False


@pytest.mark.parametrize("transport, how, is_met", list(cases()), indirect=["transport"])
def test_a_rank_that_will_not_send_any_more_is_named(transport, how, is_met):
    outcomes = new_ranks(transport, 3, _lose, how, is_met)
    _, text = values_of(outcomes[:2])
    begins = "a message from rank 2 (here rank 0) to rank 1 (here rank 1): rank 0 (pid "
    assert text.startswith(begins if is_met else "rank 2 (pid "), text


def _wait_for_nothing(place):
    comm = communicator(place, timeout=timedelta(seconds=2))
    if place.rank == 0:
        with pytest.raises(fastcomm.TimeoutError) as late:
            comm.recv(torch.ones(3), 1)
        with pytest.raises(fastcomm.TimeoutError):  # as what has failed stays so
            comm.recv(torch.ones(3), 1, async_op=True).wait()
        note(place, is_over=True)
        check_all_reduce(comm)
        check_all_reduce(comm)
        comm.close()
        return str(late.value)
    wait_for_note(place, "is_over")
    check_all_reduce(comm)
    with pytest.raises(FastcommError, match=r"rank 0 failed in recv\(\)"):
        comm.send(torch.ones(3), 0)
    check_all_reduce(comm)
    comm.close()
    with pytest.raises(FastcommError, match="rank 1 has closed this communicator"):
        comm.send(torch.ones(3), 0)
    return None


@over(2)
def test_a_message_that_is_never_sent_ends_with_the_timeout(transport, world_size):
    text, _ = values_of(new_ranks(transport, world_size, _wait_for_nothing))
    assert "waited 2 s in recv() for 2 ranks; missing: rank 1; every send()" in text


def _end_in_meeting(place, how):
    comm = communicator(place, timeout=timedelta(seconds=60))
    work = comm.recv(torch.ones(3), 1, async_op=True) if place.rank == 0 else None
    check_all_reduce(comm)
    if place.rank == 0:
        began = time.monotonic()
        if how == "is dropped":
            del comm
            gc.collect()
        else:
            leave(place, comm, how)
        with pytest.raises(FastcommError, match="rank 0 has (closed|aborted) this communicator"):
            work.wait()
        assert time.monotonic() - began < 10
        note(place, ended=True)
        return
    wait_for_note(place, "ended")
    with pytest.raises(FastcommError):
        comm.send(torch.ones(3), 0)


@pytest.mark.parametrize("how", ["closes", "aborts", "is dropped"])
@over(2)
def test_a_message_whose_ranks_have_yet_to_meet_ends_with_the_communicator(
    transport, world_size, how
):
    values_of(new_ranks(transport, world_size, _end_in_meeting, how))


def _close_meanwhile(place):
    comm = communicator(place, timeout=timedelta(seconds=20))
    tensor = torch.ones(3)
    comm.send(tensor, 1) if place.rank == 0 else comm.recv(tensor, 0)
    work = comm.recv(tensor, 0, async_op=True) if place.rank else None
    check_all_reduce(comm)
    began = time.monotonic()
    if place.rank == 0:
        comm.abort()
        return
    comm.close()
    with pytest.raises(FastcommError):
        work.wait()
    assert time.monotonic() - began < 10


@over(2)
def test_what_is_under_way_ends_with_the_communicator(transport, world_size):
    values_of(new_ranks(transport, world_size, _close_meanwhile))
