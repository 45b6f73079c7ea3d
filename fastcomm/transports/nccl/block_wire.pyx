# cython: language_level=3
"""BlockWire: reduces the float32 elements of a bucket by bytes with a scale for every 256. NCCL
only moves them; kernels add, in float32.

The elements are cut into a row for each rank, of whole blocks, which may go on behind their end.
Each rank sends every other rank its row, adds up its own row, encodes the sum, and sends that to
all. All ranks decode the same bytes, also the rank that has made them, so that they end with the
same bits. The rank's own part of the sum is not rounded before it is added.
"""

import torch

from fastcomm.transports.cuda.blocks import covered_bits

from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free

from fastcomm.transports.cuda.blocks cimport BLOCK_NUMEL, BlockKernels, coded_block
from fastcomm.transports.cuda.driver cimport CUstream
from fastcomm.transports.nccl.calls cimport (
    ALL_GATHER, ALL_REDUCE, RECV, SEND, NcclCall, call_all,
)
from fastcomm.transports.nccl.library cimport dtype_number, ncclComm_t, ncclSuccess
from fastcomm.transports.nccl.link cimport Link


cdef size_t ALIGNED = 4  # blocks of a row: NCCL copies 16 bytes at a time if rows begin there


cdef class BlockWire:
    """wire: a flat float32 tensor, with the gradients of these numels at these offsets, and at the
    end one element for each, the used mask: no rounding may change that, so it is reduced as it is.

    allocate: of the communicator, for memory that outlives what is launched on it.
    """

    def __cinit__(self, Link link, wire, list numels, list offsets, allocate):
        cdef size_t of_ranks = ALIGNED * BLOCK_NUMEL * link.world_size
        self.rank, self.world_size = link.rank, link.world_size
        self.kernels = BlockKernels(link.cuda)
        self.values = <float *><size_t>wire.data_ptr()
        self.numel = wire.numel() - len(numels)
        self.n_blocks = ALIGNED * max(1, (self.numel + of_ranks - 1) // of_ranks)
        nbytes = 2 * self.n_blocks * link.world_size * sizeof(coded_block)
        covered = covered_bits(self.numel, numels, offsets)
        self.memory = allocate(nbytes + covered.numel(), dtype=torch.uint8)
        self.memory[nbytes:].copy_(covered)
        self.coded = <coded_block *><size_t>self.memory.data_ptr()
        self.received = self.coded + link.world_size * self.n_blocks
        self.covered = <uint32_t *>(self.received + link.world_size * self.n_blocks)
        self._fill_in_calls(len(numels))

    def __dealloc__(self):
        free(self.calls)

    cdef int _fill_in_calls(self, size_t n_used) except -1:
        cdef int r, uint8 = dtype_number(torch.uint8), float32 = dtype_number(torch.float32)
        cdef size_t n = 0, nbytes = self.n_blocks * sizeof(coded_block)
        cdef float *mask = self.values + self.numel
        cdef coded_block *own = self.coded + self.rank * self.n_blocks
        self.calls = <NcclCall *>calloc(2 * self.world_size, sizeof(NcclCall))
        if self.calls == NULL:
            raise MemoryError("out of memory")
        for r in range(self.world_size):
            if r != self.rank:
                coded, received = self.coded + r * self.n_blocks, self.received + r * self.n_blocks
                self.calls[n] = NcclCall(SEND, coded, NULL, nbytes, uint8, 0, r)
                self.calls[n + 1] = NcclCall(RECV, NULL, received, nbytes, uint8, 0, r)
                n += 2
        self.calls[n] = NcclCall(ALL_GATHER, own, self.coded, nbytes, uint8, 0, 0)
        self.calls[n + 1] = NcclCall(ALL_REDUCE, mask, mask, n_used, float32, 0, 0)
        self.n_calls = n
        return 0

    cdef int reduce_on(
        self, CUstream stream, ncclComm_t comm, int op, const char **failed
    ) except -1 nogil:
        """Launches everything. Returns NCCL's code. op: NCCL's number. failed: see call_all()."""
        cdef uint32_t n = self.n_blocks, n_of_all = n * self.world_size
        cdef size_t begin = <size_t>self.rank * n * BLOCK_NUMEL
        cdef size_t own_numel = self.numel - begin if begin < self.numel else 0
        cdef float *own = self.values + begin
        cdef uint32_t *own_covered = self.covered + begin // 32
        cdef NcclCall *gathering = self.calls + self.n_calls
        cdef int code = ncclSuccess
        own_numel = min(own_numel, <size_t>n * BLOCK_NUMEL)
        self.kernels.encode_on(
            stream, self.values, self.coded, n_of_all, self.numel, self.covered
        )
        if self.n_calls:
            code = call_all(self.calls, self.n_calls, comm, stream, failed)
        if code != ncclSuccess:
            return code
        self.kernels.add_on(
            stream, own, self.received, n, own_numel, own_covered, self.world_size, self.rank, op
        )
        self.kernels.encode_on(stream, own, self.coded + self.rank * n, n, own_numel, own_covered)
        gathering[1].op = op
        code = call_all(gathering, 2, comm, stream, failed)
        if code != ncclSuccess:
            return code
        self.kernels.decode_on(stream, self.values, self.coded, n_of_all, self.numel)
        return ncclSuccess
