"""Memory from ncclMemAlloc: windows, what is given back, and nothing left of what is gone."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import fastcomm
from tests.fakes.stand_ins import loaded, log_of, nccl_without, wait_for_call
from tests.support.models import SMALL_BUCKETS, backward, check_gradients, mlp
from tests.transports.nccl import abandon_on_last_rank, communicator, stand_in_values


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
