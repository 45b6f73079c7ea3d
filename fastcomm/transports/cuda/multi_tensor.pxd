from libc.stdint cimport uint16_t, uint32_t, uint64_t

from fastcomm.transports.cuda.driver cimport CUfunction, CUstream, Device


cdef extern from "cuda/multi_tensor.h" nogil:
    int MT_TILE, MT_SMALL, MT_LARGE, MT_WARPS

    struct mt_tile:
        uint64_t offset
        uint32_t start
        uint16_t tensor, numel

    struct mt_stats:
        double square_sum
        uint64_t n_nonfinite


cdef enum Pass:
    FLATTEN, UNFLATTEN, NORM


cdef struct Kernel:
    CUfunction function
    unsigned int n_blocks

cdef Kernel kernel_for(Device device, size_t n_tiles, str name) except *

# One launch's worth of tensors.
cdef struct Part:
    const void *tiles
    uint32_t n_tiles
    size_t first  # index of its first tensor
    void *stats
    void *ticket
    Kernel[3] kernels  # by Pass


cdef class MultiTensor:
    cdef readonly Device device
    cdef readonly object dtype, flat_dtype
    cdef readonly list numels, offsets
    cdef readonly list tables  # of tiles, by part, on the device
    # float64 [parts, 1 + blocks, 2]: as struct mt_stats; the first row of each part is the result
    cdef object stats
    cdef object tickets
    cdef Part *parts
    cdef size_t n_parts
    cdef void **addresses  # by tensor, with room to the end of the last part's parameter
    cdef int flatten_on(self, CUstream stream, void *flat, double scale,
                        const void *divisor) except -1 nogil
    cdef int unflatten_on(self, CUstream stream, const void *flat, double scale,
                          bint with_stats) except -1 nogil
    cdef int norm_on(self, CUstream stream) except -1 nogil
    cdef int _launch(self, Pass which, CUstream stream, const void **flat, double *scale,
                     const void **divisor, bint with_stats) except -1 nogil
