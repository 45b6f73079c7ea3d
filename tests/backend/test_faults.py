"""How the backend "fastcomm" of torch.distributed ends when a rank is missing, wrong or dead."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fastcomm
from tests.support import process_groups
from tests.support.outcomes import values_of
from tests.support.process_groups import start, world
from tests.support.ranks import fresh_ranks, on_ranks

ranks = process_groups.ranks  # a pool of this module's own


def _rank_2_does_not_come(place):
    if place.rank == 2:
        return 0.0
    before = time.monotonic()
    with pytest.raises(fastcomm.InitError, match="for 3 ranks; missing: rank 2"):
        start(place, timedelta(seconds=2))
    return time.monotonic() - before


def test_a_rank_that_is_missing_at_init_is_named():
    outcomes = fresh_ranks(3, _rank_2_does_not_come)
    assert all(outcome.kind == "returned" and outcome.value < 4 for outcome in outcomes), outcomes


@on_ranks(2)
def test_tensors_that_differ_raise_on_both_ranks(comm):
    world()
    with pytest.raises(fastcomm.MismatchError, match="rank 0: .* of 4 .*rank 1: .* of 5 "):
        dist.all_reduce(torch.ones(4 + comm.rank))
    with pytest.raises(fastcomm.MismatchError, match="float32 .*float64"):
        dist.all_reduce(
            torch.ones(4, dtype=(torch.float32, torch.float64)[comm.rank]), async_op=True
        ).wait()
    dist.barrier()


def _one_is_late(place):
    start(place, timedelta(seconds=1))
    if place.rank == 0:
        with pytest.raises(fastcomm.TimeoutError, match="waited 1 s"):
            dist.all_reduce(torch.ones(100_000))
    else:
        time.sleep(2)
        with pytest.raises(fastcomm.PeerLostError, match="rank 0"):
            dist.all_reduce(torch.ones(100_000))


def test_the_timeout_of_init_is_that_of_every_collective():
    values_of(fresh_ranks(2, _one_is_late))


@on_ranks(2)
def test_a_destroyed_group_says_so(comm):
    world()
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    with pytest.raises(fastcomm.FastcommError, match="closed"):
        group.allreduce([torch.ones(2)])


def _abort(place):
    start(place)
    dist.barrier()
    if place.rank == 1:
        dist.distributed_c10d._abort_process_group()
    else:
        with pytest.raises(fastcomm.PeerLostError, match="rank 1 .*aborted"):
            dist.all_reduce(torch.ones(4))


def test_abort_ends_what_the_others_wait_for():
    values_of(fresh_ranks(2, _abort))


def _member_does_not_come(place):
    start(place)
    if place.rank == 1:
        message = r"rank 1 waited 1 s in new_group for \d ranks; missing: rank 2"
        with pytest.raises(fastcomm.InitError, match=message):
            dist.new_group([1, 2], timeout=timedelta(seconds=1))
    dist.barrier()


def test_a_rank_that_is_missing_in_a_new_group_is_named_by_its_number_of_all():
    values_of(fresh_ranks(3, _member_does_not_come))


def _outlive_rank_2(place):
    start(place)
    dist.barrier()
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.monotonic()
    with pytest.raises(fastcomm.PeerLostError, match="rank 2 .*died"):
        dist.all_reduce(torch.ones(1000))
    assert time.monotonic() - before < 5
    if place.rank == 0:
        dist.new_group([1, 2])
    else:
        pid = dist.group.WORLD._cpu.comm.processes[2].pid
        message = rf"rank 1 waits in new_group: rank 2 \(pid {pid}\) died"
        with pytest.raises(fastcomm.InitError, match=message):
            dist.new_group([1, 2])
        assert time.monotonic() - before < 10
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    assert tensor.tolist() == [2.0] * 3


def test_the_others_hear_of_a_rank_that_was_killed_and_make_a_group_of_their_own():
    outcomes = fresh_ranks(3, _outlive_rank_2)
    assert [outcome.kind for outcome in outcomes] == ["returned", "returned", "died"], outcomes


def _died_before_cuda(place):
    start(place)
    dist.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message = r"rank 0 waits in the first collective on cuda:0: rank 1 \(pid \d+\) died"
    with pytest.raises(fastcomm.InitError, match=message):
        dist.group.WORLD._nccl_on(torch.device("cuda:0"))  # the ranks meet before CUDA is asked


def test_the_first_collective_on_cuda_does_not_wait_for_a_rank_that_was_killed():
    assert fresh_ranks(2, _died_before_cuda)[0].kind == "returned"
