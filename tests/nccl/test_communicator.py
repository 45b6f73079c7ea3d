"""NcclCommunicator where nothing goes wrong: results, arguments, memory, and what reaches the
streams in which order. Where there is no GPU, or where a test looks into the logs, over the
stand-ins for NCCL and for the driver.
"""

from __future__ import annotations

import gc
import re
import threading
import time

import pytest
import torch

import fastcomm
from fastcomm import FastcommError
from tests.support.models import assert_gradients, backward, check_gradients, mean_gradients, mlp
from tests.support.ranks import fresh_ranks, on_ranks, values_of
from tests.support.reference import (
    DTYPES,
    HALVES,
    OPS,
    assert_same_bits,
    check_async_collectives,
    reduced,
    shards_of,
)
from tests.support.stand_ins import environment, loaded, log_of, nccl_without, stand_ins

NUMELS = (0, 1, 37, 1024, 70_001)
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005, "first_bucket_cap_mb": 0.0001}


@pytest.fixture(autouse=True)
def _over_nccl(ranks):
    ranks.transport = "nccl"
    yield
    ranks.transport = "shm"


def stand_in_values(world_size, body, *args, env=None):
    """What the body returned on new ranks that work with the stand-ins."""
    return values_of(
        fresh_ranks(
            world_size, body, *args, env={**environment(stand_ins()), **(env or {})}, timeout=40
        )
    )


def communicator(place):
    return fastcomm.init(
        "nccl",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        device="cpu",
    )


# Results


def _shards(comm, dtype, numel, seed):
    with torch.device("cpu"):
        return shards_of(dtype, comm.world_size, numel, seed)


def _placed(comm, where, tensor):
    return (
        comm.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor)
        if where == "comm.empty"
        else tensor.to(comm.device, copy=True)
    )


