"""What holds over both transports that go through torch.distributed, "group" and "hierarchical":
the bits of results, deadlines of what is large, and the modes that torch may be in. Ranks of even
and of odd numbers take each other for those of two hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
import torch

import fastcomm
from fastcomm.transports.group import exchange, shards
from tests.support.collective_checks import CALLS
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.reference import (
    FLOATS,
    HALVES,
    OPS,
    assert_same_bits,
    check_all_reduce,
    reduced,
    shards_of,
)
from tests.support.transports import TRANSPORTS_OVER_TORCH

# What travels with the announcement, in one exchange, in two, in several of these chunks.
SIZES = (37, 700, 5001, 140_001)
CHUNK_NBYTES = 2**16

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*TRANSPORTS_OVER_TORCH),
]


# 16-bit floats are added in float32 and rounded once


def _all_reduce(comm, tensor, op, wire_dtype):
    comm.all_reduce(tensor, op)


def _reduce_bucket(comm, tensor, op, wire_dtype):
    flat = torch.cat([tensor, tensor.new_zeros(1)])
    bucket = comm.bind_bucket(flat, [flat[:-1]], [0], wire_dtype=wire_dtype, label=1)
    assert bucket.launch(op, []).present() == [True]
    tensor.copy_(flat[:-1])


REDUCTIONS = {"all_reduce": _all_reduce, "bucket": _reduce_bucket}


def exact_shards(dtype, n, numel):
    """Random 16-bit floats whose sums are exact in float32, in whatever order they are added."""
    random = torch.Generator().manual_seed(numel)
    return [
        torch.randint(-255, 256, (numel,), generator=random).to(dtype) * 2.0**-6 for _ in range(n)
    ]


@contextlib.contextmanager
def in_chunks():
    """For bodies: what they reduce in here is cut into chunks of CHUNK_NBYTES."""
    modules = exchange, shards
    before = [module.CHUNK_NBYTES for module in modules]
    for module in modules:
        module.CHUNK_NBYTES = CHUNK_NBYTES
    try:
        yield
    finally:
        for module, nbytes in zip(modules, before, strict=True):
            module.CHUNK_NBYTES = nbytes


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@on_ranks(3, 4)
def test_16_bit_floats_are_rounded_once(comm, dtype, reduction):
    for numel in SIZES:
        shards = exact_shards(dtype, comm.world_size, numel)
        for op in ("sum", "min", "max"):
            tensor = shards[comm.rank].clone()
            with in_chunks():
                REDUCTIONS[reduction](comm, tensor, op, None)
            assert_same_bits(tensor, reduced(shards, op))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@on_ranks(4)
def test_16_bit_floats_may_cancel_between_hosts(comm, reduction):
    tensor = torch.full((5000,), 40_000.0 * (-1) ** comm.rank, dtype=torch.float16)
    REDUCTIONS[reduction](comm, tensor, "sum", None)
    assert (tensor == 0).all()
    tensor = torch.full((5000,), 1.0 if comm.rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    REDUCTIONS[reduction](comm, tensor, "sum", None)
    assert (tensor == 1 + 2.0**-6).all()


@on_ranks(4)
def test_a_wire_dtype_that_was_chosen_stays(comm):
    """bfloat16: 1, and from three ranks half a unit of its last place."""
    tensor = torch.full((5000,), 1.0 if comm.rank == 0 else 2.0**-8, dtype=torch.bfloat16)
    _reduce_bucket(comm, tensor, "sum", torch.bfloat16)
    rounded_per_host = comm.backend == "hierarchical"
    assert (tensor == (1 + 2.0**-7 if rounded_per_host else 1 + 2.0**-6)).all()


@pytest.mark.parametrize("wire_dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@on_ranks(3)
def test_any_wire_dtype_carries_any_dtype(comm, dtype, wire_dtype):
    for numel in (37, 5001):
        shards = [
            shard.abs().clamp(0, 1).round() for shard in shards_of(dtype, comm.world_size, numel)
        ]
        tensor = shards[comm.rank].clone()
        _reduce_bucket(comm, tensor, "sum", wire_dtype)
        assert_same_bits(tensor, reduced(shards, "sum"))


# The same bits on all ranks


def shards_with_nans(dtype, n, numel):
    """NaNs quiet and signalling, of both signs, with payloads that differ from rank to rank."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    infinity = torch.tensor(float("inf"), dtype=dtype).view(integer)
    shards = [shard.clone() for shard in shards_of(dtype, n, numel)]
    for rank, shard in enumerate(shards):
        bits = shard.view(integer)
        some = slice(rank, None, 3)
        payloads = torch.arange(bits[some].numel(), dtype=integer) * 7 % 127 + rank + 1
        bits[some] = infinity | payloads
        bits[rank :: 3 * 2] |= torch.iinfo(integer).min
        bits[5 * rank :: 11] = infinity
    return shards


