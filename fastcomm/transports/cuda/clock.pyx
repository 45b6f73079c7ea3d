# cython: language_level=3
"""Times of a device. DeviceClock: when events were reached, on the host's clock, for timelines. It
owns the event that both clocks are compared by, and waits for the device when it is made. Mark:
where the current stream is, on the device's clock alone.
"""

import operator
import time

from libc.stdint cimport int64_t

from fastcomm.transports.cuda.driver cimport (
    CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_NOT_READY, CUcontext, CUstream, Device, Event,
    check, driver,
)


# After so long another event is the base: the driver tells times as float32.
cdef float REBASE_MS = 1000
N_COMPARISONS = 3


cdef tuple _compared(Device device, CUstream idle):
    """How long it took the host to hear of an event, in ns, when it did, and the event."""
    cdef Event event = Event(device, 0)
    begin = time.monotonic_ns()
    with nogil:
        device.record(event, idle)
    _wait_for(device, idle)
    heard = time.monotonic_ns()
    return heard - begin, heard, event


cdef _wait_for(Device device, CUstream stream):
    with device.selected():
        with nogil:
            check(driver.synchronize_stream(stream), b"cuStreamSynchronize")


cdef int _elapsed(
    Device device, Event begin, Event end, float *elapsed_ms
) except -1 nogil:
    """The driver's result. A capture on this thread does not mind the question."""
    cdef int mode = CU_STREAM_CAPTURE_MODE_RELAXED
    cdef CUcontext before = device.enter()
    driver.exchange_capture_mode(&mode)
    cdef int code = driver.elapsed_time(elapsed_ms, begin.handle, end.handle)
    driver.exchange_capture_mode(&mode)
    device.leave(before)
    return code


cdef class DeviceClock:
    """Times of a device in ns of time.monotonic_ns(), to some 20 µs."""

    def __cinit__(self, Device device):
        self.device = device
        cdef CUstream current = device.current_stream()
        _wait_for(device, current)
        # The quickest: an interruption between the event and the host's time would set the clocks
        # apart for good.
        comparisons = [_compared(device, current) for _ in range(N_COMPARISONS)]
        _, self.base_ns, self.base = min(comparisons, key=operator.itemgetter(0))

    cdef Span span(self):
        """Events of one bucket's way, to be recorded."""
        cdef Span span = Span.__new__(Span)
        span.clock = self
        span.gathered, span.began, span.ended = [Event(self.device, 0) for _ in range(3)]
        return span

    cdef int64_t time_of(self, Event event) except -1:
        """When the event was reached; 0 if it was not yet."""
        cdef float elapsed_ms = 0
        cdef int code
        with nogil:
            code = _elapsed(self.device, self.base, event, &elapsed_ms)
        if code == CUDA_ERROR_NOT_READY:
            return 0
        check(code, b"cuEventElapsedTime")
        cdef int64_t reached = self.base_ns + <int64_t>(elapsed_ms * 1e6)
        if elapsed_ms > REBASE_MS:
            self.base, self.base_ns = event, reached
        return reached


cdef class Span:
    """When a bucket's gradients were gathered, and its reduction began and ended."""

    cdef times(self):
        if self.known is None and self.clock.time_of(self.ended):
            self.known = (
                self.clock.time_of(self.gathered), self.clock.time_of(self.began),
                self.clock.time_of(self.ended),
            )
            self.gathered = self.began = self.ended = None
        return self.known


cdef class Mark:
    """Where the device's current stream is when this is made."""

    cdef Device device
    cdef Event event

    def __cinit__(self, Device device not None):
        self.device, self.event = device, Event(device, 0)
        cdef CUstream current = device.current_stream()
        with nogil:
            device.record(self.event, current)

    def ns_since(self, Mark earlier not None):
        """How long the device took from that mark to this one, in ns; None if that is not known:
        they are not reached, or lie in a CUDA graph.
        """
        cdef float elapsed_ms = 0
        cdef int code
        with nogil:
            code = _elapsed(self.device, earlier.event, self.event, &elapsed_ms)
        return None if code else int(elapsed_ms * 1e6)
