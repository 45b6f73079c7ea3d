"""A ShardedOptimizer over NCCL: buckets are reduced into the ranks' shards, and parameters gathered
from them, by the calls that are made for it, and in order.
"""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import NcclError
from tests.fakes.stand_ins import failing, loaded, log_of
from tests.fakes.torch_streams import TorchStreams
from tests.support.bodies import raised
from tests.support.models import Heads, backward, loss_of, mlp
from tests.support.outcomes import values_of
from tests.support.sharded_pairs import Lion, Pair
from tests.transports.nccl import abandon_on_last_rank, communicator, outcomes_of, stand_in_values

# Two buckets, in the order in which they are full: one weight and one bias each.
TWO_LAYERS = {"bucket_cap_mb": 0.0005}
FLOAT32, BFLOAT16 = 7, 9
WINDOW = ("ncclCommWindowRegister",)  # comes before the first gather


def _two_layers():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def _calls(log):
    """What was called, with how many elements, of which dtype, from or into which rank."""
    found = [re.match(r"(nccl\w+)(?: numel=(\d+))?(?: dtype=(\d+))?", line) for line in log]
    roots = [re.search(r"root=(\d+)", line) for line in log]
    return [
        (one[1], *(int(n) for n in one.groups()[1:] if n), *([int(root[1])] if root else []))
        for one, root in zip(found, roots, strict=True)
        if one
    ]


def _step(place, kind, options):
    """What reaches NCCL in a backward, and in a step."""
    comm = communicator(place)
    model = _two_layers()
    reducer = fastcomm.Reducer(comm, **TWO_LAYERS, **options).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, kind, lr=0.1)
    logs = []
    for work in (lambda: model(torch.ones(2, 16)).sum().backward(), optimizer.step):
        loaded("nccl").stand_in_clear_log()
        work()
        logs.append(_calls(log_of(loaded("nccl"))))
    return logs


@pytest.mark.parametrize(
    "wire_dtype, number", [(None, FLOAT32), (torch.bfloat16, BFLOAT16)], ids=["as it is", "cast"]
)
def test_equal_shards_are_reduce_scattered_and_gathered(wire_dtype, number):
    shard = 144  # of 272, to the next cache line
    bucket = [
        ("ncclGroupStart",),
        ("ncclReduceScatter", shard, number),
        ("ncclAllReduce", 2, number),  # which rank has which gradients
        ("ncclGroupEnd",),
    ]
    for backwards, steps in stand_in_values(2, _step, torch.optim.SGD, {"wire_dtype": wire_dtype}):
        assert backwards == bucket * 2
        assert steps == [WINDOW, ("ncclAllGather", shard, FLOAT32)] * 2


def test_whole_parameters_are_reduced_into_their_owner_and_sent_from_it():
    # The last layer is shared out; then rank 0 has had less, and gets the first one.
    last, first = [(16, FLOAT32, 0), (256, FLOAT32, 1)], [(272, FLOAT32, 0)]
    for backwards, steps in stand_in_values(2, _step, Lion, {}):
        reduces = [call[1:] for call in backwards if call[0] == "ncclReduce"]
        assert reduces == last + first
        assert [call for call in backwards if "Group" in call[0]] == [
            ("ncclGroupStart",),
            ("ncclGroupEnd",),
        ] * 2
        assert steps == [
            WINDOW,
            ("ncclGroupStart",),
            *[("ncclBroadcast", *one) for one in last],
            ("ncclGroupEnd",),
            WINDOW,
            ("ncclBroadcast", *first[0]),
        ]


def _gather_twice(place):
    """By step: which calls came, by which communicator."""
    comm = communicator(place)
    model = _two_layers()
    reducer = fastcomm.Reducer(comm, **TWO_LAYERS).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    steps = []
    for is_last in (False, True):
        model(torch.ones(2, 16)).sum().backward()
        loaded("nccl").stand_in_clear_log()
        optimizer.step()
        calls = [re.match(r"nccl(\w+).*comm=(\w+)", line) for line in log_of(loaded("nccl"))]
        steps.append([one.groups() for one in calls if one])
        if not is_last:
            abandon_on_last_rank(place, comm)
    return steps


