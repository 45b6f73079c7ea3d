"""Memory from ncclMemAlloc: windows, what is given back, and nothing left of what is gone."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch

import fastcomm
from fastcomm import NcclError
from tests.fakes.stand_ins import (
    assert_all_ended,
    failing,
    loaded,
    log_of,
    nccl_without,
    wait_for_call,
)
from tests.support.bodies import raised
from tests.support.models import (
    SMALL_BUCKETS,
    backward,
    check_gradients,
    mlp,
)
from tests.transports.nccl import SOON, abandon_on_last_rank, communicator, stand_in_values


def _drop_tensors(place):
    comm = communicator(place)
    tensors = [comm.empty(1000, dtype=torch.float32) for _ in range(10)]
    full = loaded("nccl").stand_in_live_bytes()
    part = tensors[0][:10]
    del tensors
    dropped = loaded("nccl").stand_in_live_bytes()
    other = comm.empty(1, dtype=torch.float32)
    assert part.numel() and other.numel()
    return full, dropped, loaded("nccl").stand_in_live_bytes()


def test_memory_of_dropped_tensors_is_given_back_at_the_next_allocation():
    assert stand_in_values(1, _drop_tensors) == [(40_000, 40_000, 4004)]


def _alive():
    cuda, nccl = loaded("cuda"), loaded("nccl")
    return cuda.stand_in_live_events(), cuda.stand_in_live_streams(), nccl.stand_in_live_bytes()


def _make_and_drop_reducers(place):
    comm = communicator(place)
    counts = []
    for i in range(41):
        model = mlp()
        reducer = fastcomm.Reducer(
            comm, streams=2, wire_dtype=torch.bfloat16 if i % 2 else None, **SMALL_BUCKETS
        ).attach(model)
        backward(model, place.rank)
        reducer.detach()
        del reducer, model
        gc.collect()
        comm.empty(1, dtype=torch.float32)
        counts.append(_alive())
    return counts


def test_nothing_is_left_of_forty_reducers():
    for counts in stand_in_values(2, _make_and_drop_reducers):
        assert counts[-1] == counts[2]


def _leave_nothing(place):
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    backward(model, place.rank)
    del model
    comm.close()
    del comm
    gc.collect()
    return _alive()[:2]


def test_a_closed_communicator_leaves_no_stream_and_no_event():
    assert stand_in_values(2, _leave_nothing) == [(0, 0)] * 2


def _unregister(place):
    comm = communicator(place)
    model = mlp()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    backward(model, place.rank)
    reducer.detach()
    del reducer, model
    gc.collect()
    loaded("nccl").stand_in_clear_log()
    comm.empty(1, dtype=torch.float32)
    return [line.split()[0] for line in log_of(loaded("nccl"))]


def test_memory_is_unregistered_before_it_is_freed():
    for calls in stand_in_values(2, _unregister):
        *freeing, allocating = calls
        assert allocating == "ncclMemAlloc"
        assert (
            freeing == ["ncclCommWindowDeregister", "ncclMemFree"] * (len(freeing) // 2) and freeing
        )


def _drop_while_the_device_comes_to_rest(place):
    comm = communicator(place)
    first = comm.empty(1000, dtype=torch.float32)
    second = comm.empty(500, dtype=torch.float32)
    loaded("cuda").stand_in_hold_events(1)
    del first
    allocating = threading.Thread(target=comm.empty, args=(1,), kwargs={"dtype": torch.float32})
    allocating.start()
    wait_for_call("cuCtxSynchronize")
    del second
    loaded("cuda").stand_in_hold_events(0)
    allocating.join()
    return loaded("nccl").stand_in_live_bytes()


def test_memory_that_is_dropped_while_the_device_comes_to_rest_is_kept():
    # the device may be at it again: it comes to rest for the next allocation
    assert stand_in_values(1, _drop_while_the_device_comes_to_rest) == [2000 + 4]


def _windows(place, streams):
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, streams=streams, **SMALL_BUCKETS).attach(model)
    n_buckets = sum("ncclCommWindowRegister" in line for line in log_of(loaded("nccl")))
    loaded("nccl").stand_in_clear_log()
    backward(model, place.rank)
    return n_buckets, sum("ncclAllReduce" in line for line in log_of(loaded("nccl")))


@pytest.mark.parametrize("streams", [1, 2])
def test_every_buckets_memory_is_a_window_of_its_lane(streams):
    for n_windows, n_launches in stand_in_values(2, _windows, streams):
        assert n_windows == n_launches == 3


def _calls_of(*names):
    calls = [line.split()[0] for line in log_of(loaded("nccl"))]
    return tuple(calls.count(name) for name in names)


def _registrations_after_an_abandon(place):
    comm = communicator(place)
    model = mlp()
    reducer = fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(model)
    for _ in range(2):
        abandon_on_last_rank(place, comm)
        loaded("nccl").stand_in_clear_log()
        backward(model, place.rank)
        assert _calls_of("ncclCommWindowRegister") == (3,)
    reducer.detach()
    del reducer, model
    gc.collect()
    comm.empty(1, dtype=torch.float32)
    assert loaded("nccl").stand_in_live_bytes() == 4
    return loaded("nccl").stand_in_lost_windows()


def test_windows_come_back_when_the_ranks_have_met_anew_and_none_is_lost():
    assert stand_in_values(2, _registrations_after_an_abandon) == [0, 0]


def _bucket(comm, label, lane=0):
    flat = comm.empty(101, dtype=torch.float32).zero_()
    return comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=None, label=label, lane=lane)


def _meet_with_different_buckets(place):
    comm = communicator(place)
    buckets = {label: _bucket(comm, label) for label in (5, 3, 8, 1)}
    del buckets[(5, 1)[place.rank]]  # another one on each rank
    gc.collect()
    abandon_on_last_rank(place, comm)
    loaded("nccl").stand_in_clear_log()
    comm.barrier()
    for label in (8, 3):
        buckets[label].launch("sum", []).wait()
    assert len(buckets) == 3
    return _calls_of("ncclCommWindowRegister")


def test_buckets_that_not_all_ranks_have_left_get_no_window():
    assert stand_in_values(2, _meet_with_different_buckets) == [(2,), (2,)]


def _fail_to_get_a_window_back(place):
    comm = communicator(place)
    bucket = _bucket(comm, 1)
    abandon_on_last_rank(place, comm)
    with failing("ncclCommWindowRegister", 2) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(NcclError, comm.barrier)
    assert seconds < SOON
    assert_all_ended()
    assert bucket.label == 1
    return message


def test_a_window_that_one_rank_does_not_get_back_is_an_error_on_all():
    for message in stand_in_values(2, _fail_to_get_a_window_back):
        assert "ncclCommWindowRegister failed with code 2" in message


def _do_without(place):
    comm = communicator(place)
    check_gradients(comm, mlp(), backward, streams=2, **SMALL_BUCKETS)
    tensor = comm.empty(100, dtype=torch.float32).fill_(1)
    comm.all_reduce(tensor)
    abandon_on_last_rank(place, comm)
    comm.barrier()
    comm.close()
    assert tensor.tolist() == [2.0] * 100
    assert loaded("nccl").stand_in_live_comms() == 0


@pytest.mark.parametrize(
    "functions",
    [
        ("ncclCommWindowRegister", "ncclCommWindowDeregister"),
        ("ncclCommRevoke",),
        (
            "ncclMemAlloc",
            "ncclMemFree",
            "ncclCommWindowRegister",
            "ncclCommWindowDeregister",
        ),
    ],
    ids=["windows", "revoking", "memory"],
)
def test_an_older_nccl_may_lack(functions):
    stand_in_values(2, _do_without, env={"FASTCOMM_NCCL_LIBRARY": nccl_without(*functions)})
