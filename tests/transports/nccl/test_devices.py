"""A communicator on the second of two devices, called by threads that are on the first one or on
none: each call works on the communicator's device and leaves the thread where it was.

The stand-in for the driver refuses what goes to a wrong device, and what comes from a thread
without one: see tests/fakes/cuda_contexts.c.
"""

from __future__ import annotations

import gc
import threading
from ctypes import byref, c_void_p

import pytest
import torch

import fastcomm
from fastcomm.transports.cuda.driver import Producers
from fastcomm.transports.cuda.multi_tensor import Module, MultiTensor
from tests.fakes.stand_ins import assert_all_ended, calls_with_lock, loaded
from tests.support.bodies import finish_together
from tests.support.models import SMALL_BUCKETS, backward, mlp
from tests.transports.nccl import communicator, stand_in_values

# The communicator's device comes first: for torch, the CPU that plays it has no number.
SECOND_DEVICE = {"FASTCOMM_STAND_IN_DEVICES": "1,0"}
BEGIN_GLOBAL, END_CAPTURE = 1, 0  # of stand_in_capture
LEGACY_STREAM = 1  # a handle of the stream that it captures
PLACES = {"on the first device": 0, "on no device": None}


def _go_to(device: int | None) -> None:
    context = c_void_p()
    if device is not None:
        assert loaded("cuda").cuDevicePrimaryCtxRetain(byref(context), device) == 0
    assert loaded("cuda").cuCtxSetCurrent(context) == 0


def _context() -> int | None:
    context = c_void_p()
    assert loaded("cuda").cuCtxGetCurrent(byref(context)) == 0
    return context.value


def _train(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm, streams=2, wire_dtype=torch.bfloat16, **SMALL_BUCKETS)
    reducer.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, comm.rank)
        reducer.clip_grad_norm_(1e9)
        reducer.nonfinite_count()
        optimizer.step()


def _time(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    with reducer.timeline() as timeline:
        for _ in range(2):
            backward(model, comm.rank)
    assert timeline.steps


def _capture(comm):
    cuda = loaded("cuda")
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    with comm.cuda.selected():
        cuda.stand_in_capture(BEGIN_GLOBAL)
    comm.all_reduce(torch.ones(10))
    with comm.cuda.selected():
        assert cuda.stand_in_capture(END_CAPTURE) == 0
        cuda.stand_in_destroy_graphs()
    comm.cuda.raw_stream = None


def _measure(comm):
    model = mlp()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    backward(model, comm.rank)
    assert reducer.grad_norm() > 0


def _bind(comm):
    """A bucket whose second round nobody waits for but the third."""
    flat = comm.empty(101, dtype=torch.float32).zero_()
    bucket = comm.bind_bucket(flat, [flat[:100].view(10, 10)], [0], wire_dtype=None, label=1)
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    parameter.grad = torch.ones(10, 10).t()
    bucket.note_stream()
    bucket.gather([parameter])
    work = bucket.launch("sum", [])
    work.wait()
    assert work.is_completed() and work.present() == [True]
    bucket.launch("sum", [])
    bucket.gather([parameter])
    bucket.launch("sum", []).wait()
    assert parameter.grad.sum() == 100 * comm.world_size**3


def _produce_on_another_stream(comm):
    streams = [c_void_p(), c_void_p()]
    with comm.cuda.selected():
        for stream in streams:
            assert loaded("cuda").cuStreamCreateWithPriority(byref(stream), 1, 0) == 0
    producers = Producers(comm.cuda)
    comm.cuda.raw_stream = lambda index: streams[0].value
    producers.note()
    comm.cuda.raw_stream = lambda index: streams[1].value
    producers.order_before_current()
    comm.cuda.raw_stream = None


def _load_kernels(comm):
    Module(comm.cuda, b"image")


def _flatten(comm):
    many = MultiTensor([10], [0], torch.float32, torch.float64, comm.cuda)
    many.flatten([torch.ones(10)], torch.zeros(10, dtype=torch.float64))


def _unflatten(comm):
    many = MultiTensor([10], [0], torch.float32, torch.float64, comm.cuda)
    many.unflatten(torch.ones(10, dtype=torch.float64), [torch.zeros(10)])


def _norm(comm):
    MultiTensor([10], [0], torch.float32, torch.float64, comm.cuda).norm([torch.ones(10)])


def _wait_twice(comm):
    tensor = torch.full((10,), 3, dtype=torch.int32)
    work = comm.all_reduce(tensor, "mean", async_op=True)
    work.wait()
    work.wait()
    assert work.is_completed() and tensor.tolist() == [3] * 10


def _drop_memory(comm):
    for _ in range(3):
        tensor = comm.empty(1000, dtype=torch.float32).fill_(1)
        comm.all_reduce(tensor)
        assert tensor.sum() == 1000 * comm.world_size
        del tensor


def _broadcast_all(comm):
    comm.broadcast_all([torch.ones(3), torch.ones(4)])


def _abandon(comm):
    comm.abandon()
    comm.barrier()
    comm.all_reduce(comm.empty(10, dtype=torch.float32))


USES = (
    lambda comm: comm.barrier(),
    lambda comm: comm.all_reduce(torch.ones(10)),
    _wait_twice,
    _broadcast_all,
    _drop_memory,
    _bind,
    _train,
    _time,
    _capture,
    _measure,
    _produce_on_another_stream,
    _load_kernels,
    _flatten,
    _unflatten,
    _norm,
    _abandon,
    _train,
)


def _use(place, device, end):
    """Everything, step by step, from a thread that is on `device`."""
    assert loaded("cuda").cuInit(0) == 0
    _go_to(device)
    here = _context()
    comm = communicator(place)
    assert _context() == here
    for use in USES:
        use(comm)
        assert _context() == here, use
    getattr(comm, end)()
    assert _context() == here
    assert_all_ended()


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("where", PLACES)
def test_every_call_works_on_the_communicator_s_device_and_leaves_the_caller_on_its_own(where, end):
    stand_in_values(1, _use, PLACES[where], end, env=SECOND_DEVICE)


def _use_with_a_peer(place):
    assert loaded("cuda").cuInit(0) == 0
    _go_to(0)
    comm = communicator(place)
    _train(comm)
    finish_together(comm)
    if place.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(fastcomm.FastcommError, match="rank 1 abandoned"):
            comm.all_reduce(torch.ones(10))
    _bind(comm)
    comm.close()
    assert_all_ended()


def test_ranks_on_second_devices_meet_again():
    stand_in_values(2, _use_with_a_peer, env=SECOND_DEVICE)


def _drop(place):
    assert loaded("cuda").cuInit(0) == 0
    _go_to(0)
    counts = []
    for _ in range(3):
        comm = communicator(place)
        _train(comm)
        comm.close()
        del comm
        thread = threading.Thread(target=gc.collect)  # which has no context
        thread.start()
        thread.join()
        cuda = loaded("cuda")
        counts.append((cuda.stand_in_live_events(), cuda.stand_in_live_streams()))
    return counts


def test_what_a_thread_without_a_context_collects_is_destroyed():
    (counts,) = stand_in_values(1, _drop, env=SECOND_DEVICE)
    assert counts[1] == counts[2]


def _use_without_the_lock(place, end):
    comm = communicator(place)
    for use in USES:
        use(comm)
    getattr(comm, end)()
    del comm
    gc.collect()
    return calls_with_lock()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_no_call_of_the_driver_is_made_with_the_interpreter_s_lock(end):
    """Another thread's launch may keep it waiting until the watchdog ends NCCL's kernels."""
    assert stand_in_values(1, _use_without_the_lock, end) == [[]]
