"""Who waits for whom: torch's work, our kernels and NCCL's collectives on streams, each of which
could run ahead of the others. A body fails where something is not ordered: see
tests/support/torch_streams.py.
"""

from __future__ import annotations

import time

import pytest
import torch

import fastcomm
from tests.nccl import communicator, stand_in_values
from tests.support.models import (
    SMALL_BUCKETS,
    Heads,
    assert_gradients,
    backward,
    loss_of,
    mean_gradients,
    mlp,
)
from tests.support.stand_ins import loaded
from tests.support.torch_streams import TorchStreams

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
    [{}, {"streams": 2}, {"wire_dtype": torch.bfloat16}, {"overlap": False}],
    ids=["as it is", "two lanes", "cast", "at the end"],
)
def test_training_is_ordered(options):
    stand_in_values(2, _train, options)


def _train_some(place):
    comm = communicator(place)
    with TorchStreams(comm):
        model = Heads(3)
        reducer = fastcomm.Reducer(comm).attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            with reducer.no_sync():
                loss_of(model, place.rank, step, 0).backward()
            loss_of(model, place.rank, step, 0, *([1] if step % 2 == place.rank else [])).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_training_is_ordered_where_gradients_are_missing_or_accumulated():
    stand_in_values(2, _train_some)


# Gradients that autograd produces on another stream than the one that is current at the launch.


def _gradients_of_another_stream(place, make, wire_dtype):
    comm = communicator(place)
    with TorchStreams(comm, 2) as streams:
        flat = comm.empty(101, dtype=torch.float32).zero_()
        view = flat[:100].view(10, 10)
        bucket = comm.bind_bucket(flat, [view], [0], wire_dtype=wire_dtype, label=1)
        parameter = torch.nn.Parameter(torch.zeros(10, 10))
        for _ in range(3):
            with streams.on(streams.streams[1]):
                parameter.grad = GRADIENTS[make]()
                bucket.note_stream()
            bucket.gather([parameter])
            bucket.launch("sum", []).wait()
            assert parameter.grad.sum().item() == 200


GRADIENTS = {
    "read where it is": lambda: torch.ones(10, 10),
    "copied": lambda: torch.ones(10, 10).t(),
}


@pytest.mark.parametrize("make", GRADIENTS)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_a_bucket_is_ordered_after_gradients_of_another_stream(make, wire_dtype):
    stand_in_values(2, _gradients_of_another_stream, make, wire_dtype)


def _results_on_other_streams(place, wire_dtype):
    """The bucket is launched, waited for and gathered on one stream after the other."""
    comm = communicator(place)
    with TorchStreams(comm, 3) as streams:
        flat = comm.empty(101, dtype=torch.float32).fill_(1)
        bucket = comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=wire_dtype, label=1)
        parameter = torch.nn.Parameter(torch.zeros(100))
        parameter.grad = flat[:100]
        for i in range(4):
            for other in streams.streams if i == 0 else ():
                with streams.on(other):
                    streams.wait_for(streams.streams[0])
            with streams.on(streams.streams[i % 3]):
                bucket.gather([parameter])
                work = bucket.launch("sum", [])
            with streams.on(streams.streams[(i + 1) % 3]):
                work.wait()
                assert parameter.grad.sum().item() == 100 * 2 ** (i + 1)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_a_bucket_is_ordered_after_its_last_round_on_whatever_streams(wire_dtype):
    stand_in_values(2, _results_on_other_streams, wire_dtype)


def _sum(comm, bucket):
    return _Done(comm.all_reduce(bucket.buffer(), async_op=True), bucket.buffer())


class _Done:
    def __init__(self, work, tensor):
        self._work, self._tensor = work, tensor

    def done(self):
        return self._work.is_completed()

    def wait(self):
        self._work.wait()
        return self._tensor


def _train_on_two_streams(place, options, is_hooked):
    """The weights' gradients come from another stream, as if the forward had used it for them."""
    comm = communicator(place)
    if is_hooked:
        options = {**options, "hook": (comm, _sum)}
    with TorchStreams(comm, 2) as streams:
        model = mlp()
        one, other = streams.streams
        for parameter in list(model.parameters())[::2]:
            parameter.register_hook(lambda gradient: _produced_on(streams, other, gradient))
        fastcomm.Reducer(comm, **options).attach(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: setattr(streams, "current", one)
            )
        for step in range(3):
            model.zero_grad()
            backward(model, place.rank, step)
            streams.wait_for(other)  # as autograd does at the end of a backward
            for parameter in model.parameters():
                parameter.grad.sum()


def _produced_on(streams, other, gradient):
    """A copy that belongs to the other stream, which is current until the gradient has arrived."""
    before, streams.current = streams.current, other
    streams.wait_for(before)
    streams.record(gradient)  # as autograd does
    return gradient.clone()


@pytest.mark.parametrize("is_hooked", [False, True], ids=["reducer", "hook"])
@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS], ids=["one bucket", "many buckets"])
def test_training_on_two_streams_is_ordered(options, is_hooked):
    stand_in_values(2, _train_on_two_streams, options, is_hooked)


# Collectives of single tensors.

COLLECTIVES = {
    "all_reduce": lambda comm, t, **how: comm.all_reduce(t, **how),
    "mean": lambda comm, t, **how: comm.all_reduce(t, "mean", **how),
    "broadcast": lambda comm, t, **how: comm.broadcast(t, **how),
    "all_gather_single": lambda comm, t, **how: comm.all_gather_single(t, t[:4] + 0, **how),
    "reduce_scatter_single": lambda comm, t, **how: comm.reduce_scatter_single(
        t[:4], torch.cat([t, t])[4:12], **how
    ),
    "mean of a share": lambda comm, t, **how: comm.reduce_scatter_single(
        t[:4], torch.cat([t, t])[4:12], "mean", **how
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


def _wait_for_nothing(place):
    comm = communicator(place)
    with TorchStreams(comm):
        for call in COLLECTIVES.values():
            for _ in range(2):
                call(comm, torch.ones(8), async_op=True)
        time.sleep(0.3)  # the watchdog finds them over, and lets go of their tensors


def test_tensors_that_nobody_waits_for_live_until_they_are_reduced():
    stand_in_values(2, _wait_for_nothing)


# Memory of NCCL's.


def _drop_memory(place):
    comm = communicator(place)
    with TorchStreams(comm):
        for _ in range(3):
            tensor = comm.empty(1000, dtype=torch.float32).fill_(1)
            comm.all_reduce(tensor)
            tensor.mul_(2)
            del tensor


def test_memory_is_freed_when_the_device_is_done_with_it():
    stand_in_values(2, _drop_memory)


# That the bodies would see what is not ordered.


def _launch_without_order(place):
    comm = communicator(place)
    with TorchStreams(comm, 2) as streams:
        tensor = torch.ones(8)
        with streams.on(streams.streams[1]):
            comm.all_reduce(tensor)


def test_a_body_fails_where_a_stream_was_not_waited_for():
    with pytest.raises(AssertionError, match="ncclAllReduce on stream .* after aten.* on stream"):
        stand_in_values(2, _launch_without_order)
