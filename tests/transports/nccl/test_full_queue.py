"""The device's queue is full, as when a peer has died and the host goes on launching: a call into
the driver then blocks until the communicator is aborted, and others may wait for it. So no such
call may keep the GIL, and the watchdog may not wait for the driver, or nobody could abort it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import pytest
import torch

from fastcomm import FastcommError, PeerLostError
from fastcomm.transports.cuda.multi_tensor import MultiTensor
from tests.fakes.stand_ins import loaded, log_of
from tests.support.bodies import leave, left
from tests.support.outcomes import values_of
from tests.transports.nccl import SOON, communicator, outcomes_of, stand_in_values

SIDE, CURRENT = 1, 2  # streams that the stand-in has from the start


def _bucket(comm, wire_dtype=None):
    flat = comm.empty(101, dtype=torch.float32).fill_(1)
    bucket = comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=wire_dtype, label=1)
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = flat[:100]
    return bucket, [parameter]


def _gather_from_another_stream(comm):
    bucket, parameters = _bucket(comm)
    comm.cuda.raw_stream = lambda index: SIDE
    bucket.note_stream()
    comm.cuda.raw_stream = lambda index: CURRENT
    return lambda: bucket.gather(parameters)


def _gather_after_a_round_nobody_waited_for(comm):
    bucket, parameters = _bucket(comm)
    bucket.gather(parameters)
    bucket.launch("sum", [])
    return lambda: bucket.gather(parameters)


def _launch(comm, **options):
    bucket, parameters = _bucket(comm, **options)
    bucket.gather(parameters)
    return bucket.launch


def _wait_for_a_bucket(comm):
    work = _launch(comm)("sum", [])
    return work.wait


def _tensors(comm):
    tensors, flat = [torch.ones(10)], torch.zeros(10)
    return MultiTensor([10], [0], torch.float32, torch.float32, comm.cuda), tensors, flat


def _flatten(comm):
    kernels, tensors, flat = _tensors(comm)
    return lambda: kernels.flatten(tensors, flat)


def _unflatten(comm):
    kernels, tensors, flat = _tensors(comm)
    return lambda: kernels.unflatten(flat, tensors)


def _norm(comm):
    kernels, tensors, _ = _tensors(comm)
    return lambda: kernels.norm(tensors)


def _all_reduce(comm):
    return lambda: comm.all_reduce(torch.ones(9))


def _wait_again(comm):
    work = comm.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    return work.wait


# What is called, and which call of the driver's in it blocks: the function, and how many of its
# calls do not.
RECORD, WAIT, LAUNCH = "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"
CALLS = {
    "all_reduce, at its beginning": (_all_reduce, RECORD, 0),
    "all_reduce, in the lane": (_all_reduce, WAIT, 0),
    "all_reduce, at its end": (_all_reduce, RECORD, 1),
    "all_reduce, for the watchdog": (_all_reduce, RECORD, 2),
    "all_reduce, for the caller": (_all_reduce, WAIT, 1),
    "broadcast_all": (lambda comm: lambda: comm.broadcast_all([torch.ones(9)]), WAIT, 1),
    "wait": (lambda comm: comm.all_reduce(torch.ones(9), async_op=True).wait, WAIT, 0),
    "a second wait": (_wait_again, WAIT, 0),
    "gather, on the gradients' stream": (_gather_from_another_stream, RECORD, 0),
    "gather, after the gradients": (_gather_from_another_stream, WAIT, 0),
    "gather, after the last round": (_gather_after_a_round_nobody_waited_for, WAIT, 0),
    "a bucket's flattening": (lambda comm: partial(_launch(comm), "mean", []), LAUNCH, 0),
    "a bucket's launch": (lambda comm: partial(_launch(comm), "sum", []), WAIT, 0),
    "a bucket's wait": (_wait_for_a_bucket, WAIT, 0),
    "a bucket's norm": (lambda comm: _bucket(comm)[0].square_sum, LAUNCH, 0),
    "flatten": (_flatten, LAUNCH, 0),
    "unflatten": (_unflatten, LAUNCH, 0),
    "norm": (_norm, LAUNCH, 0),
}


def _abort_what_blocks(comm, has_aborted):
    """NCCL's kernels leave the device, then there is room."""
    cuda = loaded("cuda")
    while cuda.stand_in_waiting_for_room() == 0:
        time.sleep(0.001)
    threading.Thread(target=comm.abort).start()
    while not any("ncclCommAbort" in line or "Revoke" in line for line in log_of(loaded("nccl"))):
        time.sleep(0.001)
    has_aborted.set()
    cuda.stand_in_fill_queue(None, 0)


def _call_with_a_full_queue(place, name):
    make, function, after = CALLS[name]
    comm = communicator(place)
    call = make(comm)
    time.sleep(0.3)  # the watchdog has seen the barrier of init end, and wants a mark
    has_aborted = threading.Event()
    aborter = threading.Thread(target=_abort_what_blocks, args=(comm, has_aborted), daemon=True)
    aborter.start()
    loaded("cuda").stand_in_fill_queue(function.encode(), after)
    with contextlib.suppress(FastcommError):
        call()
    return has_aborted.is_set()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_for_room_lets_another_thread_abort(name):
    assert stand_in_values(1, _call_with_a_full_queue, name) == [True]


def _give_room_when_aborted():
    while not any("ncclCommAbort" in line or "Revoke" in line for line in log_of(loaded("nccl"))):
        time.sleep(0.001)
    loaded("cuda").stand_in_fill_queue(None, 0)


def _launch_until_a_peer_dies(place, function):
    comm = communicator(place)
    comm.barrier()
    if place.rank == 0:
        loaded("cuda").stand_in_hold_events(1)
    unfinished = comm.all_reduce(torch.ones(9), async_op=True)  # the watchdog asks for it
    if place.rank == 1:
        time.sleep(0.3)
        leave(place, comm, "killed")
    threading.Thread(target=_give_room_when_aborted, daemon=True).start()
    loaded("cuda").stand_in_fill_queue(function.encode(), 0)
    with pytest.raises(PeerLostError) as lost:
        comm.all_reduce(torch.ones(9))
    del unfinished
    return str(lost.value), *left(place)


@pytest.mark.parametrize("function", [RECORD, WAIT])
def test_a_peer_that_dies_while_a_launch_waits_for_room_is_named(function):
    survivor, _ = outcomes_of(2, _launch_until_a_peer_dies, function)
    ((message, pid, seconds),) = values_of([survivor])
    assert f"rank 1 (pid {pid}) died" in message
    assert seconds < SOON
