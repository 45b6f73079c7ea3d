"""Devices and contexts of the stand-in for the CUDA driver: whose a handle is, and which threads
may use it. Through ctypes, as in test_cuda_stand_in.py.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest

from tests.fakes.stand_ins import races_of, stand_ins

INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE = 101, 201, 400


def load(folder: object, devices: str) -> ctypes.CDLL:
    """The driver with these devices, which it reads when it is loaded: so a copy of its own."""
    path = shutil.copy(stand_ins().cuda, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTCOMM_STAND_IN_DEVICES", devices)
        driver = ctypes.CDLL(path)
    assert driver.cuInit(0) == 0
    return driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "kernel.c"
    source.write_text("void nothing(unsigned blocks, unsigned threads, void **parameters) {}")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", source.with_suffix(".so")], check=True)
    os.environ["FASTCOMM_STAND_IN_KERNELS"] = str(source.with_suffix(".so"))
    yield load(folder, "0,1")
    del os.environ["FASTCOMM_STAND_IN_KERNELS"]


class Context:
    """A device's primary context, and what belongs to it."""

    def __init__(self, cuda: ctypes.CDLL, device: int) -> None:
        self._cuda, self._handle, module = cuda, c_void_p(), c_void_p()
        self.stream, self.event, self.function = c_void_p(), c_void_p(), c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(byref(self._handle), device) == 0
        self.enter()
        assert cuda.cuStreamCreateWithPriority(byref(self.stream), 1, 0) == 0
        assert cuda.cuEventCreate(byref(self.event), 2) == 0
        assert cuda.cuModuleLoadData(byref(module), b"image") == 0
        assert cuda.cuModuleGetFunction(byref(self.function), module, b"nothing") == 0

    def enter(self) -> None:
        assert self._cuda.cuCtxSetCurrent(self._handle) == 0

    def touches(self) -> None:
        """Its stream writes to some memory that all contexts share."""
        stream = c_size_t(self.stream.value or 0)
        self._cuda.stand_in_touch(stream, b"writer", c_void_p(1000), c_size_t(100), c_int(1))


@pytest.fixture
def cuda(driver: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    races_of(driver)
    yield driver
    driver.cuCtxSetCurrent(None)
    races_of(driver)


@pytest.fixture
def second(cuda: ctypes.CDLL) -> Context:
    return Context(cuda, 1)


@pytest.fixture
def first(cuda: ctypes.CDLL, second: Context) -> Context:
    """It is current when the test begins."""
    return Context(cuda, 0)


def device_of_thread(cuda: ctypes.CDLL) -> tuple[int, int]:
    device = c_int(-1)
    return cuda.cuCtxGetDevice(byref(device)), device.value


def in_thread(call: Callable[[], object]) -> object:
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def launch(cuda: ctypes.CDLL, function: c_void_p, stream: c_void_p | None) -> int:
    return cuda.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, None, None)


def test_each_thread_has_the_context_it_has_set(
    cuda: ctypes.CDLL, first: Context, second: Context
) -> None:
    def look() -> list[tuple[int, int]]:
        before = device_of_thread(cuda)
        second.enter()
        return [before, device_of_thread(cuda)]

    assert in_thread(look) == [(INVALID_CONTEXT, -1), (0, 1)]
    assert device_of_thread(cuda) == (0, 0)


def test_what_is_no_context_cannot_be_set(cuda: ctypes.CDLL, first: Context) -> None:
    assert cuda.cuCtxSetCurrent(c_void_p(8)) == INVALID_CONTEXT
    assert device_of_thread(cuda) == (0, 0)


def test_an_event_is_recorded_in_streams_of_its_own_context_alone(
    cuda: ctypes.CDLL, first: Context, second: Context
) -> None:
    assert cuda.cuEventRecord(second.event, first.stream) == INVALID_HANDLE
    assert cuda.cuEventRecord(first.event, second.stream) == INVALID_HANDLE
    assert cuda.cuEventRecord(second.event, second.stream) == 0


def test_a_function_is_launched_in_its_own_context_alone(
    cuda: ctypes.CDLL, first: Context, second: Context
) -> None:
    assert launch(cuda, first.function, first.stream) == 0
    assert launch(cuda, second.function, second.stream) == INVALID_HANDLE
    assert launch(cuda, second.function, first.stream) == INVALID_HANDLE
    assert launch(cuda, first.function, second.stream) == INVALID_HANDLE


def test_default_streams_are_those_of_the_current_context(
    cuda: ctypes.CDLL, first: Context, second: Context
) -> None:
    assert cuda.cuEventRecord(first.event, None) == 0
    assert cuda.cuEventRecord(second.event, None) == INVALID_HANDLE
    second.enter()
    assert cuda.cuEventRecord(second.event, None) == 0


def test_a_context_is_synchronised_without_the_others(
    cuda: ctypes.CDLL, first: Context, second: Context
) -> None:
    second.touches()
    assert cuda.cuCtxSynchronize() == 0
    first.touches()
    assert len(races_of(cuda)) == 1
    second.touches()
    second.enter()
    assert cuda.cuCtxSynchronize() == 0
    first.touches()
    assert races_of(cuda) == []


CALLS: dict[str, Callable[[ctypes.CDLL, Context], int]] = {
    "cuStreamCreate": lambda cuda, own: cuda.cuStreamCreateWithPriority(byref(c_void_p()), 1, 0),
    "cuStreamSynchronize": lambda cuda, own: cuda.cuStreamSynchronize(own.stream),
    "cuStreamWaitEvent": lambda cuda, own: cuda.cuStreamWaitEvent(own.stream, own.event, 0),
    "cuStreamDestroy": lambda cuda, own: cuda.cuStreamDestroy_v2(own.stream),
    "cuEventCreate": lambda cuda, own: cuda.cuEventCreate(byref(c_void_p()), 2),
    "cuEventRecord": lambda cuda, own: cuda.cuEventRecord(own.event, own.stream),
    "cuEventDestroy": lambda cuda, own: cuda.cuEventDestroy_v2(own.event),
    "cuLaunchKernel": lambda cuda, own: launch(cuda, own.function, own.stream),
    "cuModuleLoadData": lambda cuda, own: cuda.cuModuleLoadData(byref(c_void_p()), b"image"),
    "cuMemAlloc": lambda cuda, own: cuda.cuMemAlloc_v2(byref(c_void_p()), c_size_t(8)),
    "cuCtxSynchronize": lambda cuda, own: cuda.cuCtxSynchronize(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_without_a_context_is_refused(
    cuda: ctypes.CDLL, first: Context, name: str
) -> None:
    assert in_thread(lambda: CALLS[name](cuda, first)) == INVALID_CONTEXT
