"""What the transports do not have and the backend leaves to Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support import process_groups
from tests.support.process_groups import TIMEOUT, values, world
from tests.support.ranks import on_ranks

ranks = process_groups.ranks  # a pool of this module's own


@on_ranks(2, 3)
def test_reduce_gather_scatter_and_all_to_all_work(comm):
    world()
    n = comm.world_size
    total = values(comm)
    dist.all_reduce(total)
    tensor = values(comm)
    dist.reduce(tensor, 1)
    assert comm.rank != 1 or torch.equal(tensor, total)
    parts = [torch.zeros(12) for _ in range(n)] if comm.rank == 0 else None
    dist.gather(values(comm), parts, 0)
    assert parts is None or torch.equal(torch.stack(parts).sum(0), total)
    part = torch.zeros(2)
    dist.scatter(part, list(torch.arange(2.0 * n).view(n, 2)) if comm.rank == 0 else None, 0)
    assert torch.equal(part, torch.arange(2.0 * n).view(n, 2)[comm.rank])
    out = torch.zeros(n)
    dist.all_to_all_single(out, torch.full((n,), float(comm.rank)))
    assert torch.equal(out, torch.arange(float(n)))
    out = torch.zeros(n * (comm.rank + 1))
    dist.all_to_all_single(
        out, torch.ones(n * (n + 1) // 2), [comm.rank + 1] * n, list(range(1, n + 1))
    )
    assert bool(out.all())


@on_ranks(2, 3)
def test_all_to_all_takes_lists_of_any_shapes(comm):
    world()
    n, rank = comm.world_size, comm.rank
    outputs = [
        torch.zeros(2, rank + 1).t() for _ in range(n)
    ]  # rank r gets 2 (r + 1) elements of everybody
    work = dist.all_to_all(
        outputs, [torch.full((to + 1, 2), float(rank)) for to in range(n)], async_op=True
    )
    assert work.get_future().wait()[0] is outputs[0]
    assert all(bool((output == source).all()) for source, output in enumerate(outputs))


@on_ranks(2)
def test_tensors_are_sent_to_one_rank(comm):
    world()
    tensor = values(comm)
    if comm.rank == 0:
        dist.send(tensor, 1, tag=3)
        dist.isend(tensor, 1).wait()
    else:
        for receive in (lambda: dist.recv(tensor, 0, tag=3), lambda: dist.irecv(tensor, 0).wait()):
            tensor.zero_()
            receive()
            assert torch.equal(tensor, ((torch.arange(12) * 2) % 5 + 1).float())


@on_ranks(2, 3)
def test_objects_travel(comm):
    world()
    everyone: list[object] = [None] * comm.world_size
    dist.all_gather_object(everyone, {"rank": comm.rank})
    assert everyone == [{"rank": rank} for rank in range(comm.world_size)]
    box = ["from 1" if comm.rank == 1 else None]
    dist.broadcast_object_list(box, 1)
    assert box == ["from 1"]
    gathered = [None] * comm.world_size if comm.rank == 0 else None
    dist.gather_object(comm.rank, gathered)
    assert gathered is None or gathered == list(range(comm.world_size))
    part = [None]
    dist.scatter_object_list(
        part, [str(rank) for rank in range(comm.world_size)] if comm.rank == 0 else None
    )
    assert part == [str(comm.rank)]


@on_ranks(2)
def test_the_group_has_gloo_s_monitored_barrier(comm):
    world().monitored_barrier(TIMEOUT)


@on_ranks(2)
def test_ops_and_dtypes_beyond_the_transport_go_to_gloo(comm):
    world()
    tensor = torch.tensor([1 << comm.rank, 3])
    dist.all_reduce(tensor, dist.ReduceOp.BOR)
    assert tensor.tolist() == [3, 3]
    tensor = torch.full((3,), comm.rank + 1, dtype=torch.int8)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3, 3]
    flag = torch.tensor([comm.rank == 1])
    dist.broadcast(flag, 1)
    parts = [torch.zeros(1, dtype=torch.bool) for _ in range(2)]
    dist.all_gather(parts, torch.tensor([comm.rank == 0]))
    assert flag.item() and [part.item() for part in parts] == [True, False]


@on_ranks(2)
def test_gloo_s_threads_do_not_meet_the_caller_s_in_a_deadlock(comm):
    """A call that kept the GIL while Gloo's thread let go of a tensor hung about once in a
    hundred.
    """
    world()
    for _ in range(500):
        dist.all_reduce(torch.ones(3, dtype=torch.int8))
        dist.all_to_all_single(torch.zeros(2), torch.ones(2))


@on_ranks(2)
def test_sparse_tensors_go_to_gloo(comm):
    world()
    tensor = torch.sparse_coo_tensor([[comm.rank]], [1.0], (2,))
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), torch.ones(2))
