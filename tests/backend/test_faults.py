"""How the backend "fastcomm" of torch.distributed ends when a rank is missing, wrong or dead."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from tests.support import process_groups
from tests.support.models import backward, mlp
from tests.support.outcomes import values_of
from tests.support.process_groups import start, world
from tests.support.ranks import fresh_ranks, on_ranks, torchrun_env

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


def _no_rank_0(place):
    start_env = {"init_method": "env://", "timeout": timedelta(seconds=2)}
    with pytest.raises((RuntimeError, OSError)):
        dist.init_process_group("fastcomm", **start_env)


def test_a_rank_without_rank_0_gives_up():
    assert fresh_ranks(1, _no_rank_0, env=torchrun_env(2)[1:])[0].kind == "returned"


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


@on_ranks(2)
def test_different_collectives_raise_on_both_ranks(comm):
    world()
    with pytest.raises(fastcomm.MismatchError, match="barrier"):
        if comm.rank:
            dist.barrier()
        else:
            dist.broadcast(torch.ones(3), 0)


def _different_models(place):
    start(place, timedelta(seconds=2))
    # Rank 1 finds it out, by torch's own comparison with rank 0, which goes on and waits for it.
    error, words = (
        (fastcomm.TimeoutError, "missing: rank 1")
        if place.rank == 0
        else (RuntimeError, r"sizes \[3, 4\] appears not to match sizes of the same param")
    )
    with pytest.raises(error, match=words):
        DistributedDataParallel(nn.Linear(4, 2 + place.rank))


def test_ddp_of_different_models_raises_on_both_ranks():
    values_of(fresh_ranks(2, _different_models))


def _one_is_killed(place):
    start(place)
    dist.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.monotonic()
    with pytest.raises(fastcomm.PeerLostError, match="rank 1 .*died"):
        dist.all_reduce(torch.ones(1000))
    return time.monotonic() - before


def test_the_others_hear_of_a_rank_that_was_killed():
    outcomes = fresh_ranks(3, _one_is_killed)
    assert outcomes[1].exitcode == -signal.SIGKILL
    # The first to notice names the dead one; who hears it from that one names both.
    assert all(outcomes[rank].value < 5 for rank in (0, 2)), outcomes


def _killed_in_backward(place):
    start(place)
    model = DistributedDataParallel(mlp())
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fastcomm.PeerLostError):
        backward(model, place.rank, 0)


def test_backward_raises_when_a_rank_was_killed():
    assert fresh_ranks(2, _killed_in_backward)[0].kind == "returned"


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


def _destroyed(place):
    start(place)
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(fastcomm.FastcommError, match="closed"):
        group.allreduce([torch.ones(2)])


def test_a_destroyed_group_says_so():
    values_of(fresh_ranks(2, _destroyed))


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


def _member_has_died(place):
    start(place)
    dist.barrier()
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if place.rank == 1:
        pid = dist.group.WORLD._cpu.comm.pids[2]
        before = time.monotonic()
        message = rf"rank 1 waits in new_group: rank 2 \(pid {pid}\) died"
        with pytest.raises(fastcomm.InitError, match=message):
            dist.new_group([1, 2])
        assert time.monotonic() - before < 5


def test_a_new_group_does_not_wait_for_a_rank_that_was_killed():
    outcomes = fresh_ranks(3, _member_has_died)
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


def _survivors_go_on(place):
    start(place)
    dist.barrier()
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fastcomm.PeerLostError):
        dist.all_reduce(torch.ones(3))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    assert tensor.tolist() == [2.0] * 3


def test_survivors_can_make_a_group_of_their_own():
    outcomes = fresh_ranks(3, _survivors_go_on)
    assert [outcome.kind for outcome in outcomes] == ["returned", "returned", "died"], outcomes
