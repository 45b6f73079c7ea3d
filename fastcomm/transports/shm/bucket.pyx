# cython: language_level=3
"""ShmBucket: a flat buffer in shared memory, gathered and reduced in one pass over the ring."""

import torch

from fastcomm.comm.collective import real_numel
from fastcomm.comm.transport import ALIKE, BoundBucket, BucketWork

from libc.math cimport isnan
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from fastcomm.comm.gathering cimport GatheringBucket
from fastcomm.comm.gradient_slot cimport GradientSlot
from fastcomm.control.announcement cimport (
    CALL_ALL_REDUCE, CALL_REDUCE_SCATTER_V, VOTES_TO_SKIP, announced, announcement, bucket_op_code,
)
from fastcomm.control.collectives cimport shm_piece
from fastcomm.transports.shm.core cimport shm_counting
from fastcomm.transports.shm.ring cimport Ring, ShmWork


cdef size_t SMALL_GRADIENT = 16384  # bytes


cdef struct Span:
    uint64_t offset, numel  # of real numbers


cdef class ShmBucket(GatheringBucket):
    """A flat buffer and the slots of the gradients in it. Prepared once, launched once per round.
    """

    cdef readonly ShmWork posted  # see BoundBucket.posted
    cdef Ring ring
    cdef Py_ssize_t end  # of the gradients in `flat`; behind it lies their used mask
    cdef object wire
    cdef tuple bounds  # of the ranks' shards; None: every rank gets the whole
    cdef list narrow, wide  # what a launch casts, and where it casts the result back
    cdef uint32_t label
    cdef size_t itemsize
    cdef Span *spans  # of the slots in the flat buffer
    cdef bint counts, adds_squares  # see BoundBucket.count_results
    cdef ShmWork next  # of the next launch: holds what gather leaves to it

    def __cinit__(
        self, Ring ring, flat, wire, list views, list offsets, uint32_t label, tuple bounds
    ):
        self.set_up(flat, views, flat)
        self.ring, self.wire, self.label = ring, wire, label
        self.itemsize, self.end = flat.element_size(), flat.numel() - len(views)
        self.spans = <Span *>malloc(max(len(views), 1) * sizeof(Span))
        if self.spans == NULL:
            raise MemoryError("out of memory")
        for i, view in enumerate(views):
            self.spans[i] = Span(offsets[i], real_numel(view))
        parts = [slice(None)]
        if bounds is not None:
            self.bounds = bounds
            own = slice(bounds[ring.rank], bounds[ring.rank + 1])
            parts = [own, slice(bounds[ring.world_size], None)]
        self.narrow, self.wide = [wire[part] for part in parts], [flat[part] for part in parts]

    def __dealloc__(self):
        free(self.spans)

    def gather(self, list parameters):
        """A large gradient is left where autograd has put it: the launch copies what the peers will
        read, and the reduction reads the rest there. Small ones are copied here, which is cheaper
        than to keep many tensors alive.
        """
        self._next_work(len(parameters))
        self.posted = None
        return self.gather_gradients(parameters)

    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1:
        """Moves a small one now, and leaves a large one to the launch."""
        cdef ShmWork work = self.next
        cdef size_t nbytes = self.spans[i].numel * self.itemsize
        if self.wire is not self.flat or nbytes < SMALL_GRADIENT:
            memcpy((<GradientSlot>self.slots[i]).address, source, nbytes)
        else:
            work.pieces[work.n_pieces] = shm_piece(
                source, self.spans[i].offset, self.spans[i].numel
            )
            work.n_pieces += 1
            work.tensors.append(gradient)
        return 0

    cdef ShmWork _next_work(self, Py_ssize_t n_pieces):
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        work.ring, work.tensors = self.ring, []
        if self.wire is not self.flat:
            work.wide, work.narrow = self.wide, self.narrow
        if n_pieces:
            work.take_pieces(n_pieces)
        self.next = work
        return work

    def launch(self, str op, list missing, uint64_t fingerprint=0, part=ALIKE):
        cdef ShmWork work = self.next or self._next_work(0)
        cdef int kind = CALL_ALL_REDUCE if self.bounds is None else CALL_REDUCE_SCATTER_V
        cdef announcement d = announced(kind, bucket_op_code(op))
        d.weight, d.scale, votes, _ = part
        if votes:
            d.presence = VOTES_TO_SKIP
        cdef char *data = self.ring.take(self.wire, &d)
        self.next = self.posted = None
        work.op, work.used_mask = op, self.used_mask
        if self.bounds is not None:
            work.take_bounds(self.bounds)
        d.label, d.fingerprint = self.label, fingerprint
        if self.counts:
            work.counting = shm_counting(self.end, self.adds_squares)
        self.used_mask.fill(op, missing)
        if self.wire is not self.flat:
            self._narrow(&d)
        self.ring.post(&d, data, data, work)
        self.posted = work
        self.ring.advance(work, 0)  # also earlier buckets that all peers have posted by now
        if work.error is not None or self.ring.from_handler is not None:
            self.ring.raise_what_ended(work)
        return work

    cdef int _narrow(self, announcement *d) except -1:
        """Casts what travels. Where it is to be multiplied, it travels as this rank's mean, whose
        range is that of gradients.
        """
        if d.scale == d.weight:
            self.wire.copy_(self.flat)
            return 0
        torch.mul(self.flat, d.scale / d.weight, out=self.wire)
        self.wire[self.end:].copy_(self.used_mask.elements)
        d.scale = d.weight
        return 0

    def count_results(self, bint adds_squares):
        self.counts = True
        self.adds_squares |= adds_squares
        return True

    def square_sum(self):
        """The gradients are as the last launch has left them."""
        cdef ShmWork work = self.posted
        if work is None or not work.outcome.is_counted or isnan(work.outcome.statistics.square_sum):
            return None  # of NaNs, too
        square_sum = work.outcome.statistics.square_sum
        return torch.tensor(square_sum, dtype=torch.float64, device="cpu")

    def n_nonfinite(self):
        if self.posted is None or not self.posted.outcome.is_counted:
            return None
        n_nonfinite = self.posted.outcome.statistics.n_nonfinite
        return torch.tensor(n_nonfinite, dtype=torch.int64, device="cpu")


BoundBucket.register(ShmBucket)
BucketWork.register(ShmWork)
