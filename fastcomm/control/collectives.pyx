# cython: language_level=3
"""Collectives: those of every communicator. Checks their arguments before any peer is involved, and
fills in what the ranks compare. A transport takes the tensors and runs the collective.

comm/communicator.py says what the collectives promise.
"""

import torch

from fastcomm.comm.collective import (
    CPU_DTYPES, OPS, as_pairs, canonical_op, check_out, check_root, fingerprint_of, lacks_memory,
    name_of, refuse_dtype, refuse_tensor, shard_of,
)
from fastcomm.comm.parts import check_rooted, exchanged
from fastcomm.comm.communicator import Communicator

from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc, qsort

from fastcomm.control.announcement cimport *


cdef str TOGETHER = "all_reduce_coalesced"
cdef dict OP_CODES = {op: code for code, op in enumerate(OPS)}


cdef inline Collective collective(int kind, int op) noexcept:
    cdef Collective it
    it.d = announced(kind, op)
    it.input = it.output = NULL
    it.pieces = NULL
    return it


cdef int op_code(op) except -1:
    code = OP_CODES.get(op) if type(op) is str else None
    return OP_CODES[canonical_op(op)] if code is None else code


cdef class Collectives:
    """The base of all communicators, before Transport. A transport in Cython overrides what stands
    below as supplied by a transport; one in Python has check_usable, run, run_together and
    run_parts in its place. Both have _empty, _abandon, _close and _abort, which the last methods
    here call.
    """

    def __cinit__(
        self, int rank, int world_size, int local_rank, object bootstrap, object timeout, *_
    ):
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device, self.timeout = torch.device("cpu"), timeout

    def __repr__(self):
        place = "" if self.device.type == "cpu" else f" on {self.device}"
        end = "" if self.failure is None else ", ended"
        return f"<{type(self).__name__}: rank {self.rank} of {self.world_size}{place}{end}>"

    # -- what a transport supplies --

    cdef int _check_usable(self) except -1:
        """Raises the reason if no collective can begin."""
        self.check_usable()
        return 0

    cdef int _check_dtype(self, dtype) except -1:
        """Raises TypeError for what is not reduced."""
        if dtype not in CPU_DTYPES:
            refuse_dtype(dtype, CPU_DTYPES)
        return 0

    cdef object _taken(self, tensor, announcement *d, char **data):
        """Checks that a collective can begin and can take the tensor. Fills in its address and, of
        the announcement, its numel and dtype. Returns it as it is to be held, perhaps as a view.
        """
        self._check_usable()
        taken = self._viewed(tensor, OPS[d.op])
        data[0], d.numel = <char *><size_t>taken.data_ptr(), taken.numel()
        d.dtype = d.wire = dtype_code(taken.dtype)
        return taken

    cdef object _run(self, Collective *it, inp, out, bint async_op):
        """Runs a collective, or begins it and returns its Work. inp: None where this rank has
        nothing to send. out: None where nothing is written.
        """
        return self.run(call_of(&it.d), inp, out, async_op)

    cdef object _run_together(self, Collective *it, list tensors, bint async_op):
        """As _run, of the all_reduce or the broadcast of many tensors. Those to be broadcast are
        bytes. Of what is reduced, `it` has the pieces, which it may take over.
        """
        return self.run_together(call_of(&it.d), tensors, async_op)

    cdef object _run_parts(self, Collective *it, inp, out, parts, bint async_op):
        """As _run, of an all_to_all_single whose parts differ in size: a comm.parts.Parts."""
        return self.run_parts(call_of(&it.d), inp, out, parts, async_op)

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        cdef Collective it = collective(CALL_ALL_REDUCE, op_code(op))
        taken = self._taken(tensor, &it.d, &it.input)
        it.output = it.input
        return self._run(&it, taken, taken, async_op)

    def all_reduce_coalesced(self, tensors, op="sum", *, bint async_op=False):
        cdef Collective it = collective(CALL_ALL_REDUCE, op_code(op))
        cdef list found = as_list(tensors), taken = []
        cdef uint64_t numel = 0, checksum = 0  # of the sizes
        cdef Py_ssize_t i, n = len(found)
        it.pieces = <shm_piece *>malloc(n * sizeof(shm_piece))
        try:
            if it.pieces == NULL:
                raise MemoryError("out of memory")
            for i, tensor in enumerate(found):
                try:
                    taken.append(self._taken(tensor, &it.d, &it.input))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{TOGETHER}: tensor {i}: {error}") from None
                it.pieces[i] = shm_piece(it.input, numel, it.d.numel)
                if it.d.numel == 0:  # it shares no memory
                    it.pieces[i].source = NULL
                numel += it.d.numel
                checksum = (checksum ^ it.d.numel) * 0x100000001B3UL  # FNV-1a's prime
            check_alike([tensor.dtype for tensor in found])
            check_apart(it.pieces, n, itemsize_of(&it.d))
            it.d.numel, it.d.place = numel, PRIVATE_MEMORY
            # the prime mixes upwards alone, and few bits travel
            checksum = (checksum ^ checksum >> 32) * 0x9E3779B97F4A7C15UL
            it.d.fingerprint = fingerprint_of(n, checksum >> 33)
            return self._run_together(&it, taken, async_op)
        finally:
            free(it.pieces)

    def broadcast(self, tensor, src=0, *, bint async_op=False):
        cdef Collective it = collective(CALL_BROADCAST, SHM_SUM)
        taken = self._taken(tensor, &it.d, &it.input)
        check_root("src", src, self.world_size)
        it.d.root, it.output = src, it.input
        return self._run(&it, taken, None if src == self.rank else taken, async_op)

    def broadcast_all(self, list tensors, src=0):
        """One collective, so that no exception can split it."""
        cdef Collective it = collective(CALL_BROADCAST, SHM_SUM)
        taken = [self._taken(tensor, &it.d, &it.input) for tensor in tensors]
        check_root("src", src, self.world_size)
        flats = [tensor.detach().view(-1).view(torch.uint8) for tensor in taken]
        it.d.root, it.d.numel = src, sum(map(len, flats))
        it.d.dtype = it.d.wire = dtype_code(torch.uint8)
        self._run_together(&it, flats, False)

    def all_gather_single(self, out, inp, *, bint async_op=False):
        cdef Collective it = collective(CALL_ALL_GATHER, SHM_SUM)
        source = self._taken(inp, &it.d, &it.input)
        target = self._taken_out(out, &it)
        check_out("all_gather_single", out, inp, inp.numel() * self.world_size)
        return self._run(&it, source, target, async_op)

    def reduce_scatter_single(self, out, inp, op="sum", *, bint async_op=False):
        cdef Collective it = collective(CALL_REDUCE_SCATTER, op_code(op))
        source = self._taken(inp, &it.d, &it.input)
        numel = shard_of("reduce_scatter_single", inp, self.world_size)
        target = self._taken_out(out, &it)
        check_out("reduce_scatter_single", out, inp, numel)
        return self._run(&it, source, target, async_op)

    def gather(self, out, inp, dst=0, *, bint async_op=False):
        cdef Collective it = collective(CALL_GATHER, SHM_SUM)
        source = self._taken(inp, &it.d, &it.input)
        target = None if out is None else self._taken_out(out, &it)
        check_rooted("gather", self, out, inp, dst)
        it.d.root = dst
        return self._run(&it, source, target, async_op)

    def scatter(self, out, inp, src=0, *, bint async_op=False):
        cdef Collective it = collective(CALL_SCATTER, SHM_SUM), of_inp = it
        target = self._taken(out, &it.d, &it.output)
        source = None if inp is None else self._taken(inp, &of_inp.d, &it.input)
        check_rooted("scatter", self, inp, out, src)
        it.d.root, it.d.place = src, PRIVATE_MEMORY  # of an input that the others do not have
        return self._run(&it, source, target, async_op)

    def all_to_all_single(self, out, inp, out_splits=None, in_splits=None, *, bint async_op=False):
        cdef Collective it = collective(CALL_ALL_TO_ALL, SHM_SUM)
        source = self._taken(inp, &it.d, &it.input)
        target = self._taken_out(out, &it)
        if out_splits is not None or in_splits is not None:
            self.refuse_capture("all_to_all_single() with splits")
        parts = exchanged(self, out, inp, out_splits, in_splits)
        if parts is None:
            return self._run(&it, source, target, async_op)
        it.d.numel = parts.numel
        return self._run_parts(&it, source, target, parts, async_op)

    def barrier(self, *, bint async_op=False):
        cdef Collective it = collective(CALL_BARRIER, SHM_SUM)
        self._check_usable()
        return self._run(&it, None, None, async_op)

    # -- memory, and the end --

    def empty(self, numel, *, dtype):
        refusal = self.standing.refusal()
        if refusal is not None:
            raise refusal
        self._check_dtype(dtype)
        if numel < 0:
            raise ValueError(f"numel must not be negative; got {numel}")
        return self._empty(numel, dtype)

    def abandon(self, *, bint in_any_case=False):
        if in_any_case:
            self._abandon()
        elif not self.standing.is_told():
            self._abandon()
            self.standing.leave_backward(self.rank)

    def close(self):
        self.end_channels(aborts=False)
        self._close()

    def abort(self):
        self.end_channels(aborts=True)
        self._abort()

    def check_tensor(self, tensor):
        cdef Collective it = collective(CALL_BROADCAST, SHM_SUM)
        self._taken(tensor, &it.d, &it.input)

    cdef object _taken_out(self, tensor, Collective *it):
        """As _taken, of an output that the ranks do not compare."""
        cdef announcement of_out = it.d
        return self._taken(tensor, &of_out, &it.output)

    cdef object _viewed(self, tensor, op):
        """The tensor, a complex one as pairs, if it can be taken. op: what it is reduced by."""
        if not isinstance(tensor, torch.Tensor):
            refuse_tensor(tensor, self.backend, self.device)
        is_here = tensor.device == self.device and tensor.layout is torch.strided
        if is_here and tensor.dtype.is_complex:
            tensor = as_pairs(tensor, op)
        self._check_dtype(tensor.dtype)
        if not is_here or not tensor.is_contiguous() or tensor.is_neg() or lacks_memory(tensor):
            refuse_tensor(tensor, self.backend, self.device)
        return tensor


