"""Who waits for whom: torch's work, our kernels and NCCL's collectives on streams, each of which
could run ahead of the others. A body fails where something is not ordered: see
tests/fakes/torch_streams.py.
"""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

import fastcomm
from tests.fakes.stand_ins import loaded, log_of
from tests.fakes.torch_streams import TorchStreams
from tests.support.collective_checks import CALLS
from tests.support.models import (
    SMALL_BUCKETS,
    Heads,
    assert_gradients,
    backward,
    loss_of,
    mean_gradients,
    mlp,
)
from tests.transports.nccl import communicator, stand_in_values

# Whole training steps, on one stream.


def _train(place, options):
    comm = communicator(place)
    with TorchStreams(comm):
        model = mlp()
        expected = mean_gradients(model, place.world_size, backward)
        reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS, **options).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step < 2)
            backward(model, place.rank)
            reducer.clip_grad_norm_(1e9)
            reducer.nonfinite_count()
            optimizer.step()
        reducer.check_in_sync()
    if "wire_dtype" not in options:
        assert_gradients(model, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"streams": 2},
        {"wire_dtype": torch.bfloat16},
        {"wire_dtype": torch.int8, "streams": 2},
        {"overlap": False},
    ],
    ids=["as it is", "two lanes", "cast", "in blocks", "at the end"],
)
def test_training_is_ordered(options):
    stand_in_values(2, _train, options)


# Gradients that are flattened while the stream that launched goes on.


def _launch_one_after_the_other(place, awaiting):
    """How many gradients are kept after each launch, and when all have been awaited. Memory is
    used again as soon as it is free.
    """
    comm = communicator(place)
    with TorchStreams(comm, 2) as streams:
        gradients, kept, works = [], [], []
        for label in range(5):
            flat = comm.empty(65, dtype=torch.float32).zero_()
            bucket = comm.bind_bucket(flat, [flat[:64]], [0], wire_dtype=None, label=label)
            parameter = torch.nn.Parameter(torch.zeros(64))
            parameter.grad = torch.ones(64)
            gradients.append(weakref.ref(parameter.grad))
            bucket.gather([parameter])
            works.append(bucket.launch("sum", []))
            kept.append(sum(gradient() is not None for gradient in gradients))
            torch.zeros(64)
        with streams.on(streams.streams[awaiting]):
            for work in works:
                work.wait()
        torch.zeros(64)
    return kept, [gradient() for gradient in gradients]


@pytest.mark.parametrize("awaiting", [0, 1], ids=["the same stream", "another stream"])
def test_gradients_of_two_buckets_at_most_are_kept_until_they_have_been_flattened(awaiting):
    for kept, left in stand_in_values(2, _launch_one_after_the_other, awaiting):
        assert kept == [1, 2, 2, 2, 2] and left == [None] * 5


# Gradients that autograd produces on another stream than the one that is current at the launch.


def _gradients_of_another_stream(place, make, wire_dtype):
    comm = communicator(place)
    with TorchStreams(comm, 2) as streams:
        n = len(GRADIENTS[make])
        flat = comm.empty(n * 65, dtype=torch.float32).zero_()
        views = list(flat[: n * 64].view(n, 8, 8))
        offsets = [64 * i for i in range(n)]
        bucket = comm.bind_bucket(flat, views, offsets, wire_dtype=wire_dtype, label=1)
        parameters = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(n)]
        for _ in range(3):
            with streams.on(streams.streams[1]):
                for parameter, gradient in zip(parameters, GRADIENTS[make], strict=True):
                    parameter.grad = gradient()
                bucket.note_stream()
            bucket.gather(parameters)
            bucket.launch("sum", []).wait()
            for parameter in parameters:
                assert parameter.grad.sum().item() == 128


def _fit():
    return torch.ones(8, 8)


def _misfit():
    """A gradient that torch has to copy."""
    return torch.ones(8, 8).t()


GRADIENTS = {
    "read where it is": [_fit],
    "copied": [_misfit],
    "copied between others": [_fit, _misfit, _fit],
}


@pytest.mark.parametrize("make", GRADIENTS)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_a_bucket_is_ordered_after_gradients_of_another_stream(make, wire_dtype):
    stand_in_values(2, _gradients_of_another_stream, make, wire_dtype)


def _rounds_on_other_streams(place, wire_dtype):
    """Each round is launched on a stream that has not waited for the one before."""
    comm = communicator(place)
    with TorchStreams(comm, 3) as streams:
        flat = comm.empty(101, dtype=torch.float32).fill_(1)
        bucket = comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=wire_dtype, label=1)
        parameter = torch.nn.Parameter(torch.zeros(100))
        parameter.grad = flat[:100]
        for stream in streams.streams:
            with streams.on(stream):
                streams.wait_for(streams.streams[0])
        for i in (0, 2, 1, 0):
            with streams.on(streams.streams[i]):
                bucket.gather([parameter])
                work = bucket.launch("mean", [])
            with streams.on(streams.streams[(i + 1) % 3]):
                work.wait()
        with streams.on(streams.streams[1]):
            assert parameter.grad.sum().item() == 100


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_a_bucket_is_ordered_after_its_last_round_on_whatever_streams(wire_dtype):
    stand_in_values(2, _rounds_on_other_streams, wire_dtype)


