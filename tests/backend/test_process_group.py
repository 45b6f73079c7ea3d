"""The backend "fastcomm" of torch.distributed: every collective against Gloo's result.

That a call took the fast path shows in an average of integers, which Gloo refuses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastcomm
from tests.support.process_groups import TIMEOUT, gloo, ranks, start, values, world  # noqa: F401 (the fixture)
from tests.support.ranks import fresh_ranks, on_ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


# ---- collectives on the fast path ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3)
def test_all_reduce_gives_what_gloo_gives(comm, dtype):
    for op in OPS:
        ours, wanted = values(comm, dtype=dtype), values(comm, dtype=dtype)
        dist.all_reduce(ours, op, group=world())
        dist.all_reduce(wanted, op, group=gloo())
        assert torch.equal(ours, wanted), op


@on_ranks(2, 3)
def test_an_average_is_the_sum_over_the_number_of_ranks(comm):
    world()
    average, total = values(comm), values(comm)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    dist.all_reduce(total)
    torch.testing.assert_close(average, total / comm.world_size)


@on_ranks(2)
def test_complex_tensors_are_reduced_as_pairs(comm):
    world()
    tensor = torch.complex(values(comm), -values(comm))
    dist.all_reduce(tensor)
    total = values(comm)
    dist.all_reduce(total)
    assert torch.equal(tensor, torch.complex(total, -total))


@on_ranks(2)
def test_a_tensor_with_gaps_is_reduced_in_place(comm):
    world()
    base = torch.zeros(4, 6)
    columns = base[:, ::2]
    columns.copy_(values(comm).view(4, 3))
    dist.all_reduce(columns)
    wanted = values(comm)
    dist.all_reduce(wanted)
    assert torch.equal(columns, wanted.view(4, 3)) and not base[:, 1::2].any()


@on_ranks(2)
def test_a_parameter_is_reduced_in_place(comm):
    world()
    parameter = nn.Parameter(values(comm).view(3, 4).t())
    dist.all_reduce(parameter)
    wanted = values(comm)
    dist.all_reduce(wanted)
    assert torch.equal(parameter.detach(), wanted.view(3, 4).t()) and parameter.requires_grad


@on_ranks(2, 3)
def test_async_all_reduces_are_in_place_after_wait(comm):
    world()
    tensors = [values(comm, numel) for numel in (1, 100, 300_000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor, work in zip(tensors, works, strict=True):
        assert work.wait()
        assert work.is_completed() and work.result()[0] is tensor
        wanted = values(comm, tensor.numel())
        dist.all_reduce(wanted, group=gloo())
        assert torch.equal(tensor, wanted)


@on_ranks(2)
def test_the_future_of_an_all_reduce_holds_a_list_of_its_tensor(comm):
    world()
    tensor = values(comm)
    value = (
        dist.all_reduce(tensor, async_op=True)
        .get_future()
        .then(lambda future: future.value()[0] * 2)
        .wait()
    )
    assert torch.equal(value, tensor * 2)


@on_ranks(2)
def test_an_all_reduce_goes_on_while_its_caller_waits_for_something_else(comm):
    world()
    tensor, note = values(comm, 300_000), torch.zeros(1)
    if comm.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.recv(note, 1)  # comes only after rank 1 has the result
        work.wait()
    else:
        dist.all_reduce(tensor)
        dist.send(note, 0)


@on_ranks(2)
def test_a_wait_ends_at_its_own_timeout(comm):
    world()
    tensor = values(comm)
    if comm.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(fastcomm.TimeoutError, match="waited 0.1 s"):
            work.wait(timedelta(seconds=0.1))
    dist.barrier(group=gloo())
    if comm.rank == 0:
        work.wait()
    else:
        dist.all_reduce(tensor)


COLLECTIVES = {
    "all_reduce": lambda n: dist.all_reduce(torch.ones(9), async_op=True),
    "broadcast": lambda n: dist.broadcast(torch.ones(9), 1, async_op=True),
    "all_gather": lambda n: dist.all_gather(
        [torch.zeros(9) for _ in range(n)], torch.ones(9), async_op=True
    ),
    "all_gather_into_tensor": lambda n: dist.all_gather_into_tensor(
        torch.zeros(9 * n), torch.ones(9), async_op=True
    ),
    "reduce_scatter": lambda n: dist.reduce_scatter(
        torch.zeros(9), [torch.ones(9)] * n, async_op=True
    ),
    "reduce_scatter_tensor": lambda n: dist.reduce_scatter_tensor(
        torch.zeros(9), torch.ones(9 * n), async_op=True
    ),
    "barrier": lambda n: dist.barrier(async_op=True),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@on_ranks(2)
def test_an_async_collective_waits_for_nobody(comm, name):
    world()
    if comm.rank == 1:
        dist.recv(torch.zeros(1), 0)  # comes only after rank 0's call has returned
    work = COLLECTIVES[name](comm.world_size)
    if comm.rank == 0:
        assert not work.is_completed()
        dist.send(torch.zeros(1), 1)
    assert work.wait() and work.is_completed()


@on_ranks(2, 3)
def test_async_collectives_of_all_kinds_are_in_place_after_wait(comm):
    world()
    n, rank = comm.world_size, comm.rank
    columns = torch.zeros(4, 6)
    moved, scattered = columns[:, ::2], torch.zeros(4)
    moved.copy_(values(comm).view(4, 3))
    rows = [torch.zeros(12) for _ in range(n)]
    works = [
        dist.broadcast(moved, 1, async_op=True),
        dist.all_gather(rows, values(comm), async_op=True),
        dist.reduce_scatter_tensor(scattered, values(comm, 4 * n), async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    wanted, total = values(comm), values(comm, 4 * n)
    dist.broadcast(wanted, 1)
    dist.all_reduce(total)
    assert torch.equal(moved, wanted.view(4, 3)) and not columns[:, 1::2].any()
    assert torch.equal(rows[1], wanted) and torch.equal(rows[rank], values(comm))
    assert torch.equal(scattered, total.view(n, 4)[rank])
    assert works[1].result()[0][0] is rows[0]


@on_ranks(2)
def test_a_wait_ends_at_its_timeout_though_another_thread_waits(comm):
    world()
    if comm.rank == 1:
        dist.recv(torch.zeros(1), 0)
    works = [dist.all_reduce(values(comm, 100_000), async_op=True) for _ in range(2)]
    if comm.rank == 0:
        thread = threading.Thread(target=works[0].wait)
        thread.start()
        time.sleep(0.05)
        with pytest.raises(fastcomm.TimeoutError, match="waited 0.2 s"):
            works[1].wait(timedelta(seconds=0.2))
        dist.send(torch.zeros(1), 1)
        thread.join()
    works[1].wait()
    assert all(work.is_success() for work in works)


@on_ranks(2)
def test_coalesced_all_reduces_give_what_single_ones_give(comm):
    world()
    tensors = [values(comm, numel) for numel in (3, 50)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        wanted = values(comm, tensor.numel())
        dist.all_reduce(wanted)
        assert torch.equal(tensor, wanted)


@on_ranks(2, 3)
def test_broadcast_from_every_rank(comm):
    world()
    for source in range(comm.world_size):
        tensor = torch.full((3, 4), comm.rank, dtype=torch.float32).t()
        dist.broadcast(tensor, source)
        assert torch.equal(tensor, torch.full((4, 3), float(source)))
        assert dist.broadcast(tensor, source, async_op=True).get_future().wait()[0] is tensor


@on_ranks(2, 3)
def test_all_gather_gives_what_gloo_gives(comm):
    for async_op in (False, True):
        found = []
        for group in (world(), gloo()):
            parts = [torch.zeros(3, 4) for _ in range(comm.world_size)]
            work = dist.all_gather(parts, values(comm).view(3, 4), group=group, async_op=async_op)
            if async_op:
                work.wait()
            found.append(torch.stack(parts))
        assert torch.equal(*found)


@on_ranks(2, 3)
def test_all_gather_into_tensor_gives_what_gloo_gives(comm):
    ours, wanted = (torch.zeros(comm.world_size * 3, 4) for _ in range(2))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(ours, values(comm).view(3, 4), group=world())
    gather(wanted, values(comm).view(3, 4), group=gloo())
    assert torch.equal(ours, wanted)


@on_ranks(2, 3)
def test_reduce_scatter_takes_a_list_or_one_tensor(comm):
    world()
    numel = 4 * comm.world_size
    wanted = values(comm, numel)
    dist.all_reduce(wanted)
    wanted = wanted.view(comm.world_size, 4)[comm.rank]
    from_list, from_tensor = torch.zeros(4), torch.zeros(4)
    dist.reduce_scatter(from_list, list(values(comm, numel).view(comm.world_size, 4)))
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(
        from_tensor, values(comm, numel)
    )
    assert torch.equal(from_list, wanted) and torch.equal(from_tensor, wanted)


@on_ranks(2)
def test_a_coalescing_context_gathers_and_scatters(comm):
    world()
    out = [torch.zeros(8), torch.zeros(4)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in out:
            dist.all_gather_into_tensor(
                tensor, torch.full((tensor.numel() // 2,), float(comm.rank))
            )
    assert all(
        torch.equal(tensor, torch.arange(2.0).repeat_interleave(tensor.numel() // 2))
        for tensor in out
    )


@on_ranks(2)
def test_what_is_coalesced_may_be_of_several_dtypes(comm):
    world()
    numbers, flags = torch.zeros(4), torch.zeros(2, dtype=torch.bool)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(numbers, torch.full((2,), float(comm.rank)))
        dist.all_gather_into_tensor(flags, torch.tensor([comm.rank == 1]))
    assert numbers.tolist() == [0, 0, 1, 1] and flags.tolist() == [False, True]


@on_ranks(2)
def test_a_list_of_the_wrong_length_is_refused(comm):
    world()
    with pytest.raises(ValueError, match="3 tensors for 2 ranks"):
        dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2))


@on_ranks(2, 3)
def test_barrier_waits_for_every_rank(comm):
    world()
    dist.barrier()
    time.sleep(0.05 * comm.rank)
    before = time.time()
    dist.barrier()
    after = time.time()
    times: list[tuple[float, float]] = [(0.0, 0.0)] * comm.world_size
    dist.all_gather_object(times, (before, after))
    assert min(after for _, after in times) >= max(before for before, _ in times)


@on_ranks(2)
def test_functional_collectives_work(comm):
    from torch.distributed import _functional_collectives as functional

    own, mean = 2 * comm.rank * torch.arange(6), torch.arange(6)
    assert torch.equal(functional.all_reduce(own, "avg", world()).wait(), mean)
    assert torch.equal(
        functional.reduce_scatter_tensor(own, "avg", 0, world()).wait(), mean.view(2, 3)[comm.rank]
    )
    assert torch.equal(
        functional.all_gather_tensor(own, 0, world()).wait(), torch.cat([0 * mean, 2 * mean])
    )
    assert torch.equal(functional.broadcast(own, 1, world()).wait(), 2 * mean)


@on_ranks(2)
def test_two_threads_share_a_group(comm):
    """Each reduces as many tensors as the other, of one size: whichever comes first, the ranks'
    calls match.
    """
    world()
    tensors = [torch.ones(1000) for _ in range(100)]

    def reduce(part: list[torch.Tensor]) -> None:
        for tensor in part:
            dist.all_reduce(tensor)

    threads = [threading.Thread(target=reduce, args=(tensors[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bool((tensor == 2).all()) for tensor in tensors)


# ---- what Gloo does ------------------------------------------------------------------------------


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


@on_ranks(2)
def test_what_neither_can_do_is_an_error(comm):
    world()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3, dtype=torch.int8), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="output|out"):
        dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2))


# ---- groups --------------------------------------------------------------------------------------


@on_ranks(3)
def test_sub_groups_have_a_fast_path_of_their_own(comm):
    world()
    for members in ([0, 1], [0, 2], [1, 2]):
        group = dist.new_group(members)
        if comm.rank in members:
            tensor = torch.tensor([2 * comm.rank])
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
            assert tensor.item() == sum(members)
            dist.broadcast(tensor, members[1], group=group)
            dist.destroy_process_group(group)
    dist.barrier()


def _group_beside_gloo(place):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=place.init_method, rank=place.rank, world_size=place.world_size
    )
    group = dist.new_group(backend="fastcomm")
    integers = torch.tensor([2 * place.rank])
    dist.all_reduce(integers, dist.ReduceOp.AVG, group=group)
    dist.destroy_process_group()
    return integers.item()


def test_a_group_may_be_made_beside_a_default_one_over_gloo():
    assert [outcome.value for outcome in fresh_ranks(2, _group_beside_gloo)] == [1, 1]


@on_ranks(2)
def test_the_group_says_its_name(comm):
    assert dist.get_backend(world()) == "fastcomm"
    assert world().name() == "fastcomm"


def _begin_and_end_twice(place):
    for _ in range(2):
        start(place)
        first = dist.new_group([0, 1])
        pair = dist.new_group([0, place.world_size - 1])
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        for group in (first, pair):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()
        dist.destroy_process_group()
    return int(tensor[0])


def test_ranks_begin_again_after_destroy_process_group():
    assert [outcome.value for outcome in fresh_ranks(3, _begin_and_end_twice)] == [3, 3, 3]


def test_the_benchmark_writes_what_it_measured(tmp_path):
    path = tmp_path / "backend.json"
    script = Path(__file__).resolve().parent.parent.parent / "bench" / "backend.py"
    command = [
        sys.executable,
        str(script),
        "--models",
        "mlp",
        "--rounds",
        "2",
        "--steps",
        "1",
        "--json",
        str(path),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert [row["bytes"] for row in result["all_reduce"]] == [
        4**exponent for exponent in range(5, 14)
    ]
    assert set(result["ddp"]["mlp"]["overhead_ms"]) == {"fastcomm", "gloo"}
