"""Buckets that travel over NCCL in 8 bits with a scale for each block of 256: the bits of the
result, what reaches NCCL, and what may not be rounded.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm import NcclError
from fastcomm.transports.group.wire import BLOCK, Wire
from tests.fakes.stand_ins import failing, loaded, log_of
from tests.support.bodies import raised
from tests.support.models import gradients, mean_gradients, mlp
from tests.transports.nccl import communicator, stand_in_values

STEP = 0.5 / 127  # the most that rounding changes, of the largest in a block
NBYTES = BLOCK + 4


def _bucket(comm, numel):
    """A bucket with one parameter, and its gradient, which the flat buffer ends with nothing but
    the used mask behind.
    """
    flat = comm.empty(numel + 1, dtype=torch.float32).zero_()
    bucket = comm.bind_bucket(flat, [flat[:numel]], [0], wire_dtype=torch.int8, label=1)
    parameter = nn.Parameter(torch.zeros(numel))
    parameter.grad = flat[:numel]
    return bucket, parameter


def _values(rank, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    return values * 10.0 ** (torch.arange(numel) // BLOCK % 5 - 2)


# The bits


def _reduce(place, numels, op):
    comm = communicator(place)
    results = []
    for numel in numels:
        bucket, parameter = _bucket(comm, numel)
        for step in range(2):
            parameter.grad.copy_(_values(place.rank + 7 * step, numel))
            bucket.gather([parameter])
            bucket.launch(op, []).wait()
            results.append(parameter.grad.clone())
    return results


def _sum_between_hosts(numel, step, world_size):
    """By the wire between hosts, which group/test_blocks.py tests."""
    of_ranks = 4 * BLOCK * world_size
    padded = -(-numel // of_ranks) * of_ranks
    rows = torch.zeros(world_size, padded)
    for rank in range(world_size):
        rows[rank, :numel] = _values(rank + 7 * step, numel)
    wire = Wire(torch.int8, error_feedback=False)
    result = []
    for owner, shard in enumerate(rows.view(world_size, world_size, -1).unbind(1)):
        coded = wire.rows_for(world_size, shard.shape[1])
        for rank in range(world_size):
            wire.encode(0, shard[rank], coded[rank])
        total = wire.reduce(coded, shard.clone(), owner, "sum")
        wire.encode(0, total, coded[0])
        wire.decode(coded[0], total)
        result.append(total)
    return torch.cat(result)[:numel]


NUMELS = (1, 255, 1024, 2048, 3 * 1024 + 1, 20_003)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sum_has_the_bits_that_it_has_between_hosts_on_every_rank(world_size):
    expected = [_sum_between_hosts(n, step, world_size) for n in NUMELS for step in range(2)]
    for results in stand_in_values(world_size, _reduce, NUMELS, "sum"):
        for result, exact in zip(results, expected, strict=True):
            assert torch.equal(result, exact)


def test_a_greatest_gradient_is_found_in_8_bits():
    first, second = stand_in_values(2, _reduce, [5000], "max")
    exact = torch.maximum(_values(7, 5000), _values(8, 5000))
    torch.testing.assert_close(first[1], exact, rtol=0, atol=2.1 * STEP * exact.abs().max().item())
    assert torch.equal(first[1], second[1])


# What reaches NCCL


def _launch(place):
    comm = communicator(place)
    bucket, parameter = _bucket(comm, 5000)
    loaded("nccl").stand_in_clear_log()
    bucket.gather([parameter])
    bucket.launch("sum", []).wait()
    return [
        re.match(r"(nccl\w+)(?: numel=(\d+))?", line).groups() for line in log_of(loaded("nccl"))
    ]


def test_rows_go_to_their_owners_and_sums_come_back_in_two_groups():
    row = str(8 * NBYTES)  # of 5000 elements three times as many, in fours
    for calls in stand_in_values(3, _launch):
        moves = [call for call in calls if "Group" not in call[0]]
        assert moves == [
            *[("ncclSend", row), ("ncclRecv", row)] * 2,
            ("ncclAllGather", row),
            ("ncclAllReduce", "1"),  # which gradients there are
        ]
        assert len(calls) == len(moves) + 4


def _fail(place, function):
    comm = communicator(place)
    bucket, parameter = _bucket(comm, 5000)
    bucket.gather([parameter])
    with failing(function, 5):
        return raised(NcclError, lambda: bucket.launch("sum", []))[0]


@pytest.mark.parametrize("function", ["ncclSend", "ncclAllGather"])
def test_a_call_that_fails_is_named(function):
    for error in stand_in_values(2, _fail, function):
        assert f": {function} failed" in error


# Training


def _run(model, rank, step=0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().sum().backward()


def _own_gradients(model, rank):
    """What a rank adds, as one vector."""
    return nn.utils.parameters_to_vector(mean_gradients(model, 1, lambda one, _: _run(one, rank)))


def _weigh(place):
    comm = communicator(place)
    model = mlp()
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8).attach(model)
    first, second = (_own_gradients(model, rank) for rank in range(2))
    reducer.set_weight(1 + 2 * place.rank)
    _run(model, place.rank)
    found = nn.utils.parameters_to_vector(gradients(model))
    atol = 2.1 * STEP * float(torch.maximum(first.abs(), second.abs()).max())
    torch.testing.assert_close(found, (first + 3 * second) / 4, rtol=0, atol=atol)
    return found


def test_weights_are_applied_before_gradients_are_rounded():
    first, second = stand_in_values(2, _weigh)
    assert torch.equal(first, second)


def _shard(place):
    """Parameters after steps of a sharded optimizer, and of a plain one."""
    comm = communicator(place)
    models = mlp(), mlp()
    for index, model in enumerate(models):
        reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8).attach(model)
        kind = torch.optim.SGD
        if index:
            optimizer = fastcomm.ShardedOptimizer(reducer, kind, lr=0.1)
        else:
            optimizer = kind(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            _run(model, place.rank, step)
            reducer.clip_grad_norm_(1.0)
            optimizer.step()
        reducer.refresh()
    for ours, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, other)


def test_a_sharded_optimizer_makes_the_steps_of_a_plain_one():
    stand_in_values(2, _shard)
