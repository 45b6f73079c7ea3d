# cython: language_level=3
"""ShmCommunicator: the ranks of one host over shared memory. Checks arguments, hands out tensors
that lie in shared memory, and posts collectives to its ring.

The ranks find each other by the `bootstrap`, whose `exchange(value, form)` returns every rank's
value; see bootstrap.py.
"""

from itertools import accumulate, chain

import torch

from fastcomm.comm.coalesced import as_list, check_together, of_tensor, sizes
from fastcomm.comm.collective import (
    CPU_DTYPES, WIRE_DTYPES, check_numel, check_out, check_root, refuse_dtype,
    refuse_error_feedback, shard_of,
)
from fastcomm.comm.parts import check_rooted, exchanged
from fastcomm.comm.transport import Transport
from fastcomm.errors import InitError, has_aborted, has_closed
from fastcomm.transports.shm.bucket import ShmBucket
from fastcomm.transports.shm.memory import keep_freed_memory
from fastcomm.transports.shm.ring import MAX_RANKS

from libc.stdint cimport uint32_t, uint64_t

from fastcomm.control.announcement cimport *
from fastcomm.transports.shm.core cimport *
from fastcomm.transports.shm.memory cimport Block
from fastcomm.transports.shm.ring cimport Ring, ShmWork


