"""DDP's buckets over the backend "fastcomm" lie in the group's shared memory, and DDP keeps all its
promises on them.
"""

from __future__ import annotations

import gc
import inspect
import os
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.support import process_groups
from tests.support.memory import lies_in_shared_memory, resident_bytes
from tests.support.models import Heads, assert_same_parameters, backward, loss_of, mlp, train
from tests.support.outcomes import values_of
from tests.support.process_groups import gloo, noted_all_reduces, start, world
from tests.support.ranks import fresh_ranks, on_ranks

ranks = process_groups.ranks  # a pool of this module's own


def _watch(model):
    """Registers a hook that notes, per bucket, the dtype and whether it is in shared memory."""
    seen = []

    def hook(group, bucket):
        seen.append((bucket.buffer().dtype, lies_in_shared_memory(bucket.buffer())))
        return default_hooks.allreduce_hook(group, bucket)

    model.register_comm_hook(model.process_group, hook)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.0005},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=["default", "small buckets", "bucket views", "static graph", "unused parameters"],
)
@on_ranks(2)
def test_buckets_lie_in_shared_memory_also_when_they_are_made_anew(comm, options):
    model = DistributedDataParallel(mlp(), process_group=world(), **options)
    seen = _watch(model)
    train(model, backward, comm.rank, 3)
    assert len(seen) >= 3
    assert set(seen) == {(torch.float32, True)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@on_ranks(2)
def test_buckets_of_every_dtype_lie_in_shared_memory(comm, dtype):
    model = DistributedDataParallel(nn.Linear(8, 4).to(dtype), process_group=world())
    seen = _watch(model)
    for _ in range(3):
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    assert set(seen) == {(dtype, True)}


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="DDP has no bucket_cap_mb_list before torch 2.12",
)
@on_ranks(2)
def test_buckets_with_a_limit_each_lie_in_shared_memory(comm):
    models = [
        DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb_list=[1, 2])
        for group in (world(), gloo())
    ]
    seen = _watch(models[0])
    for model in models:
        train(model, backward, comm.rank, 3)
    assert set(seen) == {(torch.float32, True)}
    assert_same_parameters(*models)


@pytest.mark.skipif(
    "lazy_bucket_allocation" not in inspect.signature(DistributedDataParallel).parameters,
    reason="DDP has no lazy_bucket_allocation before torch 2.15",
)
@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_buckets_made_anew_in_every_backward_stay_where_torch_puts_them(comm, views):
    models = [
        DistributedDataParallel(
            mlp(),
            process_group=group,
            gradient_as_bucket_view=views,
            lazy_bucket_allocation=True,
        )
        for group in (world(), gloo())
    ]
    seen = _watch(models[0])
    for model in models:
        train(model, backward, comm.rank, 3)
    assert set(seen) == {(torch.float32, False)}
    assert_same_parameters(*models)


@on_ranks(2)
def test_buckets_over_another_backend_stay_where_torch_puts_them(comm):
    model = DistributedDataParallel(mlp(), process_group=gloo())
    seen = _watch(model)
    train(model, backward, comm.rank, 3)
    assert set(seen) == {(torch.float32, False)}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", ["fp16", "powerSGD"])
@on_ranks(2)
def test_hooks_of_torch_train_as_over_gloo(comm, hook, views):
    models = []
    for group in (world(), gloo()):
        model = DistributedDataParallel(mlp(), process_group=group, gradient_as_bucket_view=views)
        if hook == "powerSGD":
            state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        train(model, backward, comm.rank, 4)
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_unused_parameters_and_accumulation_train_bitwise_as_over_gloo(comm, views):
    models = [
        DistributedDataParallel(
            Heads(4),
            process_group=group,
            find_unused_parameters=True,
            gradient_as_bucket_view=views,
        )
        for group in (world(), gloo())
    ]

    def run(model, rank, step):
        with model.no_sync():
            loss_of(model, rank, 2 * step, step % 3).backward()
        loss_of(model, rank, 2 * step + 1, (rank + step) % 3).backward()

    for model in models:
        train(model, run, comm.rank, 4)
    assert_same_parameters(*models)


@on_ranks(2)
def test_a_compiled_model_trains_bitwise_as_over_gloo(comm):
    models = [DistributedDataParallel(mlp(), process_group=group) for group in (world(), gloo())]
    for model in models:
        train(torch.compile(model, backend="eager"), backward, comm.rank, 4)
    assert_same_parameters(*models)


@on_ranks(2)
def test_memory_does_not_grow_when_models_come_and_go(comm):
    for number in range(50):
        model = DistributedDataParallel(nn.Linear(256, 1024), process_group=world())
        for _ in range(number % 3):  # made, made and used, made anew
            model(torch.ones(1, 256)).sum().backward()
        del model
        gc.collect()
        if number == 10:
            before = resident_bytes()
    # The 39 models that follow have buckets of 1 MiB.
    assert resident_bytes() - before < 4 * 2**20


def _page_faults_of_steps(place):
    start(place)
    # 36 MiB of gradients in one tensor, which malloc takes from the system for each step if nobody
    # tells it otherwise.
    ddp = DistributedDataParallel(nn.Linear(3072, 3072, bias=False))
    counts = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ddp.zero_grad()
        ddp(torch.ones(1, 3072)).sum().backward()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del ddp
    dist.destroy_process_group()
    return counts


def test_steps_find_the_memory_of_earlier_gradients():
    for counts in values_of(fresh_ranks(2, _page_faults_of_steps)):
        assert min(counts) < 1000


def _keep_gradients(place):
    start(place)
    model = nn.Linear(64, 64)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for _ in range(3):
        model.zero_grad()
        ddp(torch.full((1, 64), 1.0 + place.rank)).sum().backward()
    del ddp
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
    assert lies_in_shared_memory(model.weight.grad)
    assert torch.equal(model.weight.grad, torch.full((64, 64), 1.5))


def test_gradients_in_a_bucket_outlive_the_group():
    values_of(fresh_ranks(2, _keep_gradients))


@on_ranks(2)
def test_a_forked_child_writes_gradients_of_its_own(comm):
    model = DistributedDataParallel(mlp(), process_group=world(), gradient_as_bucket_view=True)
    backward(model, comm.rank, 0)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    child = os.fork()
    if child == 0:
        for parameter in model.parameters():
            parameter.grad.fill_(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


@on_ranks(2)
def test_only_ddp_has_its_buckets_reduced_within_the_call(comm):
    """DDP waits for each of them at once: nothing is gained by a Work under way and a thread."""
    ddp = DistributedDataParallel(mlp(), process_group=world(), bucket_cap_mb=0.0005)
    with noted_all_reduces() as noted:
        for step in range(3):
            backward(ddp, comm.rank, step)
        of_ddp = len(noted)
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    assert of_ddp > 3
    assert [options for _, options in noted] == [{}] * of_ddp + [{"async_op": True}]
