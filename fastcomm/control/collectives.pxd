from libc.stdint cimport uint64_t

from fastcomm.control.announcement cimport announcement


cdef extern from "shm/core.h" nogil:
    struct shm_piece:
        void *source
        uint64_t offset, numel


# What a caller asks for. d: what the ranks compare. input, output: where this rank's tensors lie.
cdef struct Collective:
    announcement d
    char *input
    char *output
    shm_piece *pieces  # of many tensors that are reduced as one


cdef class Collectives:
    cdef readonly int rank, world_size, local_rank
    cdef readonly object device, timeout
    cdef public tuple processes
    cdef public object membership, open_join, flight, standing  # see Transport
    cdef object __weakref__

    cdef int _check_usable(self) except -1
    cdef int _check_dtype(self, dtype) except -1
    cdef object _taken(self, tensor, announcement *d, char **data)
    cdef object _run(self, Collective *it, inp, out, bint async_op)
    cdef object _run_together(self, Collective *it, list tensors, bint async_op)
    cdef object _run_parts(self, Collective *it, inp, out, parts, bint async_op)

    cdef object _viewed(self, tensor, op)
    cdef object _taken_out(self, tensor, Collective *it)