def assert_reduced(tensor, shards, op):
    """Integers exactly. Floats to a few roundings: NCCL adds in an order of its own, and a mean is
    scaled before it is added. 16-bit floats are rounded to 16 bits at each step, and so is the
    scaling by 1/3.
    """
    expected, dtype = reduced([shard.cpu() for shard in shards], op), tensor.dtype
    if not dtype.is_floating_point or op in ("min", "max"):
        assert_same_bits(tensor.cpu(), expected)
        return
    size = max(
        1.0,
        max(float(shard.abs().max()) for shard in shards if shard.numel())
        if expected.numel()
        else 1.0,
    )
    roundings = len(shards) + 1
    torch.testing.assert_close(
        tensor.cpu(),
        expected,
        rtol=roundings * torch.finfo(dtype).eps,
        atol=roundings * size * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("where", ["comm.empty", "ordinary"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3)
def test_all_reduce_is_the_reduction_of_all_ranks(comm, dtype, where):
    for numel in NUMELS:
        for op in OPS:
            shards = _shards(comm, dtype, numel, seed=numel)
            for async_op in (False, True):
                tensor = _placed(comm, where, shards[comm.rank])
                work = comm.all_reduce(tensor, op, async_op=async_op)
                assert (work is not None) == async_op
                if async_op:
                    work.wait()
                assert_reduced(tensor, shards, op)


@pytest.mark.parametrize("where", ["comm.empty", "ordinary"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3)
def test_reduce_scatter_single_keeps_the_ranks_own_part(comm, dtype, where):
    for part in NUMELS:
        for op in OPS:
            shards = _shards(comm, dtype, part * comm.world_size, seed=part)
            inp = _placed(comm, where, shards[comm.rank])
            out = _placed(comm, where, torch.zeros(part, dtype=dtype))
            comm.reduce_scatter_single(out, inp, op)
            assert_reduced(
                out, [shard.view(comm.world_size, part)[comm.rank] for shard in shards], op
            )
            assert_same_bits(inp.cpu(), shards[comm.rank])


@pytest.mark.parametrize("where", ["comm.empty", "ordinary"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3)
def test_all_gather_single_concatenates_by_rank_and_broadcast_copies(comm, dtype, where):
    for numel in NUMELS:
        shards = _shards(comm, dtype, numel, seed=numel)
        inp, out = (
            _placed(comm, where, shards[comm.rank]),
            _placed(comm, where, torch.zeros(numel * comm.world_size, dtype=dtype)),
        )
        comm.all_gather_single(out, inp)
        assert_same_bits(out.cpu(), torch.cat(shards).cpu())
        for src in range(comm.world_size):
            tensor = _placed(comm, where, shards[comm.rank])
            comm.broadcast(tensor, src)
            assert_same_bits(tensor.cpu(), shards[src])


@on_ranks(2, 3)
def test_a_16_bit_mean_is_scaled_before_it_is_added(comm):
    for dtype in HALVES:
        large = torch.full((100,), 0.9 * torch.finfo(dtype).max, dtype=dtype, device=comm.device)
        comm.all_reduce(large, "mean")
        assert torch.isfinite(large).all()


@on_ranks(2)
def test_a_tensor_that_requires_a_gradient_is_reduced_in_place(comm):
    for op in OPS:
        tensor = torch.ones(10, device=comm.device, requires_grad=True)
        comm.all_reduce(tensor, op)
        assert tensor.tolist() == [2.0 if op == "sum" else 1.0] * 10 and tensor.grad_fn is None


@on_ranks(2)
def test_8_bit_floats_are_summed_and_have_no_mean(comm):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.ones(100, device=comm.device).to(dtype)
        comm.all_reduce(tensor)
        assert (tensor.float() == 2).all()
        with pytest.raises(TypeError, match="mean"):
            comm.all_reduce(tensor, "mean")


def _come_one_after_the_other(comm):
    time.sleep(0.2 * comm.rank)
    before = time.monotonic()
    comm.barrier()
    return before, time.monotonic()


def test_nobody_leaves_a_barrier_before_all_have_come(ranks):
    came, left = zip(*ranks(3, _come_one_after_the_other), strict=True)
    assert min(left) >= max(came)


@on_ranks(2)
def test_any_number_of_collectives_may_be_under_way(comm):
    shards = [_shards(comm, torch.float32, 37 * i, seed=i) for i in range(30)]
    tensors = [of_one[comm.rank].to(comm.device, copy=True) for of_one in shards]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        work.wait()
        assert work.is_completed() or comm.device.type == "cuda"
    for tensor, of_one in zip(tensors, shards, strict=True):
        assert_reduced(tensor, of_one, "sum")


@on_ranks(2, 3)
def test_collectives_of_every_kind_may_be_under_way(comm):
    check_async_collectives(comm)


def _use_many(place):
    comms = [communicator(place) for _ in range(5)]
    for i, comm in enumerate(comms):
        tensor = torch.full((10,), float(i))
        comm.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * i] * 10
    for i, comm in enumerate(comms):
        comm.close()
        assert loaded("nccl").stand_in_live_comms() == len(comms) - 1 - i


def test_a_process_may_have_many_communicators():
    stand_in_values(2, _use_many)


@on_ranks(2, 3)
def test_lanes_take_turns_at_the_buckets(comm):
    check_gradients(comm, mlp(), backward, streams=2, **SMALL_BUCKETS)


# Arguments. Rank 0 calls what is wrong, the others nothing: it must not wait for them, nor disturb
# them.


def refused(comm, error, words, call):
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            call()
    tensor = torch.ones(10, device=comm.device)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [float(comm.world_size)] * 10


@on_ranks(2)
def test_tensors_that_are_not_dense_contiguous_and_here_are_refused(comm):
    zeros = torch.zeros(6, 4, device=comm.device)
    refused(comm, ValueError, "contiguous", lambda: comm.all_reduce(zeros[:, :2]))
    refused(comm, ValueError, "contiguous", lambda: comm.broadcast(zeros[:, :2]))
    refused(comm, ValueError, "contiguous", lambda: comm.all_gather_single(zeros.t(), zeros[:3]))
    refused(
        comm, ValueError, "contiguous", lambda: comm.reduce_scatter_single(zeros[:3], zeros.t())
    )
    refused(comm, ValueError, "meta", lambda: comm.all_reduce(torch.zeros(4, device="meta")))
    for sparse in (zeros.to_sparse(), zeros.to_sparse_csr()):
        refused(comm, ValueError, "sparse", lambda sparse=sparse: comm.all_reduce(sparse))


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.complex64, torch.int8], ids=str)
@on_ranks(2)
def test_other_dtypes_are_refused(comm, dtype):
    name = str(dtype).removeprefix("torch.")
    refused(
        comm,
        TypeError,
        name,
        lambda: comm.all_reduce(torch.zeros(4, dtype=dtype, device=comm.device)),
    )
    refused(comm, TypeError, name, lambda: comm.empty(4, dtype=dtype))


@on_ranks(2)
def test_what_does_not_fit_is_refused(comm):
    four = torch.zeros(4, device=comm.device)
    refused(comm, TypeError, "list", lambda: comm.all_reduce([1.0, 2.0]))
    refused(comm, ValueError, "median", lambda: comm.all_reduce(four, "median"))
    refused(
        comm, ValueError, "8 elements.*has 4", lambda: comm.all_gather_single(four.clone(), four)
    )
    refused(
        comm,
        ValueError,
        "2 elements.*has 4",
        lambda: comm.reduce_scatter_single(four.clone(), four),
    )
    refused(
        comm, ValueError, "multiple of 2", lambda: comm.reduce_scatter_single(four[:1], four[:3])
    )
    refused(
        comm,
        TypeError,
        "float64.*float32",
        lambda: comm.all_gather_single(torch.zeros(8, device=comm.device).double(), four),
    )
    refused(comm, ValueError, "-1", lambda: comm.empty(-1, dtype=torch.float32))
    for src in (-1, 2):
        refused(comm, ValueError, f"0 to 1.*{src}", lambda src=src: comm.broadcast(four, src))


def _use_a_busy_communicator(place):
    comm = communicator(place)
    if place.rank == 1:
        time.sleep(0.6)
        comm.barrier()
        return
    waiting = threading.Thread(target=comm.barrier)
    waiting.start()
    time.sleep(0.2)
    with pytest.raises(FastcommError, match="thread"):
        comm.all_reduce(torch.ones(10))
    waiting.join()


def test_a_second_thread_in_the_communicator_is_told_so():
    stand_in_values(2, _use_a_busy_communicator)


def _use_after_the_end(place, end):
    comm = communicator(place)
    getattr(comm, end)()
    getattr(comm, end)()
    comm.close()
    four = torch.zeros(4)
    calls = (
        lambda: comm.all_reduce(four),
        lambda: comm.all_reduce(four, async_op=True),
        lambda: comm.broadcast(four),
        lambda: comm.all_gather_single(torch.zeros(8), four),
        lambda: comm.reduce_scatter_single(torch.zeros(2), four),
        comm.barrier,
        comm.abandon,
        lambda: comm.empty(4, dtype=torch.float32),
        lambda: comm.bind_bucket(four, [four[:3]], [0], wire_dtype=None, label=1),
    )
    for call in calls:
        with pytest.raises(FastcommError, match=end):
            call()
    assert loaded("nccl").stand_in_live_comms() == 0


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_communicator_says_that_it_has_ended(end):
    stand_in_values(1, _use_after_the_end, end)


# Memory


@on_ranks(2)
def test_comm_empty_gives_flat_tensors_on_the_device(comm):
    for dtype in DTYPES:
        for numel in (0, 1, 1000):
            tensor = comm.empty(numel, dtype=dtype)
            assert (tensor.shape, tensor.dtype, tensor.device) == ((numel,), dtype, comm.device)
            assert (
                tensor.is_contiguous() and not tensor.requires_grad and tensor.data_ptr() % 64 == 0
            )


def _keep_tensors(place):
    comm = communicator(place)
    tensor = comm.empty(1000, dtype=torch.float32).fill_(1)
    part = comm.empty(1000, dtype=torch.float32).fill_(2)[10:20]
    comm.all_reduce(tensor)
    comm.close()
    del comm
    gc.collect()
    tensor.add_(1)
    return tensor.tolist() == [3.0] * 1000 and part.tolist() == [2.0] * 10


def test_a_tensor_outlives_its_communicator():
    assert stand_in_values(2, _keep_tensors) == [True, True]


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
        *freeing, allocating, registering = calls
        assert (allocating, registering) == ("ncclMemAlloc", "ncclCommRegister")
        assert (
            freeing == ["ncclCommWindowDeregister", "ncclMemFree"] * (len(freeing) // 2) and freeing
        )


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


def _registrations_after_an_abandon(place):
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(model)
    if place.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(FastcommError):
            comm.barrier()
    loaded("nccl").stand_in_clear_log()
    backward(model, place.rank)
    return sum("ncclCommRegister" in line for line in log_of(loaded("nccl")))


def test_memory_is_registered_again_when_the_ranks_have_met_anew():
    assert stand_in_values(2, _registrations_after_an_abandon) == [3, 3]


def _do_without(place):
    comm = communicator(place)
    check_gradients(comm, mlp(), backward, streams=2, **SMALL_BUCKETS)
    tensor = comm.empty(100, dtype=torch.float32).fill_(1)
    comm.all_reduce(tensor)
    if place.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(FastcommError):
            comm.barrier()
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
            "ncclCommRegister",
            "ncclCommDeregister",
            "ncclCommWindowRegister",
            "ncclCommWindowDeregister",
        ),
    ],
    ids=["windows", "revoking", "memory"],
)
def test_an_older_nccl_may_lack(functions):
    stand_in_values(2, _do_without, env={"FASTCOMM_NCCL_LIBRARY": nccl_without(*functions)})


