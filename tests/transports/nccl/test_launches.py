"""What reaches the streams, in which order: by the logs of the two libraries, and under capture
into a CUDA graph.
"""

from __future__ import annotations

import gc
import re
import time
from datetime import timedelta

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, TimeoutError
from fastcomm.comm.transport import Part
from tests.fakes.stand_ins import assert_all_ended, loaded, log_of
from tests.support.models import SMALL_BUCKETS, assert_gradients, backward, mean_gradients, mlp
from tests.transports.nccl import SOON, communicator, stand_in_values

# The order of launches, by the logs. The two libraries keep one each; what comes between is ordered
# by the streams' events.


def _launch_one_bucket(place, wire_dtype, set_to_none):
    comm = communicator(place)
    model = torch.nn.Linear(8, 8)
    fastcomm.Reducer(comm, wire_dtype=wire_dtype).attach(model)
    x = torch.ones(2, 8)
    model(x).sum().backward()
    model.zero_grad(set_to_none)
    loss = model(x).sum()
    for library in (loaded("cuda"), loaded("nccl")):
        library.stand_in_clear_log()
    loss.backward()
    return log_of(loaded("cuda")), log_of(loaded("nccl"))


def _events(line):
    """What a line of the log does: call, stream and event."""
    found = dict(re.findall(r"(stream|event)=(\w+)", line))
    return line.split()[0], found.get("stream"), found.get("event")


def _without_marks(calls):
    """Leaves out events that nobody waits for: the watchdog's marks, of which there is one where it
    has seen the launch before end.
    """
    waited_for = {event for name, _, event in calls if name == "cuStreamWaitEvent"}
    return [call for call in calls if call[0] != "cuEventRecord" or call[2] in waited_for]


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_a_bucket_is_one_launch_ordered_by_events(wire_dtype):
    for cuda, nccl in stand_in_values(2, _launch_one_bucket, wire_dtype, True):
        (all_reduce,) = nccl
        lane = re.search(r"stream=(0x\w+)", all_reduce)[1]
        assert lane != "0x0"
        calls = _without_marks([_events(line) for line in cuda])
        ready, reader_waits, flatten, flattened, lane_waits, *cast, done, caller_waits = calls
        reader = flatten[1]
        assert reader not in (lane, "0x0")
        assert ready[:2] == ("cuEventRecord", "0x0")
        assert reader_waits == ("cuStreamWaitEvent", reader, ready[2])
        assert flatten[0] == "cuLaunchKernel" and flattened[:2] == ("cuEventRecord", reader)
        assert lane_waits == ("cuStreamWaitEvent", lane, flattened[2])
        assert cast == ([("cuLaunchKernel", lane, None)] if wire_dtype else [])
        assert done[:2] == ("cuEventRecord", lane)
        assert caller_waits == ("cuStreamWaitEvent", "0x0", done[2])
        assert len({ready[2], flattened[2], done[2]}) == 3


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_gradients_in_the_flat_buffer_are_flattened_on_the_lane(wire_dtype):
    """The current stream goes on with the next layers."""
    for cuda, nccl in stand_in_values(2, _launch_one_bucket, wire_dtype, False):
        (all_reduce,) = nccl
        lane = re.search(r"stream=(0x\w+)", all_reduce)[1]
        calls = _without_marks([_events(line) for line in cuda])
        ready, lane_waits, *kernels, done, caller_waits = calls
        assert ready[:2] == ("cuEventRecord", "0x0")
        assert lane_waits == ("cuStreamWaitEvent", lane, ready[2])
        assert len(kernels) == (2 if wire_dtype else 1)
        assert all(call[:2] == ("cuLaunchKernel", lane) for call in kernels)
        assert done[:2] == ("cuEventRecord", lane)
        assert caller_waits == ("cuStreamWaitEvent", "0x0", done[2])


def _launch_many_tensors(place):
    comm = communicator(place)
    comm.barrier()
    for library in (loaded("cuda"), loaded("nccl")):
        library.stand_in_clear_log()
    comm.all_reduce_coalesced([torch.ones(n) for n in (3, 0, 50)])
    return log_of(loaded("cuda")), log_of(loaded("nccl"))


