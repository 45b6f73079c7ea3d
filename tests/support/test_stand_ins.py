"""The stand-ins themselves, through ctypes: that they check, fail and wait as the libraries do in
whose place they are loaded.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest
import torch

from tests.support.ranks import Ranks, on_ranks
from tests.support.reference import assert_same_bits, reduced, shards_of
from tests.support.stand_ins import StandIns, stand_ins

NOT_INITIALIZED, NO_DEVICE, INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, NOT_READY = (
    3,
    100,
    201,
    400,
    500,
    600,
)
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURED_EVENT = (
    900,
    901,
    904,
    905,
    907,
)
RELAXED, THREAD_LOCAL = 2, 1

UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = (
    1,
    2,
    3,
    4,
    5,
    7,
)
SUM, PROD, MAX, MIN, AVG = range(5)
OPS = {"sum": SUM, "prod": PROD, "max": MAX, "min": MIN}
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
FLOAT32 = DTYPES[torch.float32]
EIGHT_BITS = {torch.float8_e4m3fn: 10, torch.float8_e5m2: 11}


@pytest.fixture(scope="module")
def libraries() -> StandIns:
    return stand_ins()


def log_of(library: ctypes.CDLL) -> list[str]:
    text = ctypes.create_string_buffer(1 << 22)
    library.stand_in_log(text, c_size_t(len(text)))
    return text.value.decode().splitlines()


# The driver

KERNEL = """
void triple(unsigned n_blocks, unsigned n_threads, void **parameters) {
    float *numbers = *(float **)parameters[0];
    for (unsigned i = 0; i < n_blocks * n_threads; i++)
        numbers[i] *= 3;
}
"""


@pytest.fixture(scope="module")
def driver(libraries: StandIns, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    source = tmp_path_factory.mktemp("kernels") / "triple.c"
    source.write_text(KERNEL)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", source.with_suffix(".so")], check=True)
    os.environ["FASTCOMM_STAND_IN_KERNELS"] = str(source.with_suffix(".so"))
    yield ctypes.CDLL(libraries.cuda)
    del os.environ["FASTCOMM_STAND_IN_KERNELS"]


@pytest.fixture
def cuda(driver: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The driver with its primary context current, and no orders left when the test ends."""
    context = c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    driver.stand_in_clear_log()
    yield driver
    driver.stand_in_capture(0)
    driver.stand_in_hold_events(0)
    exchange_capture_mode(driver, 0)


def exchange_capture_mode(cuda: ctypes.CDLL, mode: int) -> int:
    value = c_int(mode)
    assert cuda.cuThreadExchangeStreamCaptureMode(byref(value)) == 0
    return value.value


def new_event(cuda: ctypes.CDLL) -> c_void_p:
    event = c_void_p()
    assert cuda.cuEventCreate(byref(event), 2) == 0
    return event


def new_stream(cuda: ctypes.CDLL) -> c_void_p:
    stream = c_void_p()
    assert cuda.cuStreamCreateWithPriority(byref(stream), 1, -5) == 0
    return stream


def test_driver_wants_to_be_initialised_first(libraries: StandIns) -> None:
    ask = (
        "import ctypes; "
        f"print(ctypes.CDLL({libraries.cuda!r}).cuDeviceGetCount(ctypes.byref(ctypes.c_int())))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", ask])) == NOT_INITIALIZED


def test_environment_orders_faults(libraries: StandIns) -> None:
    ask = f"import ctypes; print(ctypes.CDLL({libraries.cuda!r}).cuInit(0))"
    environment = {"FASTCOMM_STAND_IN_CUDA_FAULTS": "cuLaunchKernel=719,cuInit=100"}
    assert int(subprocess.check_output([sys.executable, "-c", ask], env=environment)) == NO_DEVICE


def test_environment_with_a_misspelt_fault_ends_the_process(libraries: StandIns) -> None:
    ask = f"import ctypes; ctypes.CDLL({libraries.nccl!r})"
    environment = {"FASTCOMM_STAND_IN_NCCL_FAULTS": "ncclAlReduce=1"}
    run = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "ncclAlReduce" in run.stderr


