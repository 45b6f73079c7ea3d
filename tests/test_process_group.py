"""The backend "fastcomm" of torch.distributed: every collective against Gloo's result, what is built on them, and how it ends when a rank
is missing, wrong or dead. That a call took the fast path shows in an average of integers, which Gloo refuses."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from models import Heads, Transformer, backward, convnet, image_backward, loss_of, mlp, text_backward
from ranks import Ranks, fresh_ranks, on_ranks, torchrun_env
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcomm

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
TIMEOUT = timedelta(seconds=30)
_gloo: list[dist.ProcessGroup] = []


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of this module's own: their default group is one of the backend."""
    pool = Ranks()
    yield pool
    pool.close()


def world() -> dist.ProcessGroup:
    """For bodies: the default group, over the backend."""
    if not dist.is_initialized():
        start(harness._place)
    return dist.group.WORLD


def start(place: harness.Place, timeout: timedelta = TIMEOUT) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"file://{place.directory}/backend"
    dist.init_process_group("fastcomm", init_method=address, rank=place.rank, world_size=place.world_size, timeout=timeout)


def gloo() -> dist.ProcessGroup:
    """For bodies: the same ranks over Gloo."""
    world()
    if not _gloo:
        _gloo.append(dist.new_group(backend="gloo"))
    return _gloo[0]


def values(comm, numel: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers that differ from rank to rank: every dtype holds their sums and products."""
    return ((torch.arange(numel) * (comm.rank + 2)) % 5 + 1).to(dtype)


# ---- collectives on the fast path ------------------------------------------------------------------------------------------------


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
    value = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] * 2).wait()
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
        assert dist.broadcast(tensor, source, async_op=True).get_future().wait()[0] is not None


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
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(from_tensor, values(comm, numel))
    assert torch.equal(from_list, wanted) and torch.equal(from_tensor, wanted)


@on_ranks(2)
def test_a_coalescing_context_gathers_and_scatters(comm):
    world()
    out = [torch.zeros(8), torch.zeros(4)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in out:
            dist.all_gather_into_tensor(tensor, torch.full((tensor.numel() // 2,), float(comm.rank)))
    assert all(torch.equal(tensor, torch.arange(2.0).repeat_interleave(tensor.numel() // 2)) for tensor in out)


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
def test_functional_collectives_take_the_fast_path(comm):
    from torch.distributed import _functional_collectives as functional

    own, mean = 2 * comm.rank * torch.arange(6), torch.arange(6)
    assert torch.equal(functional.all_reduce(own, "avg", world()).wait(), mean)
    assert torch.equal(functional.reduce_scatter_tensor(own, "avg", 0, world()).wait(), mean.view(2, 3)[comm.rank])
    assert torch.equal(functional.all_gather_tensor(own, 0, world()).wait(), torch.cat([0 * mean, 2 * mean]))
    assert torch.equal(functional.broadcast(own, 1, world()).wait(), 2 * mean)


@on_ranks(2)
def test_two_threads_share_a_group(comm):
    """Each reduces as many tensors as the other, of one size: whichever comes first, the ranks' calls match."""
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


# ---- what Gloo does --------------------------------------------------------------------------------------------------------------


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
    dist.all_to_all_single(out, torch.ones(n * (n + 1) // 2), [comm.rank + 1] * n, list(range(1, n + 1)))
    assert bool(out.all())


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
    dist.scatter_object_list(part, [str(rank) for rank in range(comm.world_size)] if comm.rank == 0 else None)
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
    """A call that kept the GIL while Gloo's thread let go of a tensor hung about once in a hundred."""
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


# ---- groups ----------------------------------------------------------------------------------------------------------------------


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


def _across_hosts(place):
    start(place)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.barrier()
    integers = torch.tensor([3 * place.rank])
    with pytest.raises(RuntimeError, match="cast"):
        dist.all_reduce(integers.clone(), dist.ReduceOp.AVG)
    pair = dist.new_group([0, 1])  # on one host
    if place.rank < 2:
        dist.all_reduce(integers, dist.ReduceOp.AVG, group=pair)
        assert integers.item() == 1
    dist.barrier()
    dist.destroy_process_group()
    return int(tensor[0])


def test_ranks_of_several_hosts_meet_over_gloo():
    hosts = [{"FASTCOMM_HOST_ID": host} for host in ("a", "a", "b")]
    outcomes = fresh_ranks(3, _across_hosts, env=hosts)
    assert [outcome.value for outcome in outcomes] == [3, 3, 3], outcomes


# ---- what is built on it ---------------------------------------------------------------------------------------------------------


def _train(model, run, comm, steps=4, **optimizer_options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **optimizer_options)
    for step in range(steps):
        optimizer.zero_grad()
        run(model, comm.rank, step)
        optimizer.step()


def _assert_same_parameters(model, other):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    "make, run, options",
    [
        (mlp, backward, {}),
        (mlp, backward, {"gradient_as_bucket_view": True}),
        (mlp, backward, {"static_graph": True}),
        (mlp, backward, {"find_unused_parameters": True, "bucket_cap_mb": 0.0005}),
        (convnet, image_backward, {}),
        (Transformer, text_backward, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}),
    ],
    ids=["mlp", "bucket views", "static graph", "small buckets", "convnet", "transformer"],
)
@on_ranks(2)
def test_ddp_trains_bitwise_as_over_gloo(comm, make, run, options):
    models = [DistributedDataParallel(make(), process_group=group, **options) for group in (world(), gloo())]
    for model in models:
        _train(model, run, comm)
    _assert_same_parameters(*models)


@on_ranks(2)
def test_ddp_with_changing_branches_trains_bitwise_as_over_gloo(comm):
    models = [DistributedDataParallel(Heads(4), process_group=group, find_unused_parameters=True) for group in (world(), gloo())]
    for model in models:
        _train(model, lambda one, rank, step: loss_of(one, rank, step, (rank + step * step) % 3).backward(), comm)
    _assert_same_parameters(*models)


@on_ranks(2)
def test_ddp_accumulates_without_synchronising(comm):
    models = [DistributedDataParallel(mlp(), process_group=group) for group in (world(), gloo())]

    def run(model, rank, step):
        with model.no_sync():
            backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)

    for model in models:
        _train(model, run, comm)
    _assert_same_parameters(*models)


