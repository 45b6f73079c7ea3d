"""The stand-ins for NCCL and for the CUDA driver in one process, through ctypes: which device a
communicator is on, and what its end waits for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_void_p

import pytest
import torch

from tests.fakes.stand_ins import races_of, stand_ins
from tests.fakes.test_context_stand_in import load
from tests.fakes.test_nccl_stand_in import FLOAT32, SUM, all_reduce, init, load_nccl, unique_id

UNHANDLED_CUDA_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT = 1, 3, 4
BEGIN_CAPTURE, END_CAPTURE = 1, 0


@pytest.fixture
def cuda(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The driver with two devices. The second one is current."""
    driver = load(tmp_path, "0,1")
    monkeypatch.setenv("FASTCOMM_CUDA_LIBRARY", driver._name)
    enter(driver, 1)
    yield driver
    driver.cuCtxSetCurrent(None)


@pytest.fixture
def nccl(cuda: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    library = load_nccl(stand_ins().nccl)
    yield library
    assert library.stand_in_live_comms() == 0
    assert library.stand_in_live_bytes() == 0


@pytest.fixture
def alone(nccl: ctypes.CDLL) -> c_void_p:
    """A communicator of one rank, which the test ends."""
    code, handle = init(nccl, 1, unique_id(nccl), 0, None)
    assert code == 0
    return handle


def enter(cuda: ctypes.CDLL, device: int) -> None:
    context = c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0


def new_stream(cuda: ctypes.CDLL) -> c_void_p:
    stream = c_void_p()
    assert cuda.cuStreamCreateWithPriority(byref(stream), 1, 0) == 0
    return stream


def reduce_on(nccl: ctypes.CDLL, handle: c_void_p, stream: c_void_p, address: int) -> int:
    where = c_void_p(address)
    return nccl.ncclAllReduce(where, where, c_size_t(1), FLOAT32, SUM, handle, stream)


# Devices


def test_a_collective_takes_streams_and_memory_of_its_communicator_s_device(
    nccl: ctypes.CDLL, cuda: ctypes.CDLL, alone: c_void_p
) -> None:
    own, near, far = new_stream(cuda), c_void_p(), c_void_p()
    assert nccl.ncclMemAlloc(byref(near), c_size_t(8)) == 0
    enter(cuda, 0)
    others = new_stream(cuda)
    assert nccl.ncclMemAlloc(byref(far), c_size_t(8)) == 0
    for stream, address, expected in (
        (own, near, 0),
        (others, near, UNHANDLED_CUDA_ERROR),
        (own, far, INVALID_ARGUMENT),
    ):
        assert reduce_on(nccl, alone, stream, address.value or 0) == expected
    handle = c_void_p()
    assert nccl.ncclCommRegister(alone, far, c_size_t(8), byref(handle)) == INVALID_ARGUMENT
    assert nccl.ncclMemFree(near) == nccl.ncclMemFree(far) == nccl.ncclCommAbort(alone) == 0


def test_memory_is_freed_by_a_thread_with_a_context(nccl: ctypes.CDLL, cuda: ctypes.CDLL) -> None:
    address = c_void_p()
    cuda.cuCtxSetCurrent(None)
    assert nccl.ncclMemAlloc(byref(address), c_size_t(8)) == 0
    assert nccl.ncclMemFree(address) == UNHANDLED_CUDA_ERROR
    enter(cuda, 1)
    assert nccl.ncclMemFree(address) == 0


# Order


def test_messages_are_ordered_after_what_other_streams_do_with_their_memory(
    nccl: ctypes.CDLL, cuda: ctypes.CDLL, alone: c_void_p
) -> None:
    inp, out, other = torch.ones(3), torch.zeros(3), new_stream(cuda)
    addresses = c_void_p(inp.data_ptr()), c_void_p(out.data_ptr())
    races_of(cuda)
    for address, is_write in zip(addresses, (1, 0), strict=True):
        cuda.stand_in_touch(other, b"kernel", address, c_size_t(12), is_write)
    stream = new_stream(cuda)
    assert nccl.ncclGroupStart() == 0
    assert nccl.ncclSend(addresses[0], c_size_t(3), FLOAT32, 0, alone, stream) == 0
    assert nccl.ncclRecv(addresses[1], c_size_t(3), FLOAT32, 0, alone, stream) == 0
    assert nccl.ncclGroupEnd() == 0
    sent, received = races_of(cuda)
    assert "ncclSend" in sent and "reads them" in sent
    assert "ncclRecv" in received and "writes them" in received
    assert nccl.ncclCommDestroy(alone) == 0


# Ends


def begun(call: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    """A thread that makes the call, and must still be inside, and where its result will be."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(call()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread, codes


def ended(call: tuple[threading.Thread, list[int]]) -> int:
    thread, codes = call
    thread.join(10)
    return codes[0]


@pytest.mark.parametrize("name", ["ncclCommFinalize", "ncclCommDestroy"])
def test_an_end_in_good_order_waits_for_what_was_launched(
    nccl: ctypes.CDLL, cuda: ctypes.CDLL, alone: c_void_p, name: str
) -> None:
    assert all_reduce(nccl, alone, torch.ones(3)) == 0
    cuda.stand_in_hold_events(1)
    ending = begun(lambda: getattr(nccl, name)(alone))
    cuda.stand_in_hold_events(0)
    assert ended(ending) == 0
    assert name == "ncclCommDestroy" or nccl.ncclCommDestroy(alone) == 0


def test_an_abort_ends_a_finalize_that_waits(
    nccl: ctypes.CDLL, cuda: ctypes.CDLL, alone: c_void_p
) -> None:
    assert all_reduce(nccl, alone, torch.ones(3)) == 0
    cuda.stand_in_hold_events(1)
    finalizing = begun(lambda: nccl.ncclCommFinalize(alone))
    assert nccl.ncclCommRevoke(alone, 0) == INVALID_ARGUMENT
    assert nccl.ncclCommAbort(alone) == 0
    assert ended(finalizing) == INTERNAL_ERROR


def capture(nccl: ctypes.CDLL, cuda: ctypes.CDLL, handle: c_void_p) -> None:
    assert cuda.stand_in_capture(BEGIN_CAPTURE) == 0
    assert all_reduce(nccl, handle, torch.ones(3)) == 0
    assert cuda.stand_in_capture(END_CAPTURE) == 0


@pytest.mark.parametrize("name", ["ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"])
def test_an_end_waits_for_graphs_that_have_captured_collectives(
    nccl: ctypes.CDLL, cuda: ctypes.CDLL, alone: c_void_p, name: str
) -> None:
    n_before = nccl.stand_in_freed_under_graphs()
    capture(nccl, cuda, alone)
    ending = begun(lambda: getattr(nccl, name)(alone))
    cuda.stand_in_destroy_graphs()
    assert ended(ending) == 0
    assert name != "ncclCommFinalize" or nccl.ncclCommDestroy(alone) == 0
    assert nccl.stand_in_freed_under_graphs() == n_before


@pytest.mark.parametrize("name", ["ncclCommDestroy", "ncclCommAbort"])
def test_a_revoked_communicator_is_freed_under_the_graphs_that_are_alive(
    nccl: ctypes.CDLL, cuda: ctypes.CDLL, alone: c_void_p, name: str
) -> None:
    n_before = nccl.stand_in_freed_under_graphs()
    capture(nccl, cuda, alone)
    assert nccl.ncclCommRevoke(alone, 0) == 0
    assert getattr(nccl, name)(alone) == 0
    assert nccl.stand_in_freed_under_graphs() == n_before + 1


# Null calls
