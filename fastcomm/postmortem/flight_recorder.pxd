from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef class Entry:
    cdef public uint64_t number
    cdef readonly uint64_t epoch, numel, fingerprint
    cdef readonly uint32_t label
    cdef readonly int root
    cdef public int lane
    cdef readonly str kind, op
    cdef readonly object dtype
    cdef readonly int64_t posted_ns
    cdef readonly int64_t started_ns, ended_ns  # 0: not yet, as far as is known
    cdef readonly str error

    cpdef void start(self) noexcept
    cpdef void end(self, error=*) noexcept


cdef class FlightRecorder:
    cdef readonly str backend
    cdef readonly int rank
    cdef readonly tuple pids
    cdef public uint64_t epoch
    cdef readonly int owner
    cdef public tuple channel
    cdef readonly dict names
    cdef readonly object activities
    cdef list kept
    cdef Py_ssize_t n_noted
    cdef object __weakref__

    cpdef Entry note(
        self, str kind, dtype, uint64_t numel, uint64_t number=*, str op=*, int root=*,
        uint32_t label=*, uint64_t fingerprint=*,
    )
