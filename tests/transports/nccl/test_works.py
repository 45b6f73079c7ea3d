"""Asynchronous collectives: how long they keep their tensors, and what they cost the watchdog."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.stand_ins import loaded, log_of, wait_for_call
from tests.transports.nccl import communicator, stand_in_values

LAUNCHED_ON, OTHER = 1, 2  # streams that the stand-in has from the start
BEGIN_GLOBAL, END = 1, 0  # of a capture


def _watched_tensor(dtype):
    """A tensor, and a reference that is dead when its memory is free."""
    memory = numpy.ones(100, dtype=dtype)
    return torch.from_numpy(memory), weakref.ref(memory)


def _drop_after_wait(place, waits_on, dtype):
    """Whether the tensor's memory is free at once, and when the collective is over."""
    comm = communicator(place)
    current = [LAUNCHED_ON]
    comm.cuda.raw_stream = lambda index: current[0]
    loaded("cuda").stand_in_hold_events(1)
    tensor, memory = _watched_tensor(dtype)
    work = comm.all_reduce(tensor, "mean", async_op=True)
    current[0] = waits_on
    work.wait()
    del tensor
    time.sleep(0.3)  # the watchdog looks, and finds that it is not over
    at_once = memory() is None
    loaded("cuda").stand_in_hold_events(0)
    time.sleep(0.3)
    return at_once, memory() is None


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("waits_on", [LAUNCHED_ON, OTHER])
def test_tensors_are_let_go_at_a_wait_on_the_stream_of_the_launch(waits_on, dtype):
    expected = waits_on == LAUNCHED_ON, True
    assert stand_in_values(1, _drop_after_wait, waits_on, dtype) == [expected]


def _wait_for_nothing(place):
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)
    tensor, memory = _watched_tensor("float32")
    comm.all_reduce(tensor, async_op=True)
    del tensor
    time.sleep(0.3)
    is_kept = memory() is not None
    loaded("cuda").stand_in_hold_events(0)
    time.sleep(0.3)
    return is_kept, memory() is None


def test_tensors_nobody_waits_for_are_kept_until_the_collective_is_over():
    assert stand_in_values(1, _wait_for_nothing) == [(True, True)]


def _close_with_a_work_under_way(place):
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)
    tensor, memory = _watched_tensor("float32")
    comm.all_reduce(tensor, async_op=True)
    del tensor
    closing = threading.Thread(target=comm.close)
    closing.start()
    wait_for_call("cuStreamSynchronize")
    is_kept = memory() is not None
    loaded("cuda").stand_in_hold_events(0)
    closing.join()
    return is_kept, memory() is None


def test_a_close_keeps_tensors_nobody_waits_for_until_the_collective_is_over():
    assert stand_in_values(1, _close_with_a_work_under_way) == [(True, True)]


def _launch_many(place, waits):
    comm = communicator(place)
    tensor = torch.ones(10)
    n_events = []
    for _ in range(3):
        for _ in range(500):
            work = comm.all_reduce(tensor, async_op=True)
            if waits:
                work.wait()
        del work
        n_events.append(loaded("cuda").stand_in_live_events())
    return n_events, sum("cuEventCreate" in line for line in log_of(loaded("cuda")))


@pytest.mark.parametrize("waits", [True, False])
def test_works_take_the_events_of_those_that_are_over(waits):
    ((n_events, n_created),) = stand_in_values(1, _launch_many, waits)
    assert n_events[0] == n_events[-1] < 20 and n_created < 30


def _launch_beside_a_capture(place):
    """On a stream that no capture takes in, while another thread captures."""
    comm, stream = communicator(place), ctypes.c_void_p()
    with comm.cuda.selected():
        assert loaded("cuda").cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    comm.cuda.raw_stream = lambda index: stream.value
    comm.all_reduce(torch.ones(10), async_op=True).wait()
    capturing = threading.Thread(target=loaded("cuda").stand_in_capture, args=(BEGIN_GLOBAL,))
    capturing.start()
    capturing.join()
    for _ in range(3):
        comm.all_reduce(torch.ones(10), async_op=True).wait()
    return loaded("cuda").stand_in_capture(END)


def test_a_capture_is_not_spoilt_by_the_look_for_an_event():
    assert stand_in_values(1, _launch_beside_a_capture) == [0]


def _capture_what_is_watched(place):
    """The watchdog asks for the event of a launch, and gets its answer while one is captured."""
    comm = communicator(place)
    cuda = loaded("cuda")
    comm.cuda.raw_stream = lambda index: LAUNCHED_ON
    cuda.stand_in_hold_events(1)
    comm.all_reduce(torch.ones(10))
    cuda.stand_in_slow_queries(500_000)
    time.sleep(0.2)  # the watchdog asks, and gets its answer in a while
    cuda.stand_in_capture(BEGIN_GLOBAL)
    comm.all_reduce(torch.ones(10))
    time.sleep(1)
    assert cuda.stand_in_capture(END) == 0
    cuda.stand_in_slow_queries(0)
    comm.check()
    cuda.stand_in_destroy_graphs()


def test_a_capture_is_not_spoilt_by_a_watchdog_that_has_asked_before():
    stand_in_values(1, _capture_what_is_watched)


def _captured_works(comm):
    """Of an all_reduce and of a bucket, which have been launched before."""
    flat = comm.empty(101, dtype=torch.float32).fill_(1)
    bucket = comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=None, label=0)
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = flat[:100]

    def launch():
        bucket.gather([parameter])
        works = [comm.all_reduce(torch.ones(10), async_op=True), bucket.launch("sum", [])]
        for work in works:
            work.wait()
        return works

    launch()
    loaded("cuda").stand_in_capture(BEGIN_GLOBAL)
    works = launch()
    assert loaded("cuda").stand_in_capture(END) == 0
    return works


def _ask_captured_works(place):
    comm = communicator(place)
    comm.cuda.raw_stream = lambda index: LAUNCHED_ON
    are_completed = [work.is_completed() for work in _captured_works(comm)]
    loaded("cuda").stand_in_destroy_graphs()
    return are_completed


def test_a_captured_work_counts_as_completed():
    assert stand_in_values(1, _ask_captured_works) == [[True, True]]


# What a collective takes beside NCCL


class _Passes(TorchDispatchMode):
    """Notes how many elements each of torch's operations makes or writes, views apart."""

    def __init__(self):
        super().__init__()
        self.numels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            self.numels.append(result.numel())
        return result


def _reduce_scatter_means(place, dtype, async_op):
    comm = communicator(place)
    inp = torch.full((2000,), 40000.0 + 8000 * place.rank).to(dtype)
    inp[::2] = float(place.rank)
    before, out = inp.clone(), torch.zeros(1000, dtype=dtype)
    with _Passes() as passes:
        work = comm.reduce_scatter_single(out, inp, "mean", async_op=async_op)
        if work is not None:
            work.wait()
            work.wait()
    assert torch.equal(inp, before)
    return out[:4].tolist(), passes.numels


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_mean_of_a_reduce_scatter_is_one_pass(dtype, async_op):
    passes = [2000] if dtype is torch.float16 else [1000]  # float16 would overflow
    for values, numels in stand_in_values(2, _reduce_scatter_means, dtype, async_op):
        assert values == [0.5, 44000.0, 0.5, 44000.0] or dtype is torch.bfloat16
        assert numels == passes
        assert values[1] == pytest.approx(44000.0, rel=0.01)