def assert_same_on_all(comm, tensor):
    ours = tensor.view(torch.uint8)
    everyones = ours.new_empty(comm.world_size * ours.numel())
    comm.all_gather_single(everyones, ours)
    assert all(torch.equal(theirs, ours) for theirs in everyones.view(comm.world_size, -1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@on_ranks(3)
def test_results_have_the_same_bits_on_all_ranks_whatever_nans_there_are(comm, dtype):
    torch.set_num_threads(1 + comm.rank % 2)  # which cut loops at other places
    results = []
    wire_dtypes = itertools.cycle((None, *HALVES))  # each size, and each operation, meets all three
    for numel in (*SIZES[:3], 70_001):
        shards = shards_with_nans(dtype, comm.world_size, numel)
        for op in OPS if numel != 5001 else ["mean"]:
            results.append(shards[comm.rank].clone())
            _reduce_bucket(comm, results[-1], op, next(wire_dtypes))
            results.append(shards[comm.rank].clone())
            comm.all_reduce(results[-1], op)
            assert torch.equal(results[-1].isnan(), reduced(shards, op).isnan())
    assert_same_on_all(comm, torch.cat(results))
    torch.set_num_threads(1)


# Deadlines are for what does not move

TIMEOUT_S, CHUNK_S, N_CHUNKS = 1.0, 0.1, 14


class _Slow:
    """A group, or a communicator, over which a chunk takes CHUNK_S and more than that longer."""

    def __init__(self, fast):
        self._fast = fast

    def __getattr__(self, name):
        method = getattr(self._fast, name)
        if name in ("close", "abort", "rank", "world_size", "empty"):
            return method

        def slow(*arguments):
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            tensors += [one for some in arguments if isinstance(some, list) for one in some]
            seconds = CHUNK_S * max(tensor.nbytes for tensor in tensors) / CHUNK_NBYTES
            if name in ("send", "recv"):  # many are posted before the first is waited for
                return _SlowWork(method(*arguments), seconds)
            time.sleep(seconds)
            return method(*arguments)

        return slow


class _SlowWork:
    def __init__(self, fast, seconds):
        self._fast, self._seconds = fast, seconds

    def wait(self):
        time.sleep(self._seconds)
        return self._fast.wait()


def _take_long(place, transport, collective):
    exchange.CHUNK_NBYTES = shards.CHUNK_NBYTES = CHUNK_NBYTES
    options = {"rank": place.rank, "world_size": 2, "init_method": place.init_method}
    with fastcomm.init(transport, **options) as comm:
        comm._queue.watchdog._timeout_s = TIMEOUT_S
        comm._exchange.group = _Slow(comm._exchange.group)
        if transport == "hierarchical":
            comm._exchange._shm = _Slow(comm._exchange._shm)
        before = time.monotonic()
        CALLS[collective](comm, torch.ones(2 * N_CHUNKS * CHUNK_NBYTES // 4))
        seconds = time.monotonic() - before
        comm.barrier()
        return seconds


@pytest.mark.parametrize(
    "transport, collective",
    list(zip(itertools.cycle(TRANSPORTS_OVER_TORCH), CALLS)),  # noqa: B905
    indirect=["transport"],
)
def test_what_is_large_may_take_longer_than_the_deadline(transport, collective):
    one_host = {"GLOO_SOCKET_IFNAME": "lo", "FASTCOMM_HOST_ID": "one"}
    outcomes = fresh_ranks(2, _take_long, transport, collective, env=one_host)
    assert min(values_of(outcomes)) > TIMEOUT_S


# Modes of torch's


@on_ranks(2)
def test_collectives_work_under_inference_mode(comm):
    for numel in (10, 3000, 70_001):
        with torch.inference_mode():
            check_all_reduce(comm, numel, torch.bfloat16, "mean", "comm.empty")
            tensor = torch.full((numel,), float(comm.rank))
            comm.broadcast_all([tensor], 1)
            _reduce_bucket(comm, tensor, "sum", torch.bfloat16)
            out = tensor.new_empty(2 * numel)
            comm.all_gather_single(out, tensor)
            comm.reduce_scatter_single(tensor, out)
            assert (tensor == 4).all()
        comm.all_reduce(out)  # one of that mode's, outside
        assert (out == 4).all()


@on_ranks(2)
def test_a_bucket_of_inference_tensors_is_reduced_outside_that_mode_too(comm):
    with torch.inference_mode():
        flat = torch.ones(3001)
        bucket = comm.bind_bucket(flat, [flat[:3000]], [0], wire_dtype=torch.bfloat16, label=1)
        bucket.launch("sum", []).wait()
    flat = torch.ones(3001)
    with torch.inference_mode():
        bucket = comm.bind_bucket(flat, [flat[:3000]], [0], wire_dtype=torch.bfloat16, label=1)
    bucket.launch("sum", []).wait()
    assert (flat[:3000] == 2).all()
