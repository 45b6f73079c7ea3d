"""The stand-in for the CUDA driver, through ctypes: that it checks, fails and waits as the driver
does.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest

from tests.fakes.stand_ins import StandIns, stand_ins

NOT_INITIALIZED, INVALID_CONTEXT, INVALID_HANDLE = 3, 201, 400
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_ISOLATION, CAPTURED_EVENT = (
    900,
    901,
    904,
    905,
    907,
)
RELAXED, THREAD_LOCAL = 2, 1


@pytest.fixture(scope="module")
def libraries() -> StandIns:
    return stand_ins()


@pytest.fixture(scope="module")
def driver(libraries: StandIns) -> ctypes.CDLL:
    return ctypes.CDLL(libraries.cuda)


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


def test_environment_with_a_misspelt_fault_ends_the_process(libraries: StandIns) -> None:
    ask = f"import ctypes; ctypes.CDLL({libraries.nccl!r})"
    environment = {"FASTCOMM_STAND_IN_NCCL_FAULTS": "ncclAlReduce=1"}
    run = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "ncclAlReduce" in run.stderr


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


def test_a_fault_of_no_function_is_refused(cuda: ctypes.CDLL) -> None:
    assert cuda.stand_in_fail(b"cuEventRecrod", 719, 0) == -1


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


def test_a_query_for_an_event_of_a_capture_is_refused_and_spoils_it(cuda: ctypes.CDLL) -> None:
    event = new_event(cuda)
    cuda.stand_in_capture(1)
    cuda.cuEventRecord(event, None)
    exchange_capture_mode(cuda, RELAXED)
    assert cuda.cuEventQuery(event) == CAPTURED_EVENT
    assert cuda.stand_in_capture(0) == CAPTURE_INVALIDATED
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