cdef list as_list(tensors):
    """Raises ValueError or TypeError for what is no sequence, or has no tensors."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{TOGETHER} takes a sequence of tensors; got one: all_reduce takes that")
    try:
        found = list(tensors)
    except TypeError:
        raise TypeError(
            f"{TOGETHER} takes a sequence of tensors; got {type(tensors).__name__}"
        ) from None
    if not found:
        raise ValueError(f"{TOGETHER}: there are no tensors in the sequence")
    return found


cdef int check_alike(list dtypes) except -1:
    """Raises TypeError unless they are one."""
    if dtypes.count(dtypes[0]) < len(dtypes):
        i = next(i for i, dtype in enumerate(dtypes) if dtype != dtypes[0])
        raise TypeError(
            f"{TOGETHER}: tensor 0 is {name_of(dtypes[0])}, tensor {i} is {name_of(dtypes[i])}: "
            "make a call for each dtype"
        )
    return 0


cdef int check_apart(const shm_piece *pieces, size_t n, size_t itemsize) except -1:
    """Raises ValueError where two share memory: then one ends behind where the next begins."""
    cdef const shm_piece **by_address = <const shm_piece **>malloc(n * sizeof(shm_piece *))
    cdef const shm_piece *one
    cdef const shm_piece *following
    cdef size_t i
    if by_address == NULL:
        raise MemoryError("out of memory")
    try:
        for i in range(n):
            by_address[i] = &pieces[i]
        qsort(by_address, n, sizeof(shm_piece *), _order_of)
        for i in range(n - 1):
            one, following = by_address[i], by_address[i + 1]
            if <char *>one.source + one.numel * itemsize > <char *>following.source:
                first, second = sorted([one - pieces, following - pieces])
                raise ValueError(f"{TOGETHER}: tensors {first} and {second} share memory")
    finally:
        free(by_address)
    return 0


cdef int _order_of(const void *one, const void *other) noexcept nogil:
    cdef const shm_piece *a = (<const shm_piece **>one)[0]
    cdef const shm_piece *b = (<const shm_piece **>other)[0]
    return -1 if a.source < b.source or a.source == b.source and a < b else 1


for _name, _method in vars(Collectives).items():  # what is promised is written once
    if callable(_method) and not _name.startswith("_") and hasattr(Communicator, _name):
        _method.__doc__ = getattr(Communicator, _name).__doc__
