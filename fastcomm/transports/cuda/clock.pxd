from libc.stdint cimport int64_t

from fastcomm.transports.cuda.driver cimport Device, Event


cdef class DeviceClock:
    cdef Device device
    cdef Event base  # reached at base_ns
    cdef int64_t base_ns
    cdef Span span(self)
    cdef int64_t time_of(self, Event event) except -1


cdef class Span:
    cdef DeviceClock clock
    cdef Event gathered, began, ended
    cdef object known  # the times, once they are
    cdef times(self)
