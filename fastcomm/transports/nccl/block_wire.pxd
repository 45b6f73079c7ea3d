from libc.stdint cimport uint32_t

from fastcomm.transports.cuda.blocks cimport BlockKernels, coded_block
from fastcomm.transports.cuda.driver cimport CUstream
from fastcomm.transports.nccl.calls cimport NcclCall
from fastcomm.transports.nccl.library cimport ncclComm_t
from fastcomm.transports.nccl.link cimport Link


cdef class BlockWire:
    cdef BlockKernels kernels
    cdef object memory
    cdef int rank, world_size
    cdef float *values
    cdef size_t numel
    cdef uint32_t *covered
    cdef uint32_t n_blocks  # of a row
    cdef coded_block *coded  # a row for each rank, here and in `received`
    cdef coded_block *received
    cdef NcclCall *calls
    cdef size_t n_calls  # of the first group; two more are the second

    cdef int _fill_in_calls(self, size_t n_used) except -1
    cdef int reduce_on(
        self, CUstream stream, ncclComm_t comm, int op, const char **failed
    ) except -1 nogil
