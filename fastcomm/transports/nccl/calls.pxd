from fastcomm.transports.nccl.library cimport ncclComm_t


cdef enum Kind:
    ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE, SEND, RECV


# One call into NCCL. root: also the rank to send to, or to receive from.
cdef struct NcclCall:
    Kind kind
    void *source
    void *target
    size_t numel
    int dtype, op, root


cdef int call_all(
    const NcclCall *calls, size_t n, ncclComm_t comm, void *stream, const char **failed
) noexcept nogil
cdef size_t sends_and_receives(
    NcclCall *calls, char *source, char *target, list sent, list received, size_t itemsize,
    int dtype
) except? 0
cdef size_t reduce_scatter_v(
    NcclCall *calls, char *flat, size_t itemsize, int dtype, tuple bounds, int rank
) except? 0
cdef size_t all_gather_v(
    NcclCall *calls, char *flat, size_t itemsize, int dtype, tuple bounds, int rank
) except? 0