# The order of launches, by the logs. The two libraries keep one each; what comes between is ordered
# by the streams' events.


def _launch_one_bucket(place, wire_dtype):
    comm = communicator(place)
    model = torch.nn.Linear(8, 8)
    fastcomm.Reducer(comm, wire_dtype=wire_dtype).attach(model)
    x = torch.ones(2, 8)
    model(x).sum().backward()
    model.zero_grad()
    loss = model(x).sum()
    for library in (loaded("cuda"), loaded("nccl")):
        library.stand_in_clear_log()
    loss.backward()
    return log_of(loaded("cuda")), log_of(loaded("nccl"))


def _events(line):
    """What a line of the log does: call, stream and event."""
    found = dict(re.findall(r"(stream|event)=(\w+)", line))
    return line.split()[0], found.get("stream"), found.get("event")


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
def test_a_bucket_is_one_launch_ordered_by_events(wire_dtype):
    for cuda, nccl in stand_in_values(2, _launch_one_bucket, wire_dtype):
        (all_reduce,) = nccl
        lane = re.search(r"stream=(0x\w+)", all_reduce)[1]
        assert lane != "0x0"
        calls = [_events(line) for line in cuda]
        begin = ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"]
        unflatten = ["cuLaunchKernel"] if wire_dtype else []
        assert [name for name, _, _ in calls] == [
            *begin,
            *unflatten,
            "cuEventRecord",
            "cuStreamWaitEvent",
        ]
        flattened, ready, lane_waits, *cast, done, caller_waits = calls
        assert cuda[0].startswith("cuLaunchKernel flatten") and flattened[1] == "0x0"
        assert ready[1] == "0x0" and lane_waits[1:] == (lane, ready[2])
        assert all(stream == lane for _, stream, _ in cast)
        assert done[1] == lane and done[2] != ready[2]
        assert caller_waits[1:] == ("0x0", done[2])


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


