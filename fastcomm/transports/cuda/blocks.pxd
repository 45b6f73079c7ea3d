from libc.stdint cimport uint32_t, uint64_t

from fastcomm.transports.cuda.driver cimport CUstream, Device
from fastcomm.transports.cuda.multi_tensor cimport Kernel


cdef extern from "cuda/blocks.h" nogil:
    int BLOCK_NUMEL

    struct coded_block:
        pass


cdef enum Action:
    ENCODE, ADD, DECODE


cdef class BlockKernels:
    cdef readonly Device device
    cdef Kernel[3] kernels  # by Action
    cdef int encode_on(self, CUstream stream, const float *values, coded_block *blocks,
                       uint32_t n_blocks, uint64_t numel, const uint32_t *covered) except -1 nogil
    cdef int add_on(self, CUstream stream, float *values, const coded_block *blocks,
                    uint32_t n_blocks, uint64_t numel, const uint32_t *covered, int n_rows, int own,
                    int op) except -1 nogil
    cdef int decode_on(self, CUstream stream, float *values, const coded_block *blocks,
                       uint32_t n_blocks, uint64_t numel) except -1 nogil
    cdef int _launch(self, Action which, CUstream stream, uint32_t n_blocks,
                     void **parameters) except -1 nogil
