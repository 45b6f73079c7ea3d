"""Where one gradient lies in its flat buffer, for the buckets of shm and nccl; and torch's
description of any tensor, in C.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

# As in dlpack.h, version 1.

ctypedef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

ctypedef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides  # in elements
    uint64_t byte_offset


cdef bint is_without_memory(tensor, const void *address) except -1
cdef bint is_described(tensor, DLTensor *found) noexcept


cdef class GradientSlot:
    cdef char *address
    cdef object dtype
    cdef bint is_complex
    cdef tuple shape, strides
    # of the view, on shape_and_strides; ndim is -1 where torch was asked in Python
    cdef DLTensor geometry
    cdef int64_t *shape_and_strides

    cdef bint fits(self, gradient, char **address) except -1
    cdef bint still_holds(self, view) except -1
    cpdef bint holds(self, tensor) except -1
    cdef bint _describes(self, tensor, DLTensor *found) except -1
