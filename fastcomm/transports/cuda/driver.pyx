# cython: language_level=3
"""The few CUDA driver calls that the hot path makes: launch, event record, stream wait, event
query.

Whatever enqueues may wait for room in the device's queue, for as long as NCCL's kernels wait for a
peer that has died, and holds a lock meanwhile for which every other call may wait. So all are made
without the GIL, which the watchdog needs to end those kernels.

The driver is opened at run time, so the same build works on machines with and without CUDA. Owns
streams and events, and counts graphs; knows neither tensors nor NCCL.
"""

import contextlib
import os

import torch

from fastcomm.errors import FastcommError, InitError

from libc.stdlib cimport calloc
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym
from posix.unistd cimport getpid


cdef void *library = NULL


def load():
    """Opens the driver: FASTCOMM_CUDA_LIBRARY if that is set, else libcuda.so.1. Returns its
    version, 13000 for 13.0.

    Raises InitError if there is no driver, if it is so old that it lacks a call, or if it does not
    start.
    """
    global library
    cdef int version = 0, code
    if library == NULL:
        path = os.environ.get("FASTCOMM_CUDA_LIBRARY", "libcuda.so.1")
        handle = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
        if handle == NULL:
            raise InitError(f"there is no CUDA driver on this machine ({dlerror().decode()}); "
                            "fastcomm.init('shm') reduces on the CPU")
        _find_symbols(handle)
        with nogil:
            code = driver.init(0)
        if code != CUDA_SUCCESS:
            raise InitError(f"the CUDA driver does not start: cuInit: {describe(code)}")
        library = handle
    with nogil:
        check(driver.version(&version), b"cuDriverGetVersion")
    return version


cdef int _find_symbols(void *handle) except -1:
    _find(<void **>&driver.init, handle, b"cuInit")
    _find(<void **>&driver.version, handle, b"cuDriverGetVersion")
    _find(<void **>&driver.error_name, handle, b"cuGetErrorName")
    _find(<void **>&driver.error_string, handle, b"cuGetErrorString")
    _find(<void **>&driver.device_count, handle, b"cuDeviceGetCount")
    _find(<void **>&driver.device_get, handle, b"cuDeviceGet")
    _find(<void **>&driver.device_attribute, handle, b"cuDeviceGetAttribute")
    _find(<void **>&driver.retain_primary_context, handle, b"cuDevicePrimaryCtxRetain")
    _find(<void **>&driver.get_context, handle, b"cuCtxGetCurrent")
    _find(<void **>&driver.set_context, handle, b"cuCtxSetCurrent")
    _find(<void **>&driver.synchronize, handle, b"cuCtxSynchronize")
    _find(<void **>&driver.load_module, handle, b"cuModuleLoadData")
    _find(<void **>&driver.get_function, handle, b"cuModuleGetFunction")
    _find(<void **>&driver.launch, handle, b"cuLaunchKernel")
    _find(<void **>&driver.resident_blocks, handle, b"cuOccupancyMaxActiveBlocksPerMultiprocessor")
    _find(<void **>&driver.priority_range, handle, b"cuCtxGetStreamPriorityRange")
    _find(<void **>&driver.create_stream, handle, b"cuStreamCreateWithPriority")
    _find(<void **>&driver.destroy_stream, handle, b"cuStreamDestroy_v2")
    _find(<void **>&driver.synchronize_stream, handle, b"cuStreamSynchronize")
    _find(<void **>&driver.wait_event, handle, b"cuStreamWaitEvent")
    _find(<void **>&driver.capture_info, handle, b"cuStreamGetCaptureInfo_v2")
    _find(<void **>&driver.exchange_capture_mode, handle, b"cuThreadExchangeStreamCaptureMode")
    _find(<void **>&driver.create_event, handle, b"cuEventCreate")
    _find(<void **>&driver.record_event, handle, b"cuEventRecord")
    _find(<void **>&driver.query_event, handle, b"cuEventQuery")
    _find(<void **>&driver.destroy_event, handle, b"cuEventDestroy_v2")
    _find(<void **>&driver.create_user_object, handle, b"cuUserObjectCreate")
    _find(<void **>&driver.retain_user_object, handle, b"cuGraphRetainUserObject")
    _find(<void **>&driver.elapsed_time, handle, b"cuEventElapsedTime")
    return 0


cdef int _find(void **symbol, void *handle, const char *name) except -1:
    symbol[0] = dlsym(handle, name)
    if symbol[0] == NULL:
        raise InitError(f"the CUDA driver is too old: it has no {name.decode()}; CUDA 11.4 "
                        "(driver 470) is the oldest that will do")
    return 0