def test_many_tensors_are_one_launch_of_a_group_of_calls():
    for cuda, nccl in stand_in_values(2, _launch_many_tensors):
        sizes = [int(re.search(r"numel=(\d+)", line)[1]) for line in nccl if "numel=" in line]
        assert sizes == [3, 50]
        calls = _without_marks([_events(line) for line in cuda])
        assert [name for name, _, _ in calls] == ["cuEventRecord", "cuStreamWaitEvent"] * 2


def _launch_with_weights(place):
    comm = communicator(place)
    model = mlp()
    reducer = fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    for _ in range(2):
        for library in (loaded("cuda"), loaded("nccl")):
            library.stand_in_clear_log()
        model.zero_grad()
        reducer.set_weight(place.rank + 1)
        backward(model, place.rank)
    return len(reducer.core.buckets), log_of(loaded("cuda")), log_of(loaded("nccl"))


def test_weights_are_one_collective_of_one_number_before_the_first_bucket():
    for n_buckets, cuda, nccl in stand_in_values(2, _launch_with_weights):
        counts = [int(re.search(r"numel=(\d+)", line)[1]) for line in nccl]
        assert len(counts) == 1 + n_buckets and counts[0] == 1 and min(counts[1:]) > 1
        assert not [line for line in cuda if "Synchronize" in line.split()[0]]


def _train(place):
    comm = communicator(place)
    model = mlp()
    reducer = fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 1:
            loaded("cuda").stand_in_clear_log()
        optimizer.zero_grad()
        backward(model, place.rank, step)
        reducer.clip_grad_norm_(1.0)
        optimizer.step()
    return log_of(loaded("cuda"))


def test_training_never_waits_for_the_device():
    for log in stand_in_values(2, _train):
        names = [line.split()[0] for line in log]
        assert names.count("cuLaunchKernel") >= 3 * 3
        assert not {
            name for name in names if "Synchronize" in name or "Create" in name or "Mem" in name
        }


CURRENT = 2  # a stream that the stand-in has from the start


def _bucket(comm, lane=0):
    """A bucket, and its parameters, of which there is one."""
    flat = comm.empty(101, dtype=torch.float32).fill_(1)
    bucket = comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=None, label=lane, lane=lane)
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = flat[:100]
    return bucket, [parameter]


def _gather_on_another_stream(place):
    comm = communicator(place)
    current = [1]
    comm.cuda.raw_stream = lambda index: current[0]
    bucket, parameters = _bucket(comm)
    logs = []
    for stream in (1, 1, CURRENT):
        current[0] = stream
        loaded("cuda").stand_in_clear_log()
        bucket.gather(parameters)
        logs.append([_events(line) for line in log_of(loaded("cuda"))])
        bucket.launch("sum", []).wait()
    *_, (_, _, done) = [_events(line) for line in log_of(loaded("cuda")) if "Record" in line]
    return logs, done


def test_a_bucket_waits_for_its_last_round_where_that_was_awaited_on_another_stream():
    for (first, same, other), done in stand_in_values(2, _gather_on_another_stream):
        assert first == same == []
        assert other == [("cuStreamWaitEvent", hex(CURRENT), done)]


def _handles(kind, function):
    """Those of a kind, stream or comm, that the calls of a function were made with."""
    log = log_of(loaded("nccl" if function.startswith("nccl") else "cuda"))
    return [re.search(rf"{kind}=(\w+)", line)[1] for line in log if line.startswith(function)]


def _reduce_on_two_lanes(place):
    comm = communicator(place)
    buckets = [_bucket(comm, lane) for lane in range(2)]
    _, *streams = _handles("stream", "cuStreamCreate")  # the first one flattens
    lanes = streams, _handles("comm", "ncclCommWindowRegister")
    loaded("nccl").stand_in_clear_log()
    for bucket, parameters in buckets:
        bucket.gather(parameters)
        bucket.launch("sum", []).wait()
    return lanes, (_handles("stream", "ncclAllReduce"), _handles("comm", "ncclAllReduce"))


