"""kernels/shm/announcement.h says what the C of this means."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

from fastcomm.postmortem.flight_recorder cimport Entry, FlightRecorder


cdef extern from "shm/announcement.h" nogil:
    enum:
        SHM_SUM
        CALL_BARRIER, CALL_ALL_REDUCE, CALL_BROADCAST, CALL_ALL_GATHER, CALL_REDUCE_SCATTER
        CALL_GATHER, CALL_SCATTER, CALL_ALL_TO_ALL, CALL_REDUCE_SCATTER_V, CALL_ALL_GATHER_V
        CALL_ABANDON
        HAS_DATA, HAS_NO_DATA, VOTES_TO_SKIP
        PRIVATE_MEMORY, IN_ARENA
        ALL_AGREE, THEY_DIFFER, ONE_ABANDONS

    struct announcement:
        uint8_t kind, op, dtype, wire
        uint16_t root
        uint8_t presence, place
        uint32_t label
        uint64_t numel, fingerprint, offset
        double weight, scale

    struct verdict:
        int outcome
        const announcement *wanted
        bint lacks_data, is_skipped, has_factors

    bint is_collective(const announcement *a, int world_size)
    bint is_same_call(const announcement *a, const announcement *b, bint compares_op)
    verdict decide(
        const announcement *const *all, int world_size, bint are_possible, double *factors
    )


cdef inline announcement announced(int kind, int op) noexcept:  # of no tensor yet
    cdef announcement a
    memset(&a, 0, sizeof(announcement))
    a.kind, a.op = kind, op
    return a


cdef str kind_of(const announcement *a)
cdef int bucket_op_code(str op) except -1  # also of those with weights
cdef object called_by(const announcement *a)  # a words.Called, for messages
cdef Entry noted(FlightRecorder flight, const announcement *a, uint64_t number)


cdef class Call:
    cdef announcement it
    cdef readonly str kind, op
    cdef readonly object dtype, wire, numel, root, label, fingerprint

    cdef int _decode(self) except -1


cdef Call call_of(const announcement *a)
cdef int dtype_code(dtype) except -1
cdef size_t itemsize_of(const announcement *a) except 0