def _note_side_streams(place):
    comm = communicator(place)
    current = [0]
    comm.cuda.raw_stream = lambda index: current[0]
    flat = comm.empty(101, dtype=torch.float32).fill_(1)
    views = [flat[:100]]
    bucket = comm.bind_bucket(flat, views, [0], wire_dtype=None, label=1)
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = views[0]
    current[0] = 1
    bucket.note_stream()
    current[0] = 2
    loaded("cuda").stand_in_clear_log()
    bucket.gather([parameter])
    bucket.launch("mean", []).wait()
    return [_events(line) for line in log_of(loaded("cuda"))], flat[:100].tolist()


def test_a_bucket_waits_for_the_streams_its_gradients_were_produced_on():
    for calls, values in stand_in_values(2, _note_side_streams):
        (record, produced_on, event), (wait, waits, awaited), (kernel, flattened_on, _) = calls[:3]
        assert (record, wait, kernel) == ("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel")
        assert (produced_on, waits, flattened_on) == ("0x1", "0x2", "0x2") and event == awaited
        assert calls[-1][:2] == ("cuStreamWaitEvent", "0x2")
        assert values == [1.0] * 100


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
        time.sleep(0.5)  # the watchdog looks several times
        assert loaded("cuda").stand_in_capture(END) == 0
        assert other.tolist() == [float(place.world_size)] * 10
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
    [(1, None), (2, torch.bfloat16)],
    ids=["one lane", "two lanes and a cast"],
)
def test_a_step_can_be_captured_and_the_communicator_outlives_its_graphs(mode, streams, wire_dtype):
    stand_in_values(2, _capture, mode, streams, wire_dtype)


def _abort_with_a_graph_alive(place):
    comm = communicator(place)
    comm.cuda.raw_stream = lambda index: LEGACY_STREAM
    comm.all_reduce(torch.ones(10))
    loaded("cuda").stand_in_capture(BEGIN_THREAD_LOCAL)
    comm.all_reduce(torch.ones(10))
    assert loaded("cuda").stand_in_capture(END) == 0
    comm.abort()
    del comm
    gc.collect()
    loaded("cuda").stand_in_destroy_graphs()
    return loaded("nccl").stand_in_live_comms()


def test_a_graph_may_outlive_an_aborted_communicator():
    assert stand_in_values(2, _abort_with_a_graph_alive) == [0, 0]