def _gather_without_windows(place):
    comm = communicator(place)
    loaded("nccl").stand_in_give_windows(0)
    model = _two_layers()
    reducer = fastcomm.Reducer(comm, **TWO_LAYERS).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1)
    counts = []
    for _ in range(2):
        loaded("nccl").stand_in_clear_log()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        counts.append(_calls(log_of(loaded("nccl"))).count(WINDOW))
    return counts


def test_where_nccl_gives_no_window_it_is_asked_once():
    assert stand_in_values(2, _gather_without_windows) == [[2, 0]] * 2


def test_parameters_are_gathered_in_windows_also_after_an_abandonment():
    for steps in stand_in_values(2, _gather_twice):
        for calls in steps:
            assert [name for name, _ in calls] == ["CommWindowRegister", "AllGather"] * 2
            assert len({comm for _, comm in calls}) == 1
        first, second = steps
        assert first != second, "the ranks have met again"


def _train_heads(place, kind, options):
    """As the plain optimizer does, where some gradients are missing."""
    comm = communicator(place)

    def run(model, rank, step):
        # head 0 on rank 0 alone, head 1 on all ranks from the second step on, head 2 never
        used = [0] if rank == 0 else [1]
        loss_of(model, rank, step, *([1] if step else []), *used).backward()

    with TorchStreams(comm):
        Pair(comm, Heads(3), kind, {"lr": 0.01}, **options).train(run)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lion], ids=["equal", "whole"])
def test_shards_give_the_parameters_of_whole_buckets(kind, wire_dtype, op):
    options = {"wire_dtype": wire_dtype, "op": op, "bucket_cap_mb": 0.0005}
    stand_in_values(3, _train_heads, kind, options)


# Streams.


def _train(place, kind, options, sharding):
    comm = communicator(place)
    with TorchStreams(comm):
        model = mlp()
        reducer = fastcomm.Reducer(comm, bucket_cap_mb=0.0005, **options).attach(model)
        optimizer = fastcomm.ShardedOptimizer(reducer, kind, lr=0.01, **sharding)
        for step in range(3):
            with reducer.no_sync():
                backward(model, place.rank, step + 10)
            backward(model, place.rank, step)
            reducer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            sum(p.detach().sum() for p in model.parameters())
        reducer.check_in_sync(optimizer)


@pytest.mark.parametrize(
    "options, sharding",
    [
        ({}, {}),
        ({"streams": 2}, {}),
        ({"wire_dtype": torch.bfloat16}, {}),
        ({}, {"keep_gradients": True}),
    ],
    ids=["as it is", "two lanes", "cast", "gradients kept"],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Lion], ids=["equal", "whole"])
def test_training_with_shards_is_ordered(kind, options, sharding):
    stand_in_values(2, _train, kind, options, sharding)


LEGACY_STREAM, BEGIN_CAPTURE, END_CAPTURE = 1, 2, 0  # see test_launches.py


def _capture(place):
    pair = Pair(communicator(place), mlp(), torch.optim.SGD, {"lr": 0.01}, **TWO_LAYERS)
    pair.comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    for step in range(4):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            is_captured = step == 2 and optimizer is pair.sharded
            optimizer.zero_grad()
            if is_captured:
                loaded("cuda").stand_in_capture(BEGIN_CAPTURE)
            backward(model, place.rank, step)
            optimizer.step()
            if is_captured:
                assert loaded("cuda").stand_in_capture(END_CAPTURE) == 0
    pair.check()
    loaded("cuda").stand_in_destroy_graphs()
    pair.comm.close()


def test_a_step_can_be_captured():
    stand_in_values(2, _capture)


# Errors.


def _fail(place, kind, function):
    comm = communicator(place)
    model = mlp()
    reducer = fastcomm.Reducer(comm).attach(model)
    optimizer = fastcomm.ShardedOptimizer(reducer, kind, lr=0.1)

    def step():
        backward(model, place.rank)
        optimizer.step()
        comm.barrier()

    with failing(function, 2) if place.rank == 1 else contextlib.nullcontext():
        message, _ = raised(NcclError, step)
    return message


@pytest.mark.parametrize(
    "kind, function",
    [
        (torch.optim.SGD, "ncclReduceScatter"),
        (torch.optim.SGD, "ncclAllGather"),
        (Lion, "ncclReduce"),
    ],
)
def test_a_call_that_fails_is_named_on_every_rank(kind, function):
    for message in values_of(outcomes_of(2, _fail, kind, function)):
        assert f"rank 1: {function} failed with code 2" in message
