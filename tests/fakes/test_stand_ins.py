"""What the stand-in for the CUDA driver must find in a test: it would pass unseen if it did not.
Through ctypes. What the stand-ins do besides, the tests of transports/nccl show by their results.
"""

from __future__ import annotations

import ctypes
import shutil
import threading
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

import pytest

from tests.fakes.stand_ins import races_of, stand_ins

INVALID_CONTEXT, INVALID_HANDLE = 201, 400
CAPTURE_ISOLATION = 905


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The driver with two devices, the first of which is current."""
    monkeypatch.setenv("FASTCOMM_STAND_IN_DEVICES", "0,1")
    driver = ctypes.CDLL(shutil.copy(stand_ins().cuda, tmp_path))  # it reads them when it is loaded
    assert driver.cuInit(0) == 0
    enter(driver, 0)
    return driver


def enter(cuda: ctypes.CDLL, device: int) -> None:
    context = c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0


def stream_of(cuda: ctypes.CDLL) -> c_void_p:
    stream = c_void_p()
    assert cuda.cuStreamCreateWithPriority(byref(stream), 1, 0) == 0
    return stream


def event_of(cuda: ctypes.CDLL) -> c_void_p:
    event = c_void_p()
    assert cuda.cuEventCreate(byref(event), 2) == 0
    return event


def touch(cuda: ctypes.CDLL, stream: c_void_p, name: bytes, *, start: int = 0) -> None:
    """100 bytes, which a reader reads and anybody else writes."""
    where = c_size_t(stream.value or 0), name, c_void_p(1000 + start), c_size_t(100)
    cuda.stand_in_touch(*where, c_int(name != b"reader"))


def test_what_streams_do_to_the_same_bytes_without_order_is_a_race(cuda: ctypes.CDLL) -> None:
    one, other = stream_of(cuda), stream_of(cuda)
    touch(cuda, one, b"writer")
    touch(cuda, other, b"reader", start=80)
    assert races_of(cuda) == [
        f"20 bytes at {1080:#x}: reader on stream {other.value:#x} reads them, and nothing orders "
        f"it after writer on stream {one.value:#x}, which writes them"
    ]
    touch(cuda, one, b"reader")
    touch(cuda, other, b"writer")
    cuda.stand_in_free_memory(c_void_p(1000), c_size_t(100))
    assert len(races_of(cuda)) == 2


def test_an_event_orders_what_was_before_its_record_alone(cuda: ctypes.CDLL) -> None:
    one, other, event = stream_of(cuda), stream_of(cuda), event_of(cuda)
    touch(cuda, one, b"writer")
    assert cuda.cuEventRecord(event, one) == 0
    assert cuda.cuStreamWaitEvent(other, event, 0) == 0
    touch(cuda, other, b"writer")
    assert races_of(cuda) == []
    touch(cuda, one, b"writer")
    touch(cuda, other, b"writer")
    assert len(races_of(cuda)) == 1


def test_handles_of_another_context_or_of_no_capture_are_refused(cuda: ctypes.CDLL) -> None:
    stream, event = stream_of(cuda), event_of(cuda)
    assert cuda.cuEventRecord(event, stream) == 0
    cuda.stand_in_capture(1)
    assert cuda.cuStreamWaitEvent(None, event, 0) == CAPTURE_ISOLATION
    cuda.stand_in_capture(0)
    enter(cuda, 1)
    assert cuda.cuEventRecord(event, None) == INVALID_HANDLE
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cuda.cuEventRecord(event, stream)))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]
