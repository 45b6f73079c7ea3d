# cython: language_level=3
"""ShmCommunicator: the ranks of one host over shared memory. Hands out tensors that lie in shared
memory, and posts collectives to its ring.

The ranks find each other by the `bootstrap`, whose `exchange(value, form)` returns every rank's
value; see bootstrap.py.
"""

from itertools import accumulate, chain

import torch

from fastcomm.comm.collective import WIRE_DTYPES, refuse_error_feedback
from fastcomm.comm.transport import Transport
from fastcomm.comm.words import has_aborted, has_closed
from fastcomm.errors import InitError
from fastcomm.transports.shm.bucket import ShmBucket
from fastcomm.transports.shm.memory import keep_freed_memory
from fastcomm.transports.shm.ring import MAX_RANKS

from libc.stdint cimport uint32_t

from fastcomm.control.announcement cimport *
from fastcomm.control.collectives cimport Collective, Collectives
from fastcomm.transports.shm.core cimport *
from fastcomm.transports.shm.memory cimport Block
from fastcomm.transports.shm.ring cimport Ring, ShmWork


cdef class ShmCommunicator(Collectives, Transport):
    """Collectives between `world_size` processes of one host. See
    fastcomm.comm.transport.Transport for the contract.

    Made by fastcomm.init. One thread at a time may use it; all ranks call the same collectives in
    the same order.
    """

    cdef Ring ring

    backend = "shm"
    has_streams = feeds_back_errors = crosses_network = False
    progresses_itself = is_threadsafe = False
    adds_by_tree = True
    wire_dtypes = WIRE_DTYPES

    def __cinit__(self, int rank, int world_size, int local_rank, object bootstrap, object timeout):
        if world_size > MAX_RANKS:
            raise InitError(f"the shm transport takes up to {MAX_RANKS} ranks, not {world_size}")
        self.ring = Ring(rank, world_size, bootstrap, timeout)
        self.processes = self.ring.segments.processes
        self.standing, self.flight = self.ring.standing, self.ring.flight

    def _close(self):
        self.ring.close(SHM_CLOSED, has_closed(self.rank))

    def _abort(self):
        self.ring.close(SHM_ABORTED, has_aborted(self.rank))

    def _abandon(self):
        self.ring.check_usable()
        self.ring.abandon()

    def _empty(self, numel, dtype):
        """Zero where the memory is new. Collectives on it take the direct path: no copy."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        block = Block(self.ring.arena, numel * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=numel)

    # -- collectives: see Collectives --

    cdef int _check_usable(self) except -1:
        return self.ring.check_usable()

    cdef object _taken(self, tensor, announcement *d, char **data):
        data[0] = self.ring.take(tensor, d)
        return tensor

    cdef object _run(self, Collective *it, inp, out, bint async_op):
        return self.ring.call(&it.d, inp, it.input, out, it.output, async_op)

    cdef object _run_together(self, Collective *it, list tensors, bint async_op):
        """The tensors stay where they are: what each rank reduces is read and written there."""
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        work.ring, work.written = self.ring, tuple(tensors)
        work.pieces, work.n_pieces, it.pieces = it.pieces, len(tensors), NULL
        it.input = it.output = NULL
        return self._posted(it, work, async_op)

    cdef object _run_parts(self, Collective *it, inp, out, parts, bint async_op):
        cdef announcement *d = &it.d
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        work.ring, work.tensors, work.written = self.ring, inp, (out,)
        rows = [accumulate(row, initial=0) for row in parts.of_all]
        work.take_bounds(tuple(chain.from_iterable(rows)))
        if d.offset > self.ring.arena.nbytes - d.numel * inp.itemsize:  # or private anyway
            d.place = PRIVATE_MEMORY
        return self._posted(it, work, async_op)

    cdef object _posted(self, Collective *it, ShmWork work, bint async_op):
        self.ring.post(&it.d, it.input, it.output, work)
        if async_op:
            return work
        work.wait()

    def broadcast_all(self, list tensors, int src=0):
        """One collective each: as none is copied, nothing is gained by joining them."""
        for tensor in tensors:
            self.broadcast(tensor, src)

    # the next two are Transport's, without its Python frames

    def begin_round(self, op, part, reducer):
        self.ring.standing.forget_abandonment()
        return part

    def end_round(self):
        self.ring.standing.forget_abandonment()

    def follow(self):
        return self.ring.follow()

    def keep_times(self, bint is_on):
        self.ring.keep_times(is_on)

    def check(self):
        """Waits only after another rank has abandoned what was under way, until the ranks have met
        again.
        """
        self.ring.check_usable()
        self.ring.hear()

    def bind_bucket(
        self, flat, list views, list offsets, *, wire_dtype, uint32_t label, int lane=0,
        tuple bounds=None,
        bint error_feedback=False,
    ):
        """There are no lanes: one bucket keeps every core busy already."""
        if error_feedback:
            refuse_error_feedback(self.backend)
        keep_freed_memory()
        wire = flat
        if wire_dtype is not None and wire_dtype is not flat.dtype:
            wire = self.empty(flat.numel(), dtype=wire_dtype).zero_()
        return ShmBucket(self.ring, flat, wire, views, offsets, label, bounds)

    def all_gather_v(self, flat, tuple bounds, *, uint32_t label=0):
        """Every rank reads the others' shards where they lie."""
        cdef announcement d = announced(CALL_ALL_GATHER_V, SHM_SUM)
        cdef char *data = self.ring.take(flat, &d)
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        if d.place == PRIVATE_MEMORY and d.numel:
            raise ValueError("all_gather_v() takes tensors that empty() has made")
        work.ring, work.written = self.ring, (flat,)
        work.take_bounds(bounds)
        d.label = label
        self.ring.post(&d, data, data, work)
        return work