def _train_on_two_streams(place, options):
    """The weights' gradients come from another stream, as if the forward had used it for them."""
    comm = communicator(place)
    with TorchStreams(comm, 3) as streams:
        model = Heads()  # one is not used, so that ranks have to hear who has its gradient
        one, other, _ = streams.streams
        for parameter in list(model.parameters())[::2]:
            parameter.register_hook(lambda gradient: _produced_on(streams, other, gradient))
        fastcomm.Reducer(comm, **options).attach(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: setattr(streams, "current", one)
            )
        for step in range(3):
            model.zero_grad()
            loss_of(model, place.rank, step, 0).backward()
            streams.wait_for(other)  # as autograd does at the end of a backward
            for parameter in model.heads[0].parameters():
                parameter.grad.sum()


def _produced_on(streams, other, gradient):
    """A copy that belongs to the other stream, which is current until the gradient has arrived."""
    before, streams.current = streams.current, other
    streams.wait_for(before)
    streams.record(gradient)  # as autograd does
    return gradient.clone()


@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS], ids=["one bucket", "many buckets"])
def test_training_on_two_streams_is_ordered(options):
    stand_in_values(2, _train_on_two_streams, options)


# Collectives of single tensors.

COLLECTIVES = CALLS | {
    "mean": lambda comm, t, **how: comm.all_reduce(t, "mean", **how),
    "mean of a shard": lambda comm, t, **how: comm.reduce_scatter_single(
        t[:4], t + 0, "mean", **how
    ),
    "mean of many": lambda comm, t, **how: comm.all_reduce_coalesced(
        t.tensor_split(3), "mean", **how
    ),
}
# A mean takes another way for each: scaled before, or after, or summed in a wider type.
DTYPES = (torch.float32, torch.float16, torch.int32)


def _call(place):
    comm = communicator(place)
    with TorchStreams(comm):
        for call in COLLECTIVES.values():
            for dtype in DTYPES:
                tensor = torch.ones(8, dtype=dtype)
                call(comm, tensor)
                tensor.add_(1)
        comm.broadcast_all([tensor, tensor + 1])
        tensor.add_(1)
        comm.barrier()


def test_a_collective_is_ordered_with_the_caller_s_stream():
    stand_in_values(2, _call)


def _wait_on_other_streams(place):
    """The stream of the launch has no part in what becomes of the results."""
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)  # or the host would know what is over
    with TorchStreams(comm, 3) as streams:
        one, other, third = streams.streams
        tensors = [torch.ones(8, dtype=dtype) for dtype in DTYPES for _ in COLLECTIVES]
        calls = [call for _ in DTYPES for call in COLLECTIVES.values()]
        works = [
            call(comm, tensor, async_op=True) for call, tensor in zip(calls, tensors, strict=True)
        ]
        for stream in (other, third):
            with streams.on(stream):
                for work, tensor in zip(works, tensors, strict=True):
                    work.wait()
                    tensor + 1
        del work, works
        loaded("cuda").stand_in_hold_events(0)
        time.sleep(0.3)  # the watchdog finds them over, and lets go of their tensors
        streams.wait_for(other)
        streams.wait_for(third)


def test_a_collective_is_ordered_with_all_streams_that_wait_for_it():
    stand_in_values(2, _wait_on_other_streams)


# What the host waits for.


def _split_while_busy(place):
    comm = communicator(place)
    comm.all_reduce(torch.ones(8))
    flat = comm.empty(9, dtype=torch.float32)
    loaded("cuda").stand_in_hold_events(1)
    binding = threading.Thread(
        target=comm.bind_bucket,
        args=(flat, [flat[:8]], [0]),
        kwargs={"wire_dtype": None, "label": 1, "lane": 1},
    )
    binding.start()
    time.sleep(0.3)
    at_once = any("ncclCommSplit" in line for line in log_of(loaded("nccl")))
    loaded("cuda").stand_in_hold_events(0)
    binding.join()
    return at_once, any("ncclCommSplit" in line for line in log_of(loaded("nccl")))


def test_a_lane_is_split_off_when_the_first_is_idle():
    assert stand_in_values(2, _split_while_busy) == [(False, True)] * 2


def _barrier_while_busy(place, async_op):
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)
    returned = []
    calling = threading.Thread(target=lambda: returned.append(_barrier(comm, async_op)))
    calling.start()
    time.sleep(0.3)
    at_once = bool(returned)
    loaded("cuda").stand_in_hold_events(0)
    calling.join()
    return at_once, bool(returned)


def _barrier(comm, async_op):
    work = comm.barrier(async_op=async_op)
    return work is None or work.wait() is None


@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_waits_for_the_device(async_op):
    assert stand_in_values(2, _barrier_while_busy, async_op) == [(False, True)] * 2
