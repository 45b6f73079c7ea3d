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
from tests.support.models import SMALL_BUCKETS, gradients, mean_gradients, mlp
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
    model(x.to(model[0].weight.dtype)).square().sum().backward()


def _own_gradients(model, rank, step=0):
    """What a rank adds, as one vector."""
    return nn.utils.parameters_to_vector(
        mean_gradients(model, 1, lambda one, _: _run(one, rank, step))
    )


def _train(place, options, dtype):
    """The gradients of two steps, and how far they are off, of what rounding may change."""
    comm = communicator(place)
    model = mlp().to(dtype)
    scale = place.world_size if options.get("op") == "sum" else 1
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8, **options).attach(model)
    steps = []
    for step in range(2):
        rows = torch.stack([_own_gradients(model, rank, step) for rank in range(place.world_size)])
        model.zero_grad(set_to_none=step == 0)
        _run(model, place.rank, step)
        found = nn.utils.parameters_to_vector(gradients(model))
        most = 2.1 * STEP * scale * float(rows.abs().max())
        steps.append((found, float((found - scale * rows.mean(0)).abs().max()) / most))
    reducer.check_in_sync()
    return steps


OPTIONS = {
    "mean": {},
    "sum": {"op": "sum"},
    "many buckets": {"streams": 2, **SMALL_BUCKETS},
    "at the end": {"overlap": False},
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_rounded_once_before_and_once_after_they_are_added(world_size, options):
    ranks = stand_in_values(world_size, _train, options, torch.float32)
    for step in zip(*ranks, strict=True):
        for found, off in step:
            assert torch.equal(found, step[0][0]) and 0 < off <= 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_keep_their_own_dtype(dtype):
    first, second = stand_in_values(2, _train, {}, dtype)
    for (found, off), (other, _) in zip(first, second, strict=True):
        assert found.dtype == dtype and torch.equal(found, other)
        assert 0 < off <= (1 if dtype == torch.float64 else 2)


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


# What is not finite


def _reduce_what_is_not_finite(place, bad):
    comm = communicator(place)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 300))  # and gaps between the gradients
    reducer = fastcomm.Reducer(comm, wire_dtype=torch.int8).attach(model)
    counts, norms = [], []
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        loss = model(torch.ones(2, 8)).sum()
        if step == 1 and place.rank == 1:
            loss = loss + model[0].weight[0, 0] * bad
        loss.backward()
        counts.append(int(reducer.nonfinite_count()))
        norms.append(float(reducer.clip_grad_norm_(1e9)))
    return counts, norms


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_reaches_every_rank_and_is_over_with_its_round(bad):
    first, second = stand_in_values(2, _reduce_what_is_not_finite, bad)
    assert first[0] == second[0]
    counts, norms = first
    assert counts[0] == counts[2] == 0 < counts[1]
    assert norms[0] == norms[2]


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