cdef str describe(int code):
    """A status code in words."""
    cdef const char *name = NULL
    cdef const char *text = NULL
    with nogil:
        driver.error_name(code, &name)
        driver.error_string(code, &text)
    if name == NULL or text == NULL:
        return f"error {code}"
    return f"{name.decode()} ({text.decode()})"


cdef int check(int code, const char *call) except -1 nogil:
    if code == CUDA_SUCCESS:
        return 0
    with gil:
        raise FastcommError(f"{call.decode()} failed: {describe(code)}")


cdef int order_streams(CUstream stream, CUevent event, CUstream other) except -1 nogil:
    check(driver.record_event(event, other), b"cuEventRecord")
    return check(driver.wait_event(stream, event, 0), b"cuStreamWaitEvent")


cdef void _destroy(
    int (*destroy)(void *) noexcept nogil, void *handle, CUcontext context
) noexcept nogil:
    """Destroys an event or a stream. The driver wants some context for it, and garbage is collected
    on any thread.
    """
    cdef CUcontext before = NULL
    driver.get_context(&before)
    if before == NULL:
        driver.set_context(context)
    destroy(handle)
    if before == NULL:
        driver.set_context(NULL)


cdef class Event:
    """A CUDA event of a device, without timing unless flags are 0. Belongs to the process that made
    it.
    """

    def __cinit__(self, Device device, unsigned int flags=CU_EVENT_DISABLE_TIMING):
        cdef CUcontext before
        cdef int code
        self.pid, self.context = getpid(), device.context
        with nogil:
            before = device.enter()
            code = driver.create_event(&self.handle, flags)
            device.leave(before)
            check(code, b"cuEventCreate")

    def __dealloc__(self):
        if self.handle != NULL and self.pid == getpid():
            with nogil:
                _destroy(driver.destroy_event, self.handle, self.context)

    cdef bint is_over(self) except -1:
        """Whether all work before its newest record is done."""
        cdef int code
        with nogil:
            code = driver.query_event(self.handle)
        if code != CUDA_ERROR_NOT_READY:
            check(code, b"cuEventQuery")
        return code == CUDA_SUCCESS


cdef class Stream:
    """A CUDA stream of the highest priority, which does not wait for the legacy default stream.
    Belongs to the process that made it.
    """

    def __cinit__(self, Device device):
        cdef int least = 0, greatest = 0
        self.pid, self.context = getpid(), device.context
        with device.selected():
            with nogil:
                check(driver.priority_range(&least, &greatest), b"cuCtxGetStreamPriorityRange")
                check(driver.create_stream(&self.handle, CU_STREAM_NON_BLOCKING, greatest),
                      b"cuStreamCreateWithPriority")

    def __dealloc__(self):
        if self.handle != NULL and self.pid == getpid():
            with nogil:
                _destroy(driver.destroy_stream, self.handle, self.context)


cdef class Device:
    """A CUDA device and its primary context, which torch and NCCL use as well.

    device: a torch.device. Type "cpu" means host memory in place of device memory, and one stream,
    for the tests' stand-in for the driver. Raises InitError if there is no such device.
    """

    def __cinit__(self, device):
        cdef int count = 0, number = 0, code
        load()
        if device.type != "cuda" and "FASTCOMM_CUDA_LIBRARY" not in os.environ:
            raise InitError(f"NCCL reduces on CUDA devices, not on {device}")
        self.device = device
        self.index = device.index or 0
        with nogil:
            code = driver.device_count(&count)
        if code != CUDA_SUCCESS or not 0 <= self.index < count:
            raise InitError(f"there is no CUDA device {self.index}: the driver knows {count} (is "
                            "CUDA_VISIBLE_DEVICES set?)")
        with nogil:
            check(driver.device_get(&number, self.index), b"cuDeviceGet")
            check(driver.device_attribute(&self.n_multiprocessors,
                                          CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, number),
                  b"cuDeviceGetAttribute")
            check(driver.retain_primary_context(&self.context, number),
                  b"cuDevicePrimaryCtxRetain")
        self.raw_stream = torch._C._cuda_getCurrentRawStream if device.type == "cuda" else None
        self.record_stream = _record_current_stream if device.type == "cuda" else None

    cdef CUstream current_stream(self) except? NULL:
        """The stream that torch launches this thread's work on."""
        return NULL if self.raw_stream is None else <CUstream><size_t>self.raw_stream(self.index)

    cdef CUstream order_current_after(self, Event event) except? NULL:
        """Makes the current stream wait for the event. Returns that stream."""
        cdef CUstream current = self.current_stream()
        with nogil:
            self.order_after(current, event)
        return current

    cdef int order_after(self, CUstream stream, Event event) except -1 nogil:
        """Makes the stream wait for the event."""
        cdef CUcontext before = self.enter()
        cdef int code = driver.wait_event(stream, event.handle, 0)
        self.leave(before)
        return check(code, b"cuStreamWaitEvent")

    cdef int record(self, Event event, CUstream stream) except -1 nogil:
        """Makes the event come after what the stream has been given so far."""
        cdef CUcontext before = self.enter()
        cdef int code = driver.record_event(event.handle, stream)
        self.leave(before)
        return check(code, b"cuEventRecord")

    cdef CUcontext enter(self) except? NULL nogil:
        """Makes this device's context the thread's. Returns the one it had, for `leave`."""
        cdef CUcontext before = NULL
        check(driver.get_context(&before), b"cuCtxGetCurrent")
        if before != self.context:
            check(driver.set_context(self.context), b"cuCtxSetCurrent")
        return before

    cdef void leave(self, CUcontext before) noexcept nogil:
        """Gives the thread back the context that it had, or none: what else it does must not move
        to this device.
        """
        if before != self.context:
            driver.set_context(before)

    @contextlib.contextmanager
    def selected(self):
        """Makes this device's context the thread's within the block. Not for the hot path."""
        cdef CUcontext before
        with nogil:
            before = self.enter()
        try:
            yield
        finally:
            with nogil:
                self.leave(before)

    def synchronize(self):
        """Blocks until all that was launched on the device is done."""
        with self.selected():
            with nogil:
                check(driver.synchronize(), b"cuCtxSynchronize")


