# cython: language_level=3
"""Front: the collectives of every communicator. Checks their arguments before any peer is involved,
and fills in what the ranks compare. A transport takes the tensors and runs the collective.

comm/communicator.py says what the collectives promise.
"""

import torch

from fastcomm.comm.coalesced import as_list, check_together, of_tensor, sizes
from fastcomm.comm.collective import (
    CPU_DTYPES, OPS, as_pairs, check_out, check_root, lacks_memory, refuse_dtype,
    refuse_tensor, shard_of,
)
from fastcomm.comm.parts import check_rooted, exchanged
from fastcomm.comm.communicator import Communicator

from libc.stdint cimport uint64_t

from fastcomm.control.announcement cimport *


cdef inline Asked ask(int kind, int op) noexcept:
    cdef Asked asked
    asked.d = announced(kind, op)
    asked.input = asked.output = NULL
    return asked


cdef class Front:
    """The base of all communicators, before Transport. What ends with `except -1` or returns an
    object may raise.
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

    # -- what a transport supplies; one in Python, the methods that are called here --

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

    cdef object _run(self, Asked *asked, inp, out, bint async_op):
        """Runs a collective, or begins it and returns its Work. inp: None where this rank has
        nothing to send. out: None where nothing is written.
        """
        return self.run(call_of(&asked.d), inp, out, async_op)

    cdef object _run_together(
        self, Asked *asked, list tensors, list begins, list numels, bint async_op
    ):
        """As _run, of the all_reduce or the broadcast of many tensors. Those to be broadcast are
        bytes. begins: the addresses of what is to be reduced.
        """
        return self.run_together(call_of(&asked.d), tensors, async_op)

    cdef object _run_parts(self, Asked *asked, inp, out, parts, bint async_op):
        """As _run, of an all_to_all_single whose parts differ in size: a comm.parts.Parts."""
        return self.run_parts(call_of(&asked.d), inp, out, parts, async_op)

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        cdef Asked asked = ask(CALL_ALL_REDUCE, op_code(op))
        taken = self._taken(tensor, &asked.d, &asked.input)
        asked.output = asked.input
        return self._run(&asked, taken, taken, async_op)

    def all_reduce_coalesced(self, tensors, op="sum", *, bint async_op=False):
        cdef Asked asked = ask(CALL_ALL_REDUCE, op_code(op))
        cdef list found, taken = [], numels = [], begins = [], ends = []
        cdef uint64_t numel = 0
        cdef size_t begin, itemsize = 0
        cdef Py_ssize_t i
        found = as_list(tensors)
        for i, tensor in enumerate(found):
            try:
                taken.append(self._taken(tensor, &asked.d, &asked.input))
            except (TypeError, ValueError) as error:
                raise of_tensor(i, error) from None
            if i == 0:  # the others have the same, or are refused
                itemsize = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
            begin = <size_t>asked.input if asked.d.numel else 0
            begins.append(begin)
            ends.append(begin + asked.d.numel * itemsize)
            numels.append(asked.d.numel)
            numel += asked.d.numel
        check_together([tensor.dtype for tensor in found], begins, ends)
        asked.d.numel, asked.d.place, asked.d.steps = numel, PRIVATE_MEMORY, sizes(numels)
        return self._run_together(&asked, taken, begins, numels, async_op)

    def broadcast(self, tensor, src=0, *, bint async_op=False):
        cdef Asked asked = ask(CALL_BROADCAST, SHM_SUM)
        taken = self._taken(tensor, &asked.d, &asked.input)
        check_root("src", src, self.world_size)
        asked.d.root, asked.output = src, asked.input
        return self._run(&asked, taken, None if src == self.rank else taken, async_op)

    def broadcast_all(self, list tensors, src=0):
        """One collective, so that no exception can split it."""
        cdef Asked asked = ask(CALL_BROADCAST, SHM_SUM)
        taken = [self._taken(tensor, &asked.d, &asked.input) for tensor in tensors]
        check_root("src", src, self.world_size)
        flats = [tensor.detach().view(-1).view(torch.uint8) for tensor in taken]
        asked.d.root, asked.d.numel = src, sum(map(len, flats))
        asked.d.dtype = asked.d.wire = dtype_code(torch.uint8)
        self._run_together(&asked, flats, None, None, False)

    def all_gather_single(self, out, inp, *, bint async_op=False):
        cdef Asked asked = ask(CALL_ALL_GATHER, SHM_SUM)
        source = self._taken(inp, &asked.d, &asked.input)
        target = self._taken_out(out, &asked)
        check_out("all_gather_single", out, inp, inp.numel() * self.world_size)
        return self._run(&asked, source, target, async_op)

    def reduce_scatter_single(self, out, inp, op="sum", *, bint async_op=False):
        cdef Asked asked = ask(CALL_REDUCE_SCATTER, op_code(op))
        source = self._taken(inp, &asked.d, &asked.input)
        numel = shard_of("reduce_scatter_single", inp, self.world_size)
        target = self._taken_out(out, &asked)
        check_out("reduce_scatter_single", out, inp, numel)
        return self._run(&asked, source, target, async_op)

    def gather(self, out, inp, dst=0, *, bint async_op=False):
        cdef Asked asked = ask(CALL_GATHER, SHM_SUM)
        source = self._taken(inp, &asked.d, &asked.input)
        target = None if out is None else self._taken_out(out, &asked)
        check_rooted("gather", self, out, inp, dst)
        asked.d.root = dst
        return self._run(&asked, source, target, async_op)

    def scatter(self, out, inp, src=0, *, bint async_op=False):
        cdef Asked asked = ask(CALL_SCATTER, SHM_SUM), of_inp = asked
        target = self._taken(out, &asked.d, &asked.output)
        source = None if inp is None else self._taken(inp, &of_inp.d, &asked.input)
        check_rooted("scatter", self, inp, out, src)
        asked.d.root, asked.d.place = src, PRIVATE_MEMORY  # of an input that the others do not have
        return self._run(&asked, source, target, async_op)

    def all_to_all_single(self, out, inp, out_splits=None, in_splits=None, *, bint async_op=False):
        cdef Asked asked = ask(CALL_ALL_TO_ALL, SHM_SUM)
        source = self._taken(inp, &asked.d, &asked.input)
        target = self._taken_out(out, &asked)
        if out_splits is not None or in_splits is not None:
            self.refuse_capture("all_to_all_single() with splits")
        parts = exchanged(self, out, inp, out_splits, in_splits)
        if parts is None:
            return self._run(&asked, source, target, async_op)
        asked.d.numel = parts.numel
        return self._run_parts(&asked, source, target, parts, async_op)

    def barrier(self, *, bint async_op=False):
        cdef Asked asked = ask(CALL_BARRIER, SHM_SUM)
        self._check_usable()
        return self._run(&asked, None, None, async_op)

    def check_tensor(self, tensor):
        cdef Asked asked = ask(CALL_BROADCAST, SHM_SUM)
        self._taken(tensor, &asked.d, &asked.input)

    cdef object _taken_out(self, tensor, Asked *asked):
        """As _taken, of an output that the ranks do not compare."""
        cdef announcement of_out = asked.d
        return self._taken(tensor, &of_out, &asked.output)

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


for _name, _method in vars(Front).items():  # what is promised is written once
    if callable(_method) and not _name.startswith("_") and hasattr(Communicator, _name):
        _method.__doc__ = getattr(Communicator, _name).__doc__
