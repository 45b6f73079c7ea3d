"""What is built on torch.distributed, over the backend "fastcomm": DDP, FSDP2, DTensor, optimizers,
checkpoints.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastcomm
from tests.support import process_groups
from tests.support.bodies import my_place
from tests.support.models import (
    Transformer,
    assert_same_parameters,
    backward,
    convnet,
    image_backward,
    mlp,
    text_backward,
    train,
)
from tests.support.process_groups import gloo, values, world
from tests.support.ranks import on_ranks

ranks = process_groups.ranks  # a pool of this module's own


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
    models = [
        DistributedDataParallel(make(), process_group=group, **options)
        for group in (world(), gloo())
    ]
    for model in models:
        train(model, run, comm.rank, 4)
    assert_same_parameters(*models)


@pytest.mark.parametrize("divide_by_initial_world_size", [False, True])
@on_ranks(2, 3)
def test_ddp_joins_uneven_inputs_dividing_as_over_gloo(comm, divide_by_initial_world_size):
    models = [DistributedDataParallel(mlp(), process_group=group) for group in (world(), gloo())]
    for model in models:
        with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
            train(model, backward, comm.rank, 2 + comm.rank)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)


def _end_in_c(work):
    """Waits for a Work that nobody in Python holds any more, as C++ may."""
    boxed = work.boxed()
    del work
    gc.collect()
    assert dist.Work.unbox(boxed).wait()


@on_ranks(2)
def test_works_can_be_waited_for_in_c_alone(comm):
    world()
    tensors = [values(comm), values(comm).to(torch.int8)]
    for tensor in tensors:
        _end_in_c(dist.all_reduce(tensor, async_op=True))
    _end_in_c(dist.all_gather([torch.zeros(2)] * 2, torch.ones(2), async_op=True))
    total = values(comm)
    dist.all_reduce(total)
    assert torch.equal(tensors[0], total) and torch.equal(tensors[1], total.to(torch.int8))


@on_ranks(2)
def test_an_error_that_passes_through_c_keeps_its_type(comm):
    world()
    with pytest.raises(fastcomm.MismatchError):
        _end_in_c(dist.all_reduce(torch.ones(4 + comm.rank), async_op=True))


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
    sharded = DTensor.from_local(torch.full((3,), comm.rank), mesh, [Shard(0)])
    assert sharded.full_tensor().tolist() == [0, 0, 0, 1, 1, 1]


@on_ranks(2)
def test_a_reducer_refuses_distributed_tensors_by_name(comm):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    world()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = parallelize_module(mlp(), mesh["shards"], {"0": ColwiseParallel()})
    words = r"parameter 0\.weight is a DTensor.*fully_shard"
    with (
        fastcomm.init(group=mesh["replicas"].get_group()) as replicas,
        pytest.raises(ValueError, match=words),
    ):
        fastcomm.Reducer(replicas).attach(model)


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
    assert_same_parameters(*models)


@on_ranks(2)
def test_a_checkpoint_is_saved_and_loaded(comm):
    import torch.distributed.checkpoint as checkpoint

    world()
    folder = f"{my_place().directory}/checkpoint"
    model = mlp()
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    assert_same_parameters(model, other)