def test_a_kernel_of_the_shim_is_launched_by_name(cuda: ctypes.CDLL) -> None:
    module, function, stream = c_void_p(), c_void_p(), new_stream(cuda)
    assert cuda.cuModuleLoadData(byref(module), b"image") == 0
    assert cuda.cuModuleGetFunction(byref(function), module, b"quadruple") == NOT_FOUND
    assert cuda.cuModuleGetFunction(byref(function), module, b"triple") == 0
    numbers = torch.ones(64)
    address = c_void_p(numbers.data_ptr())
    parameters = (c_void_p * 1)(ctypes.addressof(address))
    assert cuda.cuLaunchKernel(function, 2, 1, 1, 32, 1, 1, 0, stream, parameters, None) == 0
    assert numbers.tolist() == [3.0] * 64
    assert log_of(cuda)[-1] == f"cuLaunchKernel triple stream={stream.value:#x}"
    assert cuda.cuModuleUnload(module) == 0


def test_log_keeps_the_order_of_events_and_waits(cuda: ctypes.CDLL) -> None:
    event, stream = new_event(cuda), new_stream(cuda)
    cuda.stand_in_clear_log()
    cuda.cuEventRecord(event, None)
    cuda.cuStreamWaitEvent(stream, event, 0)
    assert log_of(cuda) == [
        f"cuEventRecord event={event.value} stream=0x0",
        f"cuStreamWaitEvent stream={stream.value:#x} event={event.value}",
    ]


def test_a_destroyed_event_is_invalid_and_not_alive(cuda: ctypes.CDLL) -> None:
    n_live = cuda.stand_in_live_events()
    event = new_event(cuda)
    assert cuda.stand_in_live_events() == n_live + 1
    assert cuda.cuEventDestroy_v2(event) == 0
    assert cuda.cuEventRecord(event, None) == INVALID_HANDLE
    assert cuda.stand_in_live_events() == n_live


def test_a_thread_has_no_context_until_it_sets_one(cuda: ctypes.CDLL) -> None:
    codes = []
    thread = threading.Thread(target=lambda: codes.append(cuda.cuEventCreate(byref(c_void_p()), 0)))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]


def test_a_fault_begins_after_as_many_calls_and_is_healed(cuda: ctypes.CDLL) -> None:
    event = new_event(cuda)
    assert cuda.stand_in_fail(b"cuEventRecord", 719, 1) == 0
    assert [cuda.cuEventRecord(event, None) for _ in range(3)] == [0, 719, 719]
    assert cuda.stand_in_fail(b"cuEventRecord", 0, 0) == 0
    assert cuda.cuEventRecord(event, None) == 0


def test_a_fault_of_no_function_is_refused(cuda: ctypes.CDLL) -> None:
    assert cuda.stand_in_fail(b"cuEventRecrod", 719, 0) == -1


def test_device_memory_is_counted_and_copied(cuda: ctypes.CDLL) -> None:
    before, address = cuda.stand_in_live_bytes(), ctypes.c_uint64()
    there, back = torch.arange(100.0), torch.zeros(100)
    assert cuda.cuMemAlloc_v2(byref(address), c_size_t(400)) == 0
    assert cuda.stand_in_live_bytes() == before + 400
    assert cuda.cuMemcpyHtoDAsync_v2(address, c_void_p(there.data_ptr()), c_size_t(400), None) == 0
    assert cuda.cuMemsetD8Async(address, 0, c_size_t(40), None) == 0
    assert cuda.cuMemcpyDtoHAsync_v2(c_void_p(back.data_ptr()), address, c_size_t(400), None) == 0
    assert back.tolist() == [0.0] * 10 + there.tolist()[10:]
    assert cuda.cuMemFree_v2(address) == 0
    assert cuda.stand_in_live_bytes() == before


