# cython: language_level=3
"""BlockCodec: tensors to and from 8 bits with a scale for each block of 256 elements. The
arithmetic is in kernels/wire/blocks.c.
"""

import torch

from libc.stdint cimport uint8_t

from fastcomm.comm.collective import BLOCK_DTYPES

cdef extern from "wire/blocks.h" nogil:
    enum:
        WIRE_BLOCK
    enum wire_format:
        WIRE_INT8, WIRE_FLOAT8
    void wire_encode(wire_format format, size_t n_blocks, const float *values, float *residual,
                     uint8_t *elements, float *scales)
    void wire_decode(wire_format format, size_t n_blocks, const uint8_t *elements,
                     const float *scales, float *values)
    void wire_accumulate(wire_format format, size_t n_blocks, const uint8_t *elements,
                         const float *scales, float *totals)

ctypedef void (*Decoder)(wire_format format, size_t n_blocks, const uint8_t *elements,
                         const float *scales, float *target) noexcept nogil

# Elements that share a scale; all that is encoded is a multiple of it. The scales are 1.6% of the
# bytes.
BLOCK = WIRE_BLOCK
_FORMATS = {torch.int8: WIRE_INT8, torch.float8_e4m3fn: WIRE_FLOAT8}
assert tuple(_FORMATS) == BLOCK_DTYPES


cdef class BlockCodec:
    """dtype: one of BLOCK_DTYPES. The largest magnitude of a block becomes its largest number. A
    block with an infinity or a NaN arrives as NaNs altogether.

    Values, residuals and totals are of float32 and of whole blocks. Coded are their elements, then
    their scales. All are contiguous and on the CPU, or it raises ValueError, and do not overlap.
    """

    cdef wire_format _format

    def __init__(self, dtype):
        self._format = _FORMATS[dtype]

    def nbytes_of(self, Py_ssize_t numel):
        """The bytes of so many elements when they are coded."""
        return numel + numel // WIRE_BLOCK * <Py_ssize_t>sizeof(float)

    def encode(self, values, residual, coded):
        """Encodes values + residual, and leaves what that has dropped in `residual`, or zeros where
        it is not finite. residual: None to encode the values and keep nothing.
        """
        cdef size_t n_blocks = values.numel() // WIRE_BLOCK
        cdef float *source = _floats(values, n_blocks)
        cdef float *kept = NULL if residual is None else _floats(residual, n_blocks)
        cdef uint8_t *elements = _bytes(coded, n_blocks)
        with nogil:
            wire_encode(self._format, n_blocks, source, kept, elements,
                        <float *>(elements + n_blocks * WIRE_BLOCK))

    def decode(self, coded, values):
        """Writes what the bytes stand for into `values`."""
        self._decode(wire_decode, coded, values)

    def accumulate(self, coded, totals):
        """Adds what the bytes stand for to `totals`."""
        self._decode(wire_accumulate, coded, totals)

    cdef int _decode(self, Decoder decoder, coded, tensor) except -1:
        cdef size_t n_blocks = tensor.numel() // WIRE_BLOCK
        cdef float *target = _floats(tensor, n_blocks)
        cdef uint8_t *elements = _bytes(coded, n_blocks)
        with nogil:
            decoder(self._format, n_blocks, elements,
                    <float *>(elements + n_blocks * WIRE_BLOCK), target)
        return 0


cdef inline float *_floats(tensor, size_t n_blocks) except? NULL:
    return <float *><size_t>_address(tensor, torch.float32, n_blocks * WIRE_BLOCK)


cdef inline uint8_t *_bytes(coded, size_t n_blocks) except? NULL:
    cdef size_t nbytes = n_blocks * (WIRE_BLOCK + sizeof(float))
    return <uint8_t *><size_t>_address(coded, torch.uint8, nbytes)


cdef object _address(tensor, dtype, size_t numel):
    is_right = tensor.dtype is dtype and tensor.numel() == numel
    if not (is_right and tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError("the tensors must be contiguous, on the CPU, and of one dtype and numel")
    return tensor.data_ptr()
