# cython: language_level=3
"""Wire: how the float32 numbers of a bucket travel in fewer bits, and what that has dropped.

Two codecs turn numbers into bytes and back. Halves rounds to 16 bits. BlockCodec rounds to 8 bits,
with one float32 scale for each block of 256 elements. With error feedback a Wire keeps what
encoding has dropped (the residual) and adds it to what is encoded under the same key in the next
round. Knows no rank and no group.

Decoding is one product of two floats, so equal bytes give equal bits on every machine.
The arithmetic of BlockCodec is in kernels/wire/blocks.c.

Compiled, as a bucket's hook encodes: see shards.pyx.
"""

import torch

from libc.stdint cimport uint8_t

from fastcomm.comm.collective import BLOCK_DTYPES
from fastcomm.transports.group.call import cast, reduce_rows

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


class Wire:
    """Encodes and decodes one bucket. dtype: of 8 or 16 bits. error_feedback: adds to what is
    encoded what was dropped under the same key the last time.
    """

    def __init__(self, dtype, *, error_feedback):
        self._codec = BlockCodec(dtype) if dtype in BLOCK_DTYPES else Halves(dtype)
        self.feeds_back = error_feedback
        self._residuals = {}

    def rows_for(self, n_rows, numel):
        """Memory for the bytes of so many rows of numbers, a row each; uninitialised."""
        shape = n_rows, self._codec.nbytes_of(numel)
        return torch.empty(shape, dtype=torch.uint8, device="cpu")

    def encode(self, key, values, coded):
        """Writes the bytes of `values` into `coded`; with error feedback those of the sum with the
        residual of this key. An infinity or a NaN leaves no residual.

        key: what the values are a part of; equal in every round, and encoded once in each.
        """
        residual = self._residuals.get(key)
        if residual is None and self.feeds_back:
            residual = self._residuals[key] = torch.zeros_like(values)
        self._codec.encode(values, residual, coded)

    def decode(self, coded, values):
        """Writes what the bytes stand for into `values`."""
        self._codec.decode(coded, values)

    def reduce(self, coded, rows, own, op, factors=None):
        """Reduces rows: what `coded` stands for, but for row `own`, which has not travelled. Blocks
        are added one after the other. The result may lie in `rows`, whose contents are lost.
        factors: see call.reduce_rows.
        """
        others = [i for i in range(len(rows)) if i != own]
        if isinstance(self._codec, Halves) or op not in ("sum", "mean") or factors is not None:
            for i in others:
                self._codec.decode(coded[i], rows[i])
            return reduce_rows(rows, op, factors)
        in_order = range(len(rows)) if own > 1 else [own, *others]  # two may be added either way
        total = rows[in_order[0]]
        if own > 1:
            self._codec.decode(coded[0], total)
        for i in in_order[1:]:
            if i == own:
                total.add_(rows[own])
            else:
                self._codec.accumulate(coded[i], total)
        return total.div_(len(rows)) if op == "mean" else total


class Halves:
    """Elements rounded to float16 or bfloat16."""

    def __init__(self, dtype):
        self._dtype = dtype

    def nbytes_of(self, numel):
        return numel * self._dtype.itemsize

    def encode(self, values, residual, coded):
        halves = coded.view(self._dtype)
        if residual is None:
            halves.copy_(values)
            return
        residual.add_(values)
        halves.copy_(residual)
        residual.sub_(halves)
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def decode(self, coded, values):
        cast(coded.view(self._dtype), values)


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