def _record_current_stream(tensor):
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


cdef class Producers:
    """The streams on which tensors were produced that the current stream will read."""

    def __cinit__(self, Device device):
        self.device, self.streams, self.side = device, set(), Event(device)

    cpdef note(self):
        """Notes that one has been produced on the current stream."""
        self.streams.add(<size_t>self.device.current_stream())

    cpdef clear(self):
        """All have been read."""
        self.streams.clear()

    cdef bint are_others(self, CUstream current) except -1:
        """Whether there are any but the current one."""
        for stream in self.streams:
            if <size_t>stream != <size_t>current:
                return True
        return False

    cdef int order_before(self, CUstream current) except -1:
        cdef CUstream other
        for stream in self.streams:
            other = <CUstream><size_t>stream
            if other != current:
                with nogil:
                    self.device.record(self.side, other)
                    self.device.order_after(current, self.side)
        return 0

    def order_before_current(self):
        """Orders the current stream after them."""
        self.order_before(self.device.current_stream())

    cpdef keep(self, tensor):
        """Called when the current stream has been made to read a tensor that is then dropped. Its
        memory may belong to another stream, which must not use it too early.
        """
        if self.device.record_stream is not None:
            if self.are_others(self.device.current_stream()):
                self.device.record_stream(tensor)


cdef class CapturedGraphs:
    """Counts the living CUDA graphs that have captured collectives of one communicator. Keeps none
    of them alive; the driver says when one is gone.
    """

    def __cinit__(self, Device device):
        self.device = device
        self.n_alive = <int *>calloc(1, sizeof(int))
        if self.n_alive == NULL:
            raise MemoryError("out of memory")

    cdef int count(self) noexcept:
        """How many are alive."""
        return self.n_alive[0]

    cdef bint note_capture(self, CUstream current) except -1:
        """Returns whether the stream is being captured into a CUDA graph. Counts the graph until it
        and everything made from it are gone.
        """
        cdef CUcontext before
        cdef CUgraph graph = NULL
        cdef CUuserObject counted = NULL
        cdef unsigned long long identifier = 0
        cdef int status = 0, code
        if current == NULL:  # the legacy default stream, which cannot be captured
            return False
        with nogil:  # the stream may be locked by a launch that waits for room
            before = self.device.enter()  # a default stream is the current device's
            code = driver.capture_info(current, &status, &identifier, &graph, NULL, NULL)
            self.device.leave(before)
            check(code, b"cuStreamGetCaptureInfo")
            if status == CU_STREAM_CAPTURE_STATUS_ACTIVE and identifier != self.newest:
                check(driver.create_user_object(&counted, self.n_alive, fastcomm_count_down, 1,
                                                CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                      b"cuUserObjectCreate")
                check(driver.retain_user_object(graph, counted, 1, CU_GRAPH_USER_OBJECT_MOVE),
                      b"cuGraphRetainUserObject")
                fastcomm_count_up(self.n_alive)
                self.newest = identifier
        return status == CU_STREAM_CAPTURE_STATUS_ACTIVE


cdef extern from *:
    """
    static void fastcomm_count_up(void *counter) {
        __atomic_add_fetch((int *)counter, 1, __ATOMIC_RELAXED);
    }
    static void fastcomm_count_down(void *counter) {
        __atomic_sub_fetch((int *)counter, 1, __ATOMIC_RELAXED);
    }
    """
    void fastcomm_count_up(void *counter) noexcept nogil
    void fastcomm_count_down(void *counter) noexcept nogil  # by the driver, on a thread of its own