cdef class ShmCommunicator:
    """Collectives between `world_size` processes of one host. See
    fastcomm.comm.transport.Transport for the contract.

    Made by fastcomm.init. One thread at a time may use it; all ranks call the same collectives in
    the same order.
    """

    cdef readonly int rank, world_size, local_rank
    cdef public object membership, open_join  # see Transport
    cdef readonly object device, timeout
    cdef readonly tuple processes
    cdef object __weakref__
    cdef Ring ring

    backend = "shm"
    has_streams = feeds_back_errors = crosses_network = False
    progresses_itself = is_threadsafe = False
    wire_dtypes = WIRE_DTYPES
    __enter__, __exit__ = Transport.__enter__, Transport.__exit__
    __copy__, __deepcopy__ = Transport.__copy__, Transport.__deepcopy__
    __reduce_ex__, instead = Transport.__reduce_ex__, Transport.instead
    rebuild, split = Transport.rebuild, Transport.split
    send, recv, end_channels = Transport.send, Transport.recv, Transport.end_channels
    n_abandoned, failure = Transport.n_abandoned, Transport.failure
    make_window, refuse_vote = Transport.make_window, Transport.refuse_vote
    refuse_capture = Transport.refuse_capture

    def __cinit__(self, int rank, int world_size, int local_rank, object bootstrap, object timeout):
        if world_size > MAX_RANKS:
            raise InitError(f"the shm transport takes up to {MAX_RANKS} ranks, not {world_size}")
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device, self.timeout = torch.device("cpu"), timeout
        self.ring = Ring(rank, world_size, bootstrap, timeout)
        self.processes = self.ring.segments.processes

    def close(self):
        """Ends the use of this communicator on this rank; peers that still wait for it get
        PeerLostError. Tensors stay valid.
        """
        self.end_channels(aborts=False)
        self.ring.close(SHM_CLOSED, has_closed(self.rank))

    def abort(self):
        """Closes, and tells the peers that something went wrong: their collectives end with
        PeerLostError at once.
        """
        self.end_channels(aborts=True)
        self.ring.close(SHM_ABORTED, has_aborted(self.rank))

    @property
    def standing(self):
        return self.ring.life

    @property
    def flight(self):
        return self.ring.flight

    def __repr__(self):
        return (
            f"<ShmCommunicator: rank {self.rank} of "
            f"{self.world_size}{', ended' if self.ring.life.failure is not None else ''}>"
        )

    # -- memory --

    def empty(self, numel, *, dtype):
        """A flat tensor of `numel` elements in shared memory, uninitialised (zero when the memory
        is new). Local: no peer is asked.

        Collectives on it take the direct path: no copy. The memory lives as long as the tensor,
        also after close(). Raises ValueError for a negative numel, TypeError for a dtype the
        transport does not reduce, MemoryError.
        """
        self.ring.check_usable()
        if dtype not in CPU_DTYPES:
            refuse_dtype(dtype, CPU_DTYPES)
        check_numel(numel)
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        block = Block(self.ring.arena, numel * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=numel)

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        """Reduces `tensor` over all ranks, in place: contiguous, on the CPU, the same numel and
        dtype on every rank.

        op: see Communicator.all_reduce. float16 and bfloat16 accumulate in float32 and round once.
        The result is bitwise the same on every rank. With async_op, returns a Work at once: leave
        the tensor alone until work.wait() returns. Raises MismatchError, PeerLostError or
        TimeoutError; ValueError or TypeError for a bad argument, before any peer is involved.
        """
        cdef announcement d = announced(CALL_ALL_REDUCE, op_code(op))
        cdef char *data = self.ring.check(tensor, &d)
        return self.ring.call(&d, tensor, data, tensor, data, async_op)

    def all_reduce_coalesced(self, tensors, op="sum", *, bint async_op=False):
        """The tensors stay where they are: what each rank reduces is read and written there."""
        cdef announcement d = announced(CALL_ALL_REDUCE, op_code(op))
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        cdef uint64_t numel = 0
        cdef size_t begin, itemsize = 0
        cdef Py_ssize_t i
        cdef list numels = [], begins = [], ends = []
        tensors = as_list(tensors)
        work.ring, work.written = self.ring, tuple(tensors)
        work.take_pieces(len(tensors))
        for i, tensor in enumerate(tensors):
            try:
                begin = <size_t>self.ring.check(tensor, &d)
            except (TypeError, ValueError) as error:
                raise of_tensor(i, error) from None
            if i == 0:  # the others have the same, or are refused
                itemsize = CPU_DTYPES[d.dtype].itemsize
            begin = begin if d.numel else 0
            begins.append(begin)
            ends.append(begin + d.numel * itemsize)
            numels.append(d.numel)
            if d.numel:
                work.pieces[work.n_pieces] = shm_piece(<void *>begin, numel, d.numel)
                work.n_pieces += 1
            numel += d.numel
        check_together([tensor.dtype for tensor in tensors], begins, ends)
        d.numel, d.place, d.steps = numel, PRIVATE_MEMORY, sizes(numels)
        self.ring.post(&d, NULL, NULL, work)
        if async_op:
            return work
        work.wait()

    def broadcast(self, tensor, int src=0, *, bint async_op=False):
        """Copies rank `src`'s `tensor` into every other rank's. Same numel and dtype on every rank.
        Errors as all_reduce.
        """
        cdef announcement d = announced(CALL_BROADCAST)
        cdef char *data = self.ring.check(tensor, &d)
        check_root("src", src, self.world_size)
        d.root = src
        out = None if src == self.rank else tensor
        return self.ring.call(&d, tensor, data, out, data, async_op)

    def broadcast_all(self, list tensors, int src=0):
        """Broadcasts one tensor after the other."""
        for tensor in tensors:
            self.broadcast(tensor, src)

    def all_gather_single(self, out, inp, *, bint async_op=False):
        """Concatenates every rank's `inp`, by rank, into `out` of world_size * inp.numel()
        elements. Errors as all_reduce.
        """
        cdef announcement d = announced(CALL_ALL_GATHER)
        cdef char *input = self.ring.check(inp, &d)
        cdef char *output = self._check_out(
            "all_gather_single", out, inp, inp.numel() * self.world_size
        )
        return self.ring.call(&d, inp, input, out, output, async_op)

    def reduce_scatter_single(self, out, inp, op="sum", *, bint async_op=False):
        """Reduces `inp` over all ranks; rank r keeps the r-th of world_size equal parts in `out`.
        Errors as all_reduce.
        """
        cdef announcement d = announced(CALL_REDUCE_SCATTER, op_code(op))
        cdef char *input = self.ring.check(inp, &d)
        numel = shard_of("reduce_scatter_single", inp, self.world_size)
        cdef char *output = self._check_out("reduce_scatter_single", out, inp, numel)
        return self.ring.call(&d, inp, input, out, output, async_op)

    def gather(self, out, inp, int dst=0, *, bint async_op=False):
        """Concatenates every rank's `inp`, by rank, into `out` of rank `dst` alone."""
        cdef announcement d = announced(CALL_GATHER), of_out = d
        cdef char *input = self.ring.check(inp, &d)
        cdef char *output = NULL if out is None else self.ring.check(out, &of_out)
        check_rooted("gather", self, out, inp, dst)
        d.root = dst
        return self.ring.call(&d, inp, input, out, output, async_op)

    def scatter(self, out, inp, int src=0, *, bint async_op=False):
        """Rank r gets the r-th of world_size equal parts of rank `src`'s `inp`."""
        cdef announcement d = announced(CALL_SCATTER), of_inp = d
        cdef char *output = self.ring.check(out, &d)
        cdef char *input = NULL if inp is None else self.ring.check(inp, &of_inp)
        check_rooted("scatter", self, inp, out, src)
        d.root, d.place = src, PRIVATE_MEMORY  # the others have no input that could lie elsewhere
        return self.ring.call(&d, inp, input, out, output, async_op)

    def all_to_all_single(self, out, inp, out_splits=None, in_splits=None, *, bint async_op=False):
        """Cuts `inp` into a part for each rank; `out` gets those that are for this one."""
        cdef announcement d = announced(CALL_ALL_TO_ALL), of_out = d
        cdef ShmWork work
        cdef char *input = self.ring.check(inp, &d)
        cdef char *output = self.ring.check(out, &of_out)
        parts = exchanged(self, out, inp, out_splits, in_splits)
        if parts.of_all is None:
            return self.ring.call(&d, inp, input, out, output, async_op)
        work = ShmWork.__new__(ShmWork)
        work.ring, work.tensors, work.written = self.ring, inp, (out,)
        rows = [accumulate(row, initial=0) for row in parts.of_all]
        work.take_bounds(tuple(chain.from_iterable(rows)))
        d.numel = parts.numel
        if d.offset > self.ring.arena.nbytes - d.numel * inp.itemsize:  # or private anyway
            d.place = PRIVATE_MEMORY
        self.ring.post(&d, input, output, work)
        if async_op:
            return work
        work.wait()

    def barrier(self, *, bint async_op=False):
        """Returns when every rank has called it."""
        cdef announcement d = announced(CALL_BARRIER)
        self.ring.check_usable()
        return self.ring.call(&d, None, NULL, None, NULL, async_op)

    def check_tensor(self, tensor):
        cdef announcement d = announced(CALL_BROADCAST)
        self.ring.check(tensor, &d)

    def begin_round(self, op, part, reducer):
        self.ring.life.settle()
        return part

    def end_round(self):
        self.ring.life.settle()

    def follow(self):
        return self.ring.shadow()

    def keep_times(self, bint is_on):
        self.ring.keep_times(is_on)

    def check(self):
        """Waits only after another rank has abandoned what was under way, until the ranks have met
        again.
        """
        self.ring.check_usable()
        self.ring.hear()

    def abandon(self, *, bint in_any_case=False):
        self.ring.check_usable()
        if not in_any_case and self.ring.life.is_told():
            return
        self.ring.abandon()
        if not in_any_case:
            self.ring.life.leave_backward(self.rank)

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
        cdef announcement d = announced(CALL_ALL_GATHER_V)
        cdef char *data = self.ring.check(flat, &d)
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        if d.place == PRIVATE_MEMORY and d.numel:
            raise ValueError("all_gather_v() takes tensors that empty() has made")
        work.ring, work.written = self.ring, (flat,)
        work.take_bounds(bounds)
        d.label = label
        self.ring.post(&d, data, data, work)
        return work

    cdef char *_check_out(self, str name, out, inp, numel) except NULL:
        cdef announcement d
        d.op = SHM_SUM
        cdef char *data = self.ring.check(out, &d)
        check_out(name, out, inp, numel)
        return data


Transport.register(ShmCommunicator)