def test_each_bucket_is_reduced_on_its_lane_s_stream_and_communicator():
    for lanes, used in stand_in_values(2, _reduce_on_two_lanes):
        assert used == lanes
        assert [len(set(handles)) for handles in lanes] == [2, 2]


# Capture into a CUDA graph. The stand-in runs what is captured at once.

BEGIN_GLOBAL, BEGIN_THREAD_LOCAL, END = 1, 2, 0
LEGACY_STREAM = (
    1  # a handle of the stream that the stand-in captures; 0 stands for "cannot be captured"
)


def _capture(place, mode, streams, wire_dtype):
    comm = communicator(place)
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    model = mlp()
    expected = mean_gradients(model, place.world_size, backward)
    fastcomm.Reducer(comm, streams=streams, wire_dtype=wire_dtype, **SMALL_BUCKETS).attach(model)
    backward(model, place.rank)
    for _ in range(2):
        model.zero_grad()
        loaded("cuda").stand_in_capture(mode)
        backward(model, place.rank)
        other = torch.ones(10)
        comm.all_reduce(other)
        many = [torch.full((n,), place.rank) for n in (1, 5)]
        comm.all_reduce_coalesced(many, "max")
        comm.all_reduce_coalesced(many, "mean", async_op=True).wait()
        time.sleep(0.5)  # the watchdog looks several times
        assert loaded("cuda").stand_in_capture(END) == 0
        assert other.tolist() == [float(place.world_size)] * 10
        assert [one.tolist() for one in many] == [[place.world_size - 1] * n for n in (1, 5)]
        if wire_dtype is None:
            assert_gradients(model, expected)
    for _ in range(2):
        model.zero_grad()
        backward(model, place.rank)
        if wire_dtype is None:
            assert_gradients(model, expected)
    with pytest.raises(FastcommError, match="2 CUDA graph.*delete them first"):
        comm.close()
    comm.barrier()
    loaded("cuda").stand_in_destroy_graphs()
    comm.close()
    assert loaded("nccl").stand_in_live_comms() == 0


@pytest.mark.parametrize("mode", [BEGIN_GLOBAL, BEGIN_THREAD_LOCAL], ids=["global", "thread local"])
@pytest.mark.parametrize(
    "streams, wire_dtype",
    [(1, None), (2, torch.bfloat16), (2, torch.int8)],
    ids=["one lane", "two lanes and a cast", "two lanes and blocks"],
)
def test_a_step_can_be_captured_and_the_communicator_outlives_its_graphs(mode, streams, wire_dtype):
    stand_in_values(2, _capture, mode, streams, wire_dtype)


def _capture_what_differs_by_step(place):
    comm = communicator(place)
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    model = mlp()
    fastcomm.Reducer(comm, skip_nonfinite=True).attach(model)
    loaded("cuda").stand_in_capture(BEGIN_THREAD_LOCAL)
    with pytest.raises(FastcommError, match="replay the weight of its capture"):
        comm.begin_round("weighted mean", Part(2.0, 2.0), 0)
    waits = "skip_nonfinite=True waits for the device, which cannot"
    with pytest.raises(FastcommError, match=waits):
        backward(model, place.rank)
    assert loaded("cuda").stand_in_capture(END) == 0
    loaded("cuda").stand_in_destroy_graphs()
    comm.close()


def test_weights_and_skips_are_not_captured():
    stand_in_values(2, _capture_what_differs_by_step)


def _gather_after_a_capture(place):
    comm = communicator(place)
    current = [LEGACY_STREAM]
    comm.cuda.raw_stream = lambda index: current[0]
    bucket, parameters = _bucket(comm)
    loaded("cuda").stand_in_capture(BEGIN_THREAD_LOCAL)
    bucket.gather(parameters)
    bucket.launch("sum", []).wait()
    assert loaded("cuda").stand_in_capture(END) == 0
    current[0] = CURRENT
    bucket.gather(parameters)  # CUDA refuses to wait for what was recorded in a capture
    bucket.launch("sum", []).wait()
    loaded("cuda").stand_in_destroy_graphs()


