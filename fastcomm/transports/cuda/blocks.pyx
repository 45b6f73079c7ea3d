# cython: language_level=3
"""BlockKernels: float32 numbers on a device to bytes with a scale for every 256, and back. Owns the
loaded kernels of kernels/cuda/blocks.cu, which says what they do.
"""

import numpy
import torch

from libc.stdint cimport UINT32_MAX, uint32_t, uint64_t

from fastcomm.transports.cuda.driver cimport CUcontext, CUstream, Device, check, driver
from fastcomm.transports.cuda.multi_tensor cimport MT_WARPS, Kernel, kernel_for


cdef class BlockKernels:
    """Raises InitError if there are no kernels for the device."""

    def __cinit__(self, Device device):
        self.device = device
        with device.selected():
            for which, name in enumerate(("encode", "add", "decode")):  # by Action
                self.kernels[<int>which] = kernel_for(device, UINT32_MAX, f"{name}_blocks")

    cdef int encode_on(self, CUstream stream, const float *values, coded_block *blocks,
                       uint32_t n_blocks, uint64_t numel, const uint32_t *covered) except -1 nogil:
        """Launches blocks = values."""
        cdef void *parameters[5]
        parameters[0], parameters[1] = &values, &blocks
        parameters[2], parameters[3], parameters[4] = &n_blocks, &numel, &covered
        return self._launch(ENCODE, stream, n_blocks, parameters)

    cdef int add_on(self, CUstream stream, float *values, const coded_block *blocks,
                    uint32_t n_blocks, uint64_t numel, const uint32_t *covered, int n_rows, int own,
                    int op) except -1 nogil:
        """Launches values = the reduction of n_rows rows of n_blocks, of which the values are row
        `own`. op: NCCL's number.
        """
        cdef void *parameters[8]
        parameters[0], parameters[1] = &values, &blocks
        parameters[2], parameters[3], parameters[4] = &n_blocks, &numel, &covered
        parameters[5], parameters[6], parameters[7] = &n_rows, &own, &op
        return self._launch(ADD, stream, n_blocks, parameters)

    cdef int decode_on(self, CUstream stream, float *values, const coded_block *blocks,
                       uint32_t n_blocks, uint64_t numel) except -1 nogil:
        """Launches values = blocks."""
        cdef void *parameters[4]
        parameters[0], parameters[1] = &values, &blocks
        parameters[2], parameters[3] = &n_blocks, &numel
        return self._launch(DECODE, stream, n_blocks, parameters)

    cdef int _launch(self, Action which, CUstream stream, uint32_t n_blocks,
                     void **parameters) except -1 nogil:
        cdef Kernel *kernel = &self.kernels[<int>which]
        cdef uint32_t n_needed = (n_blocks + MT_WARPS - 1) // MT_WARPS
        cdef CUcontext before = self.device.enter()
        cdef int code = driver.launch(
            kernel.function, min(kernel.n_blocks, n_needed), 1, 1, 32 * MT_WARPS, 1, 1, 0, stream,
            parameters, NULL,
        )
        self.device.leave(before)
        return check(code, b"cuLaunchKernel")

    # -- the same from Python, on the current stream; covered: see covered_bits() --

    def encode(self, values, covered):
        """Returns the bytes of a float32 tensor, whole blocks."""
        cdef uint32_t n_blocks = _n_blocks(values)
        blocks = torch.empty(
            n_blocks * sizeof(coded_block), dtype=torch.uint8, device=self.device.device
        )
        self.encode_on(
            self.device.current_stream(), <float *>_data(values), <coded_block *>_data(blocks),
            n_blocks, values.numel(), <uint32_t *>_data(covered),
        )
        return blocks

    def add(self, values, covered, blocks, int own):
        """Adds rows, what encode() has returned for each rank one after the other, to `values`,
        which are row `own`.
        """
        cdef uint32_t n_blocks = _n_blocks(values)
        self.add_on(
            self.device.current_stream(), <float *>_data(values), <coded_block *>_data(blocks),
            n_blocks, values.numel(), <uint32_t *>_data(covered),
            blocks.numel() // (n_blocks * sizeof(coded_block)), own, 0,
        )

    def decode(self, values, blocks):
        """Writes what the bytes stand for into `values`."""
        self.decode_on(
            self.device.current_stream(), <float *>_data(values), <coded_block *>_data(blocks),
            _n_blocks(values), values.numel(),
        )


def covered_bits(size_t numel, numels, offsets):
    """A bit for each of numel elements, set where a tensor lies. Returns bytes on the CPU, whole
    words of 32 bits.
    """
    is_covered = numpy.zeros((numel + 31) // 32 * 32, dtype=bool)
    for n, offset in zip(numels, offsets):
        is_covered[offset:offset + n] = True
    return torch.from_numpy(numpy.packbits(is_covered, bitorder="little"))


cdef uint32_t _n_blocks(values) except? 0:
    return (values.numel() + BLOCK_NUMEL - 1) // BLOCK_NUMEL


cdef void *_data(tensor) except? NULL:
    return <void *><size_t>tensor.data_ptr()