@on_ranks(2)
def test_ddp_joins_uneven_inputs(comm):
    models = [DistributedDataParallel(mlp(), process_group=group) for group in (world(), gloo())]
    for model in models:
        with model.join():
            _train(model, backward, comm, steps=3 + 2 * comm.rank)
    _assert_same_parameters(*models)


@on_ranks(2)
def test_ddp_with_a_hook_that_chains_futures(comm):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    models = [DistributedDataParallel(mlp(), process_group=group) for group in (world(), gloo())]
    for model in models:
        model.register_comm_hook(model.process_group, default_hooks.fp16_compress_hook)
        _train(model, backward, comm)
    _assert_same_parameters(*models)


@on_ranks(2)
def test_ddp_with_power_sgd_trains_as_over_gloo(comm):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    models = [DistributedDataParallel(mlp(), process_group=group) for group in (world(), gloo())]
    for model in models:
        model.register_comm_hook(PowerSGDState(model.process_group, 1, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook)
        _train(model, backward, comm, steps=5)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(2)
def test_fully_shard_trains_as_one_process(comm):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world()
    alone, sharded = mlp(), mlp()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    for model, batch in ((alone, inputs.view(8, 8)), (sharded, inputs[comm.rank])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for parameter, wanted in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), wanted)


@on_ranks(2)
def test_a_distributed_tensor_is_reduced(comm):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    world()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    partial = DTensor.from_local(values(comm), mesh, [Partial("avg")])
    total = values(comm)
    dist.all_reduce(total, group=mesh.get_group("data"))
    torch.testing.assert_close(partial.redistribute(placements=[Replicate()]).to_local(), total / 2)
    sharded = DTensor.from_local(values(comm), mesh, [Shard(0)])
    assert sharded.full_tensor().numel() == 24


