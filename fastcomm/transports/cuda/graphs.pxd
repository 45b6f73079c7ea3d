from libc.stdint cimport uint64_t

from fastcomm.transports.cuda.driver cimport CUstream, Device


cdef class CapturedGraphs:
    cdef Device device
    cdef int *n_alive  # outlives this object, as the graphs may
    cdef uint64_t newest
    cdef bint note_capture(self, CUstream current) except -1
    cdef int count(self) noexcept
