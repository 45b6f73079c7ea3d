"""What the backend "fastcomm" leaves to Gloo: the same results, and a lost rank that is named."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import fastcomm
from tests.support import process_groups
from tests.support.bodies import note
from tests.support.process_groups import TIMEOUT, start, values, world
from tests.support.ranks import fresh_ranks, on_ranks

ranks = process_groups.ranks  # a pool of this module's own

LAYOUTS = {
    "flat": lambda: torch.zeros(6),
    "matrix": lambda: torch.zeros(2, 3),
    "transposed": lambda: torch.zeros(3, 2).t(),
    "with gaps": lambda: torch.zeros(2, 6)[:, ::2],
    "scalar": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0),
}
BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _numbers(layout: str, dtype: torch.dtype, salt: int = 0) -> Tensor:
    tensor = LAYOUTS[layout]()
    tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return tensor.copy_(((torch.arange(tensor.numel()) * 3 + 5 * salt) % 7 + 1).view(tensor.shape))


def _reduce_scatter(group, rank: int, layout: str, dtype: torch.dtype, op) -> Tensor:
    output = _numbers(layout, dtype)
    parts = [_numbers(layout, dtype, rank + to) for to in range(group.size())]
    dist.reduce_scatter(output, parts, op, group=group)
    return output


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_list_is_reduced_bit_by_bit(comm, layout):
    for dtype in (torch.int64, torch.int8):
        theirs = [_numbers(layout, dtype, rank + comm.rank) for rank in range(2)]
        for op, bitwise in BITWISE.items():
            ours = _reduce_scatter(world(), comm.rank, layout, dtype, op)
            assert torch.equal(ours, bitwise(*theirs)), (dtype, op)


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.BOR], ids=str)
@on_ranks(2)
def test_a_list_of_unequal_parts_is_reduced_and_scattered(comm, op):
    """Over Gloo alone this ends the process, or gives the sum: it depends on the version."""
    world()
    for dtype in (torch.int64, torch.int8):
        parts = [torch.tensor([[1], [4]][comm.rank], dtype=dtype), torch.tensor([2, 8]).to(dtype)]
        output = torch.zeros_like(parts[comm.rank])
        dist.reduce_scatter(output, parts, op)
        expected = [[4 if op == dist.ReduceOp.MAX else 5], [2, 8]][comm.rank]
        assert output.tolist() == expected, dtype


@on_ranks(2)
def test_scalars_are_reduced_and_scattered(comm):
    """Over Gloo alone this ends the process."""
    world()
    bits, total = torch.tensor(0), torch.tensor(0, dtype=torch.int8)
    dist.reduce_scatter_tensor(bits, torch.tensor([1, 4]) << comm.rank, dist.ReduceOp.BOR)
    dist.reduce_scatter_tensor(total, torch.tensor([3, 5], dtype=torch.int8))
    assert bits.item() == (3, 12)[comm.rank] and total.item() == (6, 10)[comm.rank]
    with pytest.raises(RuntimeError):
        dist.reduce_scatter_tensor(total, torch.tensor(3, dtype=torch.int8))


# ---- a rank that is lost ----


def _bytes(numel: int = 9) -> Tensor:
    return torch.ones(numel, dtype=torch.int8)


CALLS = {
    "functional all_reduce": lambda n: functional.all_reduce(_bytes(), "sum", world()).wait(),
    "recv": lambda n: dist.recv(torch.ones(9), 1),
    "gather": lambda n: dist.gather(torch.ones(9), [torch.ones(9) for _ in range(n)]),
}


def _killed_while_another_waits(place, name):
    start(place)
    dist.barrier()
    if place.rank == 1:
        dist.recv(torch.ones(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    pid = dist.group.WORLD._cpu.comm.processes[1].pid
    dist.send(torch.ones(1), 1)
    before = time.monotonic()
    message = rf"rank 1 \(pid {pid}\) died; rank 0 waits in .*over Gloo"
    with pytest.raises(fastcomm.PeerLostError, match=message) as raised:
        CALLS[name](place.world_size)
    assert isinstance(raised.value.__cause__, RuntimeError) or "functional" in name
    assert time.monotonic() - before < 10


@pytest.mark.parametrize("name", CALLS)
def test_who_waits_in_gloo_hears_who_was_killed(name):
    assert fresh_ranks(2, _killed_while_another_waits, name)[0].kind == "returned"


def _killed_far_away(place):
    start(place)
    dist.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fastcomm.PeerLostError, match="rank 1 .*died"):
        dist.all_reduce(_bytes())
    note(place, **{f"heard{place.rank}": ""})
    while not all(Path(place.directory, f"heard{rank}").exists() for rank in (0, 2, 3)):
        time.sleep(0.01)  # Gloo tells rank 3 when the others end, not before


def test_a_rank_hears_though_it_does_not_wait_for_the_lost_one_itself():
    outcomes = fresh_ranks(4, _killed_far_away)
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds == ["returned", "died", "returned", "returned"], outcomes


@on_ranks(2)
def test_a_work_of_gloo_s_waits_as_long_as_it_is_told(comm):
    world()
    if comm.rank == 0:
        work = dist.all_reduce(_bytes(), async_op=True)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        dist.send(torch.ones(1), 1)
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.get_future().wait()[0].tolist() == [2] * 9
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(_bytes())


@on_ranks(2)
def test_batches_of_transfers_and_of_collectives_are_waited_for(comm):
    world()
    sent, received = torch.full((3,), float(comm.rank)), torch.zeros(3)
    peer = 1 - comm.rank
    transfers = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    assert received.tolist() == [float(peer)] * 3
    outputs = [0 * _bytes(2), 0 * _bytes(4)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as batch:
        for output in outputs:
            dist.all_gather_into_tensor(output, comm.rank * _bytes(len(output) // 2))
    batch.wait()
    assert [output.tolist() for output in outputs] == [[0, 1], [0, 0, 1, 1]]


@on_ranks(2)
def test_who_has_sent_is_known(comm):
    world()
    if comm.rank == 0:
        assert dist.recv(torch.ones(3)) == 1
    else:
        dist.send(torch.ones(3), 0)


# ---- what does not lie in memory as it looks ----


def _with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, 3)], -1)[..., 0]


def _negated(tensor: Tensor) -> Tensor:
    """The imaginary part of a conjugate: torch puts off the change of sign."""
    view = torch.complex(torch.zeros(tensor.shape), -tensor.float()).conj().imag
    assert view.is_neg()
    return view


VIEWS = {
    "floats with gaps": _with_gaps,
    "bytes with gaps": lambda tensor: _with_gaps(tensor.to(torch.int8)),
    "negated with gaps": _negated,
    "negated": lambda tensor: torch._neg_view(-tensor.float()),
}
FROM_RANK = torch.tensor([[1.0, 2.0], [2.0, 1.0]])


def _gather_views(rank, view):
    outputs = [view(torch.zeros(2)), view(torch.zeros(2))]
    dist.gather(view(FROM_RANK[rank]), outputs if rank == 0 else None, 0)
    return torch.cat(outputs), view(FROM_RANK.view(-1) * (rank == 0))


def _scatter_views(rank, view):
    output = view(torch.zeros(2))
    dist.scatter(output, [view(row) for row in FROM_RANK] if rank == 1 else None, 1)
    return output, view(FROM_RANK[rank])


def _exchange_views(rank, view):
    output = view(torch.zeros(2))
    dist.all_to_all_single(output, view(FROM_RANK[rank]))
    return output, view(FROM_RANK[:, rank])


def _broadcast_views(rank, view):
    tensor = view(FROM_RANK[rank])
    dist.broadcast(tensor, 1)
    return tensor, view(FROM_RANK[1])


def _reduce_views(rank, view):
    tensor = view(FROM_RANK[rank])
    dist.reduce(tensor, 1)
    return tensor, view(FROM_RANK.sum(0) if rank == 1 else FROM_RANK[0])


MOVES = (
    _gather_views,
    _scatter_views,
    _exchange_views,
    _reduce_views,
)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("seen", VIEWS)
@on_ranks(2)
def test_a_view_travels_as_it_looks(comm, move, seen):
    world()
    ours, wanted = move(comm.rank, VIEWS[seen])
    assert ours.tolist() == wanted.tolist()


@on_ranks(2)
def test_booleans_with_gaps_are_broadcast(comm):
    world()
    ours, wanted = _broadcast_views(comm.rank, lambda tensor: _with_gaps(tensor == 1))
    assert ours.tolist() == wanted.tolist()


@on_ranks(2)
def test_a_view_is_in_place_once_its_work_is_completed(comm):
    world()
    column = _with_gaps(_bytes(2))
    work = dist.all_reduce(column, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert column.tolist() == [2, 2] and work.result()[0] is column
    assert work.get_future().wait()[0] is column
    column.zero_()
    assert work.wait() and column.tolist() == [0, 0]


# ---- what torch's wait_tensor() waits for ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@on_ranks(2)
def test_wait_tensor_waits_for_a_collective_under_way_where_torch_is_told_so(comm, dtype):
    world()
    tensor, column = torch.ones(3, dtype=dtype), torch.ones(3, 2, dtype=dtype)[:, 0]
    with functional.allow_inflight_collective_as_graph_input_ctx():
        for reduced in (tensor, column):
            if comm.rank == 0:
                dist.all_reduce(reduced, async_op=True)
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.ones(1), 0)
                dist.all_reduce(reduced, async_op=True)
            torch.ops.c10d_functional.wait_tensor(reduced)
            assert reduced.tolist() == [2] * 3


# ---- what the transports do not have ----


@on_ranks(3)
def test_all_to_all_takes_parts_of_different_sizes(comm):
    world()
    out = torch.zeros(3 * (comm.rank + 1))
    dist.all_to_all_single(out, torch.ones(6), [comm.rank + 1] * 3, [1, 2, 3])
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