def test_held_events_are_never_reached(cuda: ctypes.CDLL) -> None:
    event = new_event(cuda)
    cuda.cuEventRecord(event, None)
    cuda.stand_in_hold_events(1)
    assert cuda.cuEventQuery(event) == NOT_READY
    thread = threading.Thread(target=cuda.cuStreamSynchronize, args=(None,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    cuda.stand_in_hold_events(0)
    thread.join(10)
    assert not thread.is_alive()
    assert cuda.cuEventQuery(event) == 0


def capture_status(cuda: ctypes.CDLL, stream: c_void_p | None) -> int:
    status = c_int(-1)
    assert cuda.cuStreamIsCapturing(stream, byref(status)) == 0
    return status.value


def fork(cuda: ctypes.CDLL, stream: c_void_p) -> None:
    """Takes a stream into the capture."""
    event = new_event(cuda)
    cuda.cuEventRecord(event, None)
    assert cuda.cuStreamWaitEvent(stream, event, 0) == 0


def test_a_stream_joins_a_capture_by_waiting_and_must_be_waited_for(cuda: ctypes.CDLL) -> None:
    stream, done = new_stream(cuda), new_event(cuda)
    cuda.stand_in_capture(1)
    assert (capture_status(cuda, None), capture_status(cuda, stream)) == (1, 0)
    fork(cuda, stream)
    assert capture_status(cuda, stream) == 1
    cuda.cuEventRecord(done, stream)
    assert cuda.cuStreamWaitEvent(None, done, 0) == 0
    assert cuda.stand_in_capture(0) == 0
    cuda.stand_in_capture(1)
    fork(cuda, stream)
    assert cuda.stand_in_capture(0) == CAPTURE_UNJOINED


def test_a_capture_does_not_wait_for_an_event_from_outside(cuda: ctypes.CDLL) -> None:
    event = new_event(cuda)
    cuda.cuEventRecord(event, None)
    cuda.stand_in_capture(1)
    assert cuda.cuStreamWaitEvent(None, event, 0) == CAPTURE_ISOLATION
    assert cuda.cuEventRecord(event, None) == CAPTURE_INVALIDATED
    assert cuda.stand_in_capture(0) == CAPTURE_INVALIDATED


def test_synchronising_in_a_capture_invalidates_it(cuda: ctypes.CDLL) -> None:
    for synchronise in (
        cuda.cuCtxSynchronize,
        lambda: cuda.cuStreamSynchronize(None),
        lambda: cuda.cuMemFree_v2(c_size_t(0)),
    ):
        cuda.stand_in_capture(1)
        assert synchronise() == CAPTURE_UNSUPPORTED
        assert capture_status(cuda, None) == 2
        assert cuda.stand_in_capture(0) == CAPTURE_INVALIDATED


def test_an_event_of_a_capture_cannot_be_queried(cuda: ctypes.CDLL) -> None:
    event = new_event(cuda)
    cuda.stand_in_capture(1)
    cuda.cuEventRecord(event, None)
    exchange_capture_mode(cuda, RELAXED)
    assert cuda.cuEventQuery(event) == CAPTURED_EVENT


def test_an_object_of_a_graph_goes_with_it(cuda: ctypes.CDLL) -> None:
    status, identifier, graph, owned = c_int(), ctypes.c_ulonglong(), c_void_p(), c_void_p()
    gone = []
    destroy = ctypes.CFUNCTYPE(None, c_void_p)(gone.append)
    cuda.stand_in_capture(1)
    assert (
        cuda.cuStreamGetCaptureInfo_v2(
            None, byref(status), byref(identifier), byref(graph), None, None
        )
        == 0
    )
    assert status.value == 1
    assert cuda.cuUserObjectCreate(byref(owned), c_void_p(7), destroy, 1, 1) == 0
    cuda.stand_in_destroy_graphs()
    assert gone == []  # the caller holds it still
    assert cuda.cuGraphRetainUserObject(graph, owned, 1, 1) == 0
    cuda.stand_in_destroy_graphs()
    assert gone == [7]


@pytest.mark.parametrize(
    "mode, expected", [(0, CAPTURE_UNSUPPORTED), (THREAD_LOCAL, 0), (RELAXED, 0)]
)
def test_a_watchdog_may_query_while_another_thread_captures_unless_its_mode_is_global(
    cuda: ctypes.CDLL, mode: int, expected: int
) -> None:
    event, codes = new_event(cuda), []
    cuda.cuEventRecord(event, None)

    def watch() -> None:
        exchange_capture_mode(cuda, mode)
        codes.append(cuda.cuEventQuery(event))

    cuda.stand_in_capture(1)
    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert codes == [expected]
    assert cuda.stand_in_capture(0) == (CAPTURE_INVALIDATED if expected else 0)


# NCCL: one process


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("rest", c_int * 7),
    ]


def config(
    size: int = 48, magic: int = 0xCAFEBEEF, version: int = 22907, blocking: int = 1
) -> Config:
    return Config(size, magic, version, blocking)


def unique_id(nccl: ctypes.CDLL) -> UniqueId:
    made = UniqueId()
    assert nccl.ncclGetUniqueId(byref(made)) == 0
    return made


def init(
    nccl: ctypes.CDLL, n_ranks: int, identity: UniqueId, rank: int, how: Config | None
) -> tuple[int, c_void_p]:
    handle = c_void_p()
    code = nccl.ncclCommInitRankConfig(
        byref(handle), n_ranks, identity, rank, byref(how) if how is not None else None
    )
    return code, handle


def all_reduce(
    nccl: ctypes.CDLL, handle: c_void_p, tensor: torch.Tensor, dtype: int = FLOAT32, op: int = SUM
) -> int:
    address = c_void_p(tensor.data_ptr())
    return nccl.ncclAllReduce(address, address, c_size_t(tensor.numel()), dtype, op, handle, None)


def async_error(nccl: ctypes.CDLL, handle: c_void_p) -> int:
    error = c_int(-1)
    assert nccl.ncclCommGetAsyncError(handle, byref(error)) == 0
    return error.value


@pytest.fixture
def nccl(libraries: StandIns) -> Iterator[ctypes.CDLL]:
    """The library, with no orders left and nothing alive when the test ends."""
    library = load_nccl(libraries.nccl)
    yield library
    library.stand_in_async_error(0)
    library.stand_in_hang(None)
    library.stand_in_in_progress(None)
    assert library.stand_in_live_comms() == 0
    assert library.stand_in_live_bytes() == 0


def load_nccl(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    library.stand_in_live_bytes.restype = c_size_t
    return library


@pytest.fixture
def alone(nccl: ctypes.CDLL) -> Iterator[c_void_p]:
    """A communicator of one rank; the test may have ended it already."""
    code, handle = init(nccl, 1, unique_id(nccl), 0, None)
    assert code == 0
    yield handle
    nccl.stand_in_in_progress(None)
    nccl.ncclCommDestroy(handle)


@pytest.mark.parametrize("wrong", [{"size": 47}, {"magic": 0}, {"version": 0}])
def test_a_config_that_is_none_is_refused(nccl: ctypes.CDLL, wrong: dict[str, int]) -> None:
    assert init(nccl, 1, unique_id(nccl), 0, config(**wrong))[0] == INVALID_ARGUMENT
    assert next(iter(wrong)).encode() in nccl.ncclGetLastError(
        None
    ) or b"shorter" in nccl.ncclGetLastError(None)


def test_a_communicator_that_is_gone_is_refused(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert all_reduce(nccl, alone, torch.ones(3)) == 0
    assert nccl.ncclCommDestroy(alone) == 0
    assert all_reduce(nccl, alone, torch.ones(3)) == INVALID_ARGUMENT
    assert nccl.ncclCommAbort(alone) == INVALID_ARGUMENT


def test_averages_are_refused(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert all_reduce(nccl, alone, torch.ones(3), op=AVG) == INVALID_ARGUMENT


def test_memory_is_freed_after_its_registration(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    address, window = c_void_p(), c_void_p()
    assert nccl.ncclMemAlloc(byref(address), c_size_t(1000)) == 0
    assert nccl.stand_in_live_bytes() == 1000
    assert nccl.ncclCommWindowRegister(alone, address, c_size_t(1000), byref(window), 1) == 0
    assert nccl.ncclMemFree(address) == INVALID_USAGE
    assert nccl.ncclCommWindowDeregister(alone, window) == 0
    assert nccl.ncclMemFree(address) == 0
    assert log_of(nccl)[-4:] == [
        "ncclCommWindowRegister nbytes=1000 flags=1",
        "ncclMemFree",
        "ncclCommWindowDeregister",
        "ncclMemFree",
    ]


def test_calls_of_a_group_run_when_it_ends(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    inp, out = torch.ones(10), torch.zeros(10)
    addresses = c_void_p(inp.data_ptr()), c_void_p(out.data_ptr())
    assert nccl.ncclGroupStart() == 0
    assert nccl.ncclAllReduce(*addresses, c_size_t(10), FLOAT32, SUM, alone, None) == 0
    assert out.sum() == 0
    assert nccl.ncclGroupEnd() == 0
    assert out.sum() == 10


def test_an_asynchronous_error_is_reported(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert async_error(nccl, alone) == 0
    nccl.stand_in_async_error(UNHANDLED_CUDA_ERROR)
    assert async_error(nccl, alone) == UNHANDLED_CUDA_ERROR


def test_a_call_stays_in_progress(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert nccl.stand_in_in_progress(b"ncclAllReduce") == 0
    assert all_reduce(nccl, alone, torch.ones(3)) == IN_PROGRESS
    assert async_error(nccl, alone) == IN_PROGRESS


def test_a_revoked_communicator_only_waits_for_its_end(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert nccl.ncclCommRevoke(alone, 0) == 0
    assert all_reduce(nccl, alone, torch.ones(3)) == INTERNAL_ERROR
    assert nccl.ncclCommAbort(alone) == 0


def code_of_a_call_that_is_aborted(nccl: ctypes.CDLL, handle: c_void_p) -> int:
    codes = []
    thread = threading.Thread(target=lambda: codes.append(all_reduce(nccl, handle, torch.ones(3))))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert nccl.ncclCommAbort(handle) == 0
    thread.join(10)
    return codes[0]


def test_a_call_that_hangs_ends_with_the_abort(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    nccl.stand_in_hang(b"ncclAllReduce")
    assert code_of_a_call_that_is_aborted(nccl, alone) == INTERNAL_ERROR


def test_a_communicator_that_does_not_block_is_in_progress_until_all_are_there(
    nccl: ctypes.CDLL,
) -> None:
    identity = unique_id(nccl)
    code, first = init(nccl, 2, identity, 0, config(blocking=0))
    assert (code, async_error(nccl, first)) == (IN_PROGRESS, IN_PROGRESS)
    assert all_reduce(nccl, first, torch.ones(3)) == INVALID_ARGUMENT
    _, second = init(nccl, 2, identity, 1, config(blocking=0))
    assert (async_error(nccl, first), async_error(nccl, second)) == (0, 0)
    assert nccl.ncclCommAbort(first) == nccl.ncclCommAbort(second) == 0


def test_a_unique_id_is_good_for_one_communicator(nccl: ctypes.CDLL) -> None:
    identity = unique_id(nccl)
    _, handle = init(nccl, 1, identity, 0, None)
    assert init(nccl, 1, identity, 0, None)[0] == SYSTEM_ERROR
    assert nccl.ncclCommDestroy(handle) == 0


def test_an_old_library_says_so_and_lacks_what_came_later(libraries: StandIns) -> None:
    old, version = ctypes.CDLL(libraries.old_nccl), c_int()
    assert old.ncclGetVersion(byref(version)) == 0
    assert version.value < 21800
    assert not hasattr(old, "ncclCommInitRankConfig")
    assert not hasattr(old, "ncclCommSplit")


# NCCL: several processes


class World:
    """A communicator of the stand-in among the ranks of a test. Its library comes to life in the
    rank process.
    """

    def __init__(self, comm, path: str, version: str | None = None) -> None:
        if version is not None:
            os.environ["FASTCOMM_STAND_IN_NCCL_VERSION"] = version
        self.nccl = load_nccl(path)
        self.n_before = self.nccl.stand_in_live_comms()
        identity = torch.zeros(128, dtype=torch.uint8)
        if comm.rank == 0:
            identity = torch.frombuffer(bytearray(unique_id(self.nccl)), dtype=torch.uint8)
        comm.broadcast(identity, 0)
        self.code, self.handle = init(
            self.nccl, comm.world_size, UniqueId.from_buffer_copy(identity.numpy()), comm.rank, None
        )
        os.environ.pop("FASTCOMM_STAND_IN_NCCL_VERSION", None)

    def __enter__(self) -> World:
        assert self.code == 0
        return self

    def __exit__(self, *_: object) -> None:
        self.nccl.ncclCommAbort(self.handle)
        assert self.nccl.stand_in_live_comms() == self.n_before


SIZES = (0, 1, 7, 5000, 200_003)


@on_ranks(2, 3)
def test_all_reduce_is_the_reduction_in_rank_order(comm, libraries):
    with World(comm, libraries.nccl) as world:
        for dtype, number in DTYPES.items():
            for numel, (name, op) in [
                *((100, one) for one in OPS.items()),
                *((numel, ("sum", SUM)) for numel in SIZES),
            ]:
                shards = shards_of(dtype, comm.world_size, numel, seed=numel)
                assert all_reduce(world.nccl, world.handle, shards[comm.rank], number, op) == 0
                assert_same_bits(
                    shards[comm.rank],
                    reduced(shards_of(dtype, comm.world_size, numel, seed=numel), name),
                )


@on_ranks(2)
def test_8_bit_floats_are_added_as_floats_and_rounded_once(comm, libraries):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    with World(comm, libraries.nccl) as world:
        for dtype, number in EIGHT_BITS.items():
            limit = torch.finfo(dtype).max
            shards = [codes.repeat(256).view(dtype), codes.repeat_interleave(256).view(dtype)]
            total = shards[0].float() + shards[1].float()
            expected = torch.where(total.isnan(), total, total.clamp(-limit, limit)).to(dtype)
            assert all_reduce(world.nccl, world.handle, shards[comm.rank], number) == 0
            assert_same_bits(shards[comm.rank].float(), expected.float())


@on_ranks(3)
def test_other_collectives_move_what_they_should(comm, libraries):
    n, numel = comm.world_size, 70_001
    with World(comm, libraries.nccl) as world:
        shards = shards_of(torch.float32, n, numel * n)
        own, out = shards[comm.rank], torch.zeros(numel * n)
        pointers = c_void_p(own.data_ptr()), c_void_p(out.data_ptr())
        assert (
            world.nccl.ncclBroadcast(*pointers, c_size_t(numel * n), FLOAT32, 1, world.handle, None)
            == 0
        )
        assert_same_bits(out, shards[1])
        assert (
            world.nccl.ncclAllGather(*pointers, c_size_t(numel), FLOAT32, world.handle, None) == 0
        )
        assert_same_bits(out, torch.cat([shard[:numel] for shard in shards]))
        assert (
            world.nccl.ncclReduceScatter(
                *pointers, c_size_t(numel), FLOAT32, SUM, world.handle, None
            )
            == 0
        )
        assert_same_bits(out[:numel], reduced(shards, "sum").view(n, numel)[comm.rank])


@on_ranks(2)
def test_a_group_has_no_order_between_communicators(comm, libraries):
    with World(comm, libraries.nccl) as world, World(comm, libraries.nccl) as other:
        handles = (world.handle, other.handle) if comm.rank == 0 else (other.handle, world.handle)
        tensors = torch.ones(5), torch.ones(5)
        world.nccl.ncclGroupStart()
        for handle, tensor in zip(handles, tensors, strict=True):
            all_reduce(world.nccl, handle, tensor)
        assert world.nccl.ncclGroupEnd() == 0
        assert all((tensor == 2).all() for tensor in tensors)


@on_ranks(3)
def test_a_split_orders_its_ranks_by_key(comm, libraries):
    with World(comm, libraries.nccl) as world:
        part, rank = c_void_p(), c_int()
        color = -1 if comm.rank == 1 else 0
        assert world.nccl.ncclCommSplit(world.handle, color, -comm.rank, byref(part), None) == 0
        assert (part.value is None) == (comm.rank == 1)
        if part:
            world.nccl.ncclCommUserRank(part, byref(rank))
            assert rank.value == {2: 0, 0: 1}[comm.rank]
            tensor = torch.full((4,), float(comm.rank))
            assert all_reduce(world.nccl, part, tensor) == 0
            assert tensor.tolist() == [2.0] * 4
            world.nccl.ncclCommDestroy(part)


@on_ranks(2)
def test_ranks_that_do_not_agree_wait_until_they_abort(comm, libraries):
    with World(comm, libraries.nccl) as world:
        dtype = FLOAT32 if comm.rank == 0 else DTYPES[torch.int32]
        codes = []
        thread = threading.Thread(
            target=lambda: codes.append(all_reduce(world.nccl, world.handle, torch.ones(3), dtype))
        )
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert world.nccl.ncclCommAbort(world.handle) == 0
        thread.join(10)
        assert codes == [INTERNAL_ERROR]


@on_ranks(2)
def test_a_rank_does_not_notice_that_its_peer_has_aborted(comm, libraries):
    with World(comm, libraries.nccl) as world:
        if comm.rank == 0:
            assert world.nccl.ncclCommAbort(world.handle) == 0
        comm.barrier()
        if comm.rank == 1:
            assert code_of_a_call_that_is_aborted(world.nccl, world.handle) == INTERNAL_ERROR


@on_ranks(2)
def test_ranks_with_different_versions_do_not_form_a_communicator(comm, libraries):
    world = World(comm, libraries.nccl, version="22809" if comm.rank == 0 else "22907")
    assert world.code == INVALID_USAGE
    assert b"versions" in world.nccl.ncclGetLastError(None)
    assert world.nccl.stand_in_live_comms() == 0


def descriptors(comm, libraries) -> tuple[int, int]:
    before = len(os.listdir("/proc/self/fd"))
    with World(comm, libraries.nccl) as world:
        world.nccl.ncclCommSplit(world.handle, 0, 0, byref(part := c_void_p()), None)
        world.nccl.ncclCommDestroy(part)
    return before, len(os.listdir("/proc/self/fd"))


def test_a_communicator_leaves_no_descriptor_open(ranks: Ranks, libraries: StandIns) -> None:
    for before, after in ranks(2, descriptors, libraries):
        assert before == after
