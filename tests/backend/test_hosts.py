"""The backend "fastcomm" of torch.distributed among ranks that take each other for ranks of several
hosts.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import fastcomm
from tests.support import process_groups
from tests.support.models import backward, mlp
from tests.support.outcomes import values_of
from tests.support.process_groups import gloo, start, values, world
from tests.support.ranks import fresh_ranks, on_ranks

ranks = process_groups.ranks  # a pool of this module's own
# Even and odd ranks take each other for ranks of two hosts.
pytestmark = [pytest.mark.transports("hierarchical"), pytest.mark.usefixtures("transport")]


# Collectives


@on_ranks(3)
def test_ranks_of_several_hosts_reduce_in_each_of_them_first(comm):
    world()
    n = comm.world_size
    assert dist.group.WORLD._cpu.comm.backend == "hierarchical"
    integers = torch.tensor([3 * comm.rank] * 5)
    dist.all_reduce(integers, dist.ReduceOp.AVG)
    assert integers.tolist() == [3 * (n - 1) // 2] * 5
    part = torch.zeros(2)
    columns = torch.ones(300, 1000).t()
    works = [
        dist.reduce_scatter_tensor(part, torch.arange(2.0 * n), async_op=True),
        dist.all_reduce(columns, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    assert torch.equal(part, n * torch.arange(2.0 * n).view(n, 2)[comm.rank])
    assert bool((columns == n).all())


@on_ranks(3)
def test_what_is_only_moved_goes_to_gloo(comm):
    world()
    communicator = world()._cpu.comm
    before = communicator.number
    moved = torch.full((3,), float(comm.rank))
    dist.broadcast(moved, 1)
    everyone = torch.zeros(3 * comm.world_size)
    dist.all_gather_into_tensor(everyone, moved)
    assert everyone.tolist() == [1.0] * 3 * comm.world_size
    parts = [torch.zeros(3) for _ in range(comm.world_size)]
    dist.all_gather(parts, moved)
    assert torch.stack(parts).tolist() == [[1.0] * 3] * comm.world_size
    assert communicator.number == before  # the communicator has not been asked
    dist.all_reduce(moved)
    assert communicator.number == before + 1


@on_ranks(2)
def test_what_is_chained_to_a_future_may_call_collectives(comm):
    world()
    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    # What is chained may reduce further, and wait for it.
    chained = future.then(
        lambda one: dist.all_reduce(one.value()[0], async_op=True).get_future().wait()[0]
    )
    assert chained.wait().tolist() == [4.0] * 3


# DDP


def trained(comm, hook=None, group=None):
    """A small model after a few steps of DDP with many buckets, and how far its ranks are apart."""
    model = DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.0005)
    if hook is powerSGD_hook:
        model.register_comm_hook(
            PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=0.5), hook
        )
    elif hook is not None:
        model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


@on_ranks(3)
def test_ddp_and_its_hooks_train(comm):
    world()
    wanted = trained(comm, group=gloo())
    torch.testing.assert_close(trained(comm), wanted)
    torch.testing.assert_close(
        trained(comm, default_hooks.fp16_compress_hook), wanted, rtol=1e-2, atol=1e-3
    )
    compressed = trained(comm, powerSGD_hook)  # over Gloo it hangs where there are several buckets
    highest, lowest = compressed.clone(), compressed.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    assert torch.equal(highest, lowest)
    torch.testing.assert_close(compressed, wanted, rtol=0, atol=0.1)


@on_ranks(2)
def test_ddp_computes_while_a_bucket_is_under_way(comm):
    world()
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    model = DistributedDataParallel(nn.Sequential(first, last), bucket_cap_mb=1e-5)
    # The second backward has a bucket for each layer. Rank 1 comes only after rank 0 has left the
    # last layer behind.
    first.register_full_backward_hook(
        lambda *_: dist.send(torch.zeros(1), 1) if comm.rank == 0 else None
    )
    for _ in range(2):
        loss = model(torch.ones(1, 4)).sum()
        if comm.rank == 1:
            dist.recv(torch.zeros(1), 0)
        loss.backward()
    del model


# When it goes wrong


@on_ranks(2)
def test_a_wait_ends_at_its_own_timeout(comm):
    world()
    tensor = values(comm, 9)
    if comm.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(fastcomm.TimeoutError, match="waited 0.1 s"):
            work.wait(timedelta(seconds=0.1))
        dist.send(torch.zeros(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(tensor)
    assert torch.equal(
        tensor, ((torch.arange(9) * 2) % 5 + 1 + (torch.arange(9) * 3) % 5 + 1).float()
    )


def _killed_in_backward(place):
    start(place)
    model = DistributedDataParallel(mlp())
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.monotonic()
    # A future carries the text of an error, torch's C++ makes a RuntimeError of it.
    with pytest.raises(RuntimeError, match="PeerLostError: .*rank 1"):
        backward(model, place.rank, 0)
    assert time.monotonic() - before < 20


def test_backward_raises_when_a_rank_was_killed():
    values_of(fresh_ranks(2, _killed_in_backward, transport="hierarchical"), 1)


def _member_has_died_elsewhere(place):
    start(place)
    dist.barrier()
    if place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fastcomm.PeerLostError) as lost:
        dist.all_reduce(torch.ones(3))
    assert lost.value.ranks == (2,)
    message = r"rank 1 waits in new_group: rank 2 \(pid \d+\) died"
    if place.rank == 1:
        with pytest.raises(fastcomm.InitError, match=message):
            dist.new_group([1, 2])


def test_a_new_group_does_not_wait_for_a_rank_that_died_on_another_host():
    values_of(fresh_ranks(3, _member_has_died_elsewhere, transport="hierarchical"), 2)