def test_a_gather_after_a_capture_on_another_stream_waits_for_no_captured_event():
    stand_in_values(2, _gather_after_a_capture)


def _make_a_lane_after_a_capture(place):
    comm = communicator(place)
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    loaded("cuda").stand_in_capture(BEGIN_THREAD_LOCAL)
    comm.all_reduce(torch.ones(10))
    assert loaded("cuda").stand_in_capture(END) == 0
    bucket, parameters = _bucket(comm, lane=1)
    bucket.gather(parameters)
    bucket.launch("sum", []).wait()
    loaded("cuda").stand_in_destroy_graphs()
    return parameters[0].grad.tolist()


def test_a_lane_is_made_after_a_captured_collective():
    assert stand_in_values(2, _make_a_lane_after_a_capture) == [[2.0] * 100] * 2


def _capture_a_bucket_under_way(place):
    """Returns what the watchdog says."""
    comm = communicator(place, timeout=timedelta(seconds=1))
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    bucket, parameters = _bucket(comm)
    time.sleep(0.3)  # the watchdog sees what was launched so far end
    loaded("cuda").stand_in_hold_events(1)
    bucket.gather(parameters)
    bucket.launch("sum", []).wait()
    loaded("cuda").stand_in_capture(BEGIN_THREAD_LOCAL)
    bucket.gather(parameters)
    bucket.launch("max", []).wait()
    assert loaded("cuda").stand_in_capture(END) == 0
    with pytest.raises(TimeoutError) as caught:
        _go_on_asking(comm)
    loaded("cuda").stand_in_destroy_graphs()
    return str(caught.value)


def _go_on_asking(comm):
    """Until the watchdog has given up, or for SOON after it should have."""
    deadline = time.monotonic() + 1 + SOON
    while time.monotonic() < deadline:
        comm.check()
        time.sleep(0.01)


def test_an_eager_launch_under_way_is_still_watched_when_its_bucket_is_captured():
    (message,) = stand_in_values(1, _capture_a_bucket_under_way)
    assert "collective number 2, all_reduce of 101 float32 elements, op sum;" in message


def _launch_after_a_work_was_collected(place):
    comm = communicator(place)
    tensor = comm.empty(4, dtype=torch.float32).fill_(1)
    cycle = [comm.all_reduce(tensor, async_op=True)]
    cycle[0].wait()
    cycle.append(cycle)
    del cycle
    gc.collect()
    before = _n_events_made()
    for _ in range(2):
        comm.all_reduce(tensor, async_op=True).wait()
    return tensor.tolist(), _n_events_made() - before


def _n_events_made():
    return sum("cuEventCreate" in call for call in log_of(loaded("cuda")))


def test_a_work_that_the_garbage_collector_finds_leaves_a_good_ticket():
    assert stand_in_values(2, _launch_after_a_work_was_collected) == [([8.0] * 4, 0)] * 2


def _abort_with_a_graph_alive(place):
    comm = communicator(place)
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    comm.all_reduce(torch.ones(10))
    loaded("cuda").stand_in_capture(BEGIN_THREAD_LOCAL)
    comm.all_reduce(torch.ones(10))
    assert loaded("cuda").stand_in_capture(END) == 0
    before = time.monotonic()
    comm.abort()
    assert time.monotonic() - before < SOON
    with pytest.raises(FastcommError) as caught:
        comm.barrier()
    assert "left behind" not in str(caught.value)
    del comm
    gc.collect()
    time.sleep(0.3)
    assert loaded("nccl").stand_in_live_comms() == 1  # the graph writes to it when it goes
    loaded("cuda").stand_in_destroy_graphs()
    assert_all_ended()
    return loaded("nccl").stand_in_freed_under_graphs()


def test_a_graph_may_outlive_an_aborted_communicator():
    assert stand_in_values(2, _abort_with_a_graph_alive) == [0, 0]
