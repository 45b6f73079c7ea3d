"""The order of streams, as the stand-in for the CUDA driver keeps it: what counts as a race, and
what does not. Through ctypes, as in test_cuda_stand_in.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from tests.fakes.stand_ins import races_of, stand_ins

NOT_READY = 600
BEGIN_CAPTURE, END_CAPTURE = 1, 0


@pytest.fixture
def cuda() -> Iterator[ctypes.CDLL]:
    """The driver with its primary context current, and nothing known of any memory."""
    driver, context = ctypes.CDLL(stand_ins().cuda), c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0
    races_of(driver)
    yield driver
    driver.stand_in_hold_events(0)
    races_of(driver)


class Stream:
    """A stream that touches memory of 100 bytes at address 1000."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda, self.handle = cuda, c_void_p()
        assert cuda.cuStreamCreateWithPriority(byref(self.handle), 1, 0) == 0

    def writes(self, start: int = 0, nbytes: int = 100) -> None:
        self._touch(b"writer", start, nbytes, 1)

    def reads(self, start: int = 0, nbytes: int = 100) -> None:
        self._touch(b"reader", start, nbytes, 0)

    def record(self) -> c_void_p:
        event = c_void_p()
        assert self._cuda.cuEventCreate(byref(event), 2) == 0
        assert self._cuda.cuEventRecord(event, self.handle) == 0
        return event

    def wait_for(self, event: c_void_p) -> None:
        assert self._cuda.cuStreamWaitEvent(self.handle, event, 0) == 0

    def _touch(self, name: bytes, start: int, nbytes: int, is_write: int) -> None:
        address, stream = c_void_p(1000 + start), c_size_t(self.handle.value or 0)
        self._cuda.stand_in_touch(stream, name, address, c_size_t(nbytes), c_int(is_write))


@pytest.fixture
def one(cuda: ctypes.CDLL) -> Stream:
    return Stream(cuda)


@pytest.fixture
def other(cuda: ctypes.CDLL) -> Stream:
    return Stream(cuda)


def test_a_read_of_what_another_stream_writes_is_a_race_that_names_both(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    one.writes()
    other.reads(10, 20)
    assert races_of(cuda) == [
        f"20 bytes at {1010:#x}: reader on stream {other.handle.value:#x} reads them, and nothing "
        f"orders it after writer on stream {one.handle.value:#x}, which writes them"
    ]


def test_a_write_to_what_another_stream_reads_or_writes_is_a_race(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    one.reads()
    other.writes()
    one.writes()
    read, written = races_of(cuda)
    assert "reader" in read and "writer" in written


def test_only_bytes_that_another_stream_writes_need_order(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    one.writes(20, 10)
    other.writes(0, 20)
    other.writes(30, 10)
    other.reads(0, 40)
    (race,) = races_of(cuda)
    assert race.startswith(f"10 bytes at {1020:#x}")


def test_an_event_orders_what_was_before_its_record_alone(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    one.writes(0, 10)
    event = one.record()
    one.writes(10, 10)
    other.wait_for(event)
    other.reads(0, 10)
    assert races_of(cuda) == []
    one.writes(10, 10)
    other.reads(10, 10)
    assert len(races_of(cuda)) == 1


def test_what_another_thread_has_waited_for_orders_nothing_here(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    one.writes()
    context, codes = c_void_p(), []
    cuda.cuCtxGetCurrent(byref(context))
    waiting = threading.Thread(
        target=lambda: codes.extend(
            (cuda.cuCtxSetCurrent(context), cuda.cuStreamSynchronize(one.handle))
        )
    )
    waiting.start()
    waiting.join()
    assert codes == [0, 0]
    other.writes()
    assert len(races_of(cuda)) == 1


def test_a_query_orders_nothing_while_the_event_is_not_reached(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    one.writes()
    event = one.record()
    cuda.stand_in_hold_events(1)
    assert cuda.cuEventQuery(event) == NOT_READY
    other.writes()
    assert len(races_of(cuda)) == 1


def new_block(cuda: ctypes.CDLL, stream: Stream) -> torch.Tensor:
    """A tensor of 100 bytes in a block of the stream's."""
    cuda.stand_in_block.restype = c_void_p
    managed = cuda.stand_in_block(c_size_t(stream.handle.value or 0), c_size_t(100))
    capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    return from_dlpack(capsule(managed, b"dltensor", None))


def reads_block(cuda: ctypes.CDLL, stream: Stream, block: torch.Tensor) -> None:
    address = c_void_p(block.data_ptr())
    cuda.stand_in_touch(
        c_size_t(stream.handle.value or 0), b"reader", address, c_size_t(100), c_int(0)
    )


def test_a_block_that_is_freed_while_another_stream_reads_it_is_a_race(
    cuda: ctypes.CDLL, one: Stream, other: Stream
) -> None:
    block = new_block(cuda, one)
    reads_block(cuda, other, block)
    assert races_of(cuda) == []
    reads_block(cuda, other, block)
    del block
    (race,) = races_of(cuda)
    assert "the next tensor of stream" in race and "reader" in race


def test_memory_is_freed_by_a_thread_that_knows_all_work_on_it_to_be_over(
    cuda: ctypes.CDLL, one: Stream
) -> None:
    one.writes()
    cuda.stand_in_free_memory(c_void_p(1000), c_size_t(100))
    (race,) = races_of(cuda)
    assert "its memory is freed" in race
    one.writes()
    assert cuda.cuStreamSynchronize(one.handle) == 0
    cuda.stand_in_free_memory(c_void_p(1000), c_size_t(100))
    assert races_of(cuda) == []