@on_ranks(2)
def test_zero_redundancy_optimizer_trains_as_sgd(comm):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    models = [DistributedDataParallel(mlp(), process_group=world()) for _ in range(2)]
    optimizers = [
        torch.optim.SGD(models[0].parameters(), lr=0.05, momentum=0.9),
        ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.SGD, lr=0.05, momentum=0.9),
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
    _assert_same_parameters(*models)


@on_ranks(2)
def test_post_local_sgd_averages_over_the_group(comm):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    world()
    model = mlp()
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
    backward(model, comm.rank, 0)
    optimizer.step()
    weight = model[0].weight.detach().clone()
    dist.broadcast(weight, 0)
    assert torch.equal(weight, model[0].weight)


@on_ranks(2)
def test_a_checkpoint_is_saved_and_loaded(comm):
    import torch.distributed.checkpoint as checkpoint

    world()
    folder = f"{harness._place.directory}/checkpoint"
    model = mlp()
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    _assert_same_parameters(model, other)


@on_ranks(2)
def test_a_function_of_the_all_reduce_has_gradients(comm):
    from torch.distributed.nn.functional import all_reduce

    world()
    tensor = values(comm).requires_grad_()
    (all_reduce(tensor) * (comm.rank + 1)).sum().backward()
    assert torch.equal(tensor.grad, torch.full((12,), 3.0))


TRAINING_SCRIPT = """
    import torch, torch.distributed as dist, fastcomm
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("fastcomm")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(3, 4) * dist.get_rank()).sum().backward()
    gradient = model.module.weight.grad[0, 0].item()
    assert gradient == 1.5, gradient
    del model
    dist.destroy_process_group()
"""


def test_a_script_under_torchrun_trains(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINING_SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


# ---- when it goes wrong ----------------------------------------------------------------------------------------------------------


def _rank_2_does_not_come(place):
    if place.rank == 2:
        return 0.0
    before = time.monotonic()
    with pytest.raises(fastcomm.InitError, match=r"ranks \[2\] of 3"):
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
        dist.all_reduce(torch.ones(4, dtype=(torch.float32, torch.float64)[comm.rank]), async_op=True).wait()
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
    with pytest.raises((RuntimeError, fastcomm.TimeoutError)):
        DistributedDataParallel(nn.Linear(4, 2 + place.rank))


def test_ddp_of_different_models_raises_on_both_ranks():
    outcomes = fresh_ranks(2, _different_models)
    assert all(outcome.kind == "returned" for outcome in outcomes), outcomes


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
    outcomes = fresh_ranks(2, _one_is_late)
    assert all(outcome.kind == "returned" for outcome in outcomes), outcomes


def _destroyed(place):
    start(place)
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(fastcomm.FastcommError, match="closed"):
        group.allreduce([torch.ones(2)])


def test_a_destroyed_group_says_so():
    outcomes = fresh_ranks(2, _destroyed)
    assert all(outcome.kind == "returned" for outcome in outcomes), outcomes


def _abort(place):
    start(place)
    dist.barrier()
    if place.rank == 1:
        dist.distributed_c10d._abort_process_group()
    else:
        with pytest.raises(fastcomm.PeerLostError, match="rank 1 .*aborted"):
            dist.all_reduce(torch.ones(4))


def test_abort_ends_what_the_others_wait_for():
    outcomes = fresh_ranks(2, _abort)
    assert all(outcome.kind == "returned" for outcome in outcomes), outcomes


def test_the_benchmark_writes_what_it_measured(tmp_path):
    path = tmp_path / "backend.json"
    script = Path(__file__).resolve().parent.parent / "bench" / "backend.py"
    command = [sys.executable, str(script), "--models", "mlp", "--rounds", "2", "--steps", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert [row["bytes"] for row in result["all_reduce"]] == [4**exponent for exponent in range(5, 14)]
    assert set(result["ddp"]["mlp"]["overhead_ms"]) == {"fastcomm", "gloo"}
