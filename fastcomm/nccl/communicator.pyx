# cython: language_level=3
"""NcclCommunicator: the ranks' GPUs over NCCL, driven directly on streams of its own.

The host does not wait here, but in barrier(): what is launched is ordered by events, after and
before the work of the caller's stream, so that a whole training step can be captured in a CUDA
graph. What would never end is ended by the watchdog, and the next call raises. How the ranks find
each other is bootstrap.py's business: it arrives here as a `bootstrap`.
"""

import torch

from fastcomm.collective import (
    addends_of_mean, canonical_op, check_numel, check_out, check_src, mean_of_addends,
    refuse_tensor, share_of,
)
from fastcomm.communicator import Communicator
from fastcomm.errors import FastcommError
from fastcomm.nccl.bucket import NcclBucket

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

from fastcomm.cuda.driver cimport CUcontext, CUstream, check, driver
from fastcomm.nccl.lane cimport (
    ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Kind, Lane, Ticket,
)
from fastcomm.nccl.library cimport dtype_number, nccl, ncclSuccess, op_number
from fastcomm.nccl.link cimport Link


cdef object TENSOR = torch.Tensor
cdef tuple FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
cdef tuple CALLS = (b"ncclAllReduce", b"ncclBroadcast", b"ncclAllGather", b"ncclReduceScatter")
cdef int UINT8 = dtype_number(torch.uint8)


cdef struct Bytes:
    void *data
    size_t nbytes


@cython.freelist(8)
cdef class NcclWork:
    """A collective that has been launched. Holds its tensors until the caller's stream is ordered
    after it.
    """

    cdef NcclCommunicator comm
    cdef Ticket ticket
    cdef object tensors, divide_by, divided
    cdef int epoch
    cdef bint is_barrier

    def wait(self):
        """Orders the current stream after the collective; blocks for a barrier only. Raises what
        has ended the communicator.
        """
        if self.tensors is None:  # but the current stream may be another one
            self.comm._order_current_after(self.ticket.done)
            if self.divided is not None:
                torch.cuda.current_stream(self.comm.device).wait_event(self.divided)
            return
        self.comm._check_work(self.epoch)
        self.comm._order_current_after(self.ticket.done)
        if self.is_barrier:
            self.comm._wait_for(self.ticket)
        if self.divide_by is not None:
            mean = mean_of_addends(self.tensors[1], self.divide_by)
            self.tensors[0].copy_(mean.view(self.tensors[0].shape))
            if mean.is_cuda:
                self.divided = torch.cuda.current_stream(self.comm.device).record_event()
        self.tensors = None

    def is_completed(self):
        """Whether the result is in place."""
        return self.comm._is_over(self.ticket.done)


@cython.no_gc_clear
cdef class NcclCommunicator(Link):
    """Collectives between `world_size` processes with a GPU each. See
    fastcomm.communicator.Communicator for the contract.

    Made by fastcomm.init. Results are ordered before what the current stream does next; the host
    does not wait for them. An error that ends the communicator is raised by the next call, and by
    every one after it. Beside torch's own NCCL groups: both must launch in the same order on all
    ranks.
    """

    cdef object one  # a tensor for barrier()

    backend = "nccl"
    # the collector must not end what NCCL holds
    leak = "an NcclCommunicator was dropped without close(): NCCL's part of it lives on"
    has_streams = reduces_fp8 = counts_nonfinite = progresses_itself = True
    is_threadsafe = False

    def __repr__(self):
        return (
            f"<NcclCommunicator: rank {self.rank} of {self.world_size} on "
            f"{self.device}{', ended' if self.life.failure else ''}>"
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- memory --

    def empty(self, numel, *, dtype):
        """A flat tensor of `numel` elements in memory that NCCL has allocated and registered,
        uninitialised. Local: no peer is asked.

        The memory lives as long as the tensor, also after close(). Synchronises the device if there
        is memory of dropped tensors to free. Raises ValueError for a negative numel, TypeError for
        a dtype that NCCL does not reduce, NcclError when the memory is used up.
        """
        self._check_open()
        dtype_number(dtype)
        check_numel(numel)
        if numel == 0 or nccl.mem_alloc == NULL:
            return torch.empty(numel, dtype=dtype, device=self.device)
        self._refuse_capture("empty()")
        memory = self.pool.allocate(numel * dtype.itemsize)
        if not self.is_split_up:  # else there is nothing yet to register it with
            self.pool.register(<void *><size_t>memory.data_ptr(), self.lanes[0], False)
        return memory.view(dtype)

    def bind_bucket(
        self, flat, list views, list offsets, *, wire_dtype, uint32_t label, int lane=0
    ):
        """See Communicator.bind_bucket. Collective, where NCCL registers memory as windows. Raises
        TypeError for dtypes without a kernel, or that NCCL does not reduce; InitError without
        kernels.
        """
        self._check_usable()
        wire = flat
        if wire_dtype is not None and wire_dtype is not flat.dtype:
            dtype_number(wire_dtype)
            is_fp8 = wire_dtype in FP8 and flat.is_cuda
            if is_fp8 and torch.cuda.get_device_capability(flat.device) < (9, 0):
                raise TypeError(f"{wire_dtype} is reduced by GPUs of compute capability 9.0 or "
                                "newer")
            wire = self.empty(flat.numel(), dtype=wire_dtype)
            # as bytes: torch has no kernels for some dtypes of one byte
            wire.view(torch.uint8).zero_()
        dtype_number(wire.dtype)
        with self.cuda.selected():
            return NcclBucket(self, flat, views, offsets, wire, label, lane)

    cdef int _refuse_capture(self, str what) except -1:
        if self._note_capture(self.cuda.current_stream()):
            raise FastcommError(f"{what} waits for the device, which cannot be captured in a CUDA "
                                "graph")
        return 0

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        """Reduces `tensor` over all ranks, in place: contiguous, on this device, the same numel and
        dtype on every rank.

        op: sum, mean (alias avg), min, max, prod. A float mean is the sum of tensors scaled
        beforehand; an integer mean is rounded towards zero. 16-bit floats are added as NCCL does
        it, from 3 ranks on with a rounding at each step. With async_op, returns a Work at once:
        leave the tensor alone until work.wait() has ordered the stream that is current then after
        the result. Raises ValueError or TypeError for a bad argument, before any peer is involved,
        and what has ended the communicator.
        """
        op = canonical_op(op)
        self._check(tensor)
        tensor = tensor.detach()
        if op != "mean":
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        if tensor.is_floating_point():
            self._scale(tensor)
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        wide = addends_of_mean(tensor, self.world_size)
        return self._collective(ALL_REDUCE, wide, wide, op, 0, async_op, tensor)

    def broadcast(self, tensor, int src=0, *, bint async_op=False):
        """Copies rank `src`'s `tensor` into every other rank's. Same numel and dtype on every rank.
        Errors as all_reduce.
        """
        self._check(tensor)
        check_src(src, self.world_size)
        return self._collective(BROADCAST, tensor, tensor, None, src, async_op, None)

    def broadcast_all(self, list tensors, int src=0):
        """As broadcast, of many tensors of any dtype, in one launch."""
        for tensor in tensors:
            self._check(tensor)
        check_src(src, self.world_size)
        cdef Lane lane = self.lanes[0]
        cdef Ticket ticket = lane.ticket
        cdef CUcontext before = self.cuda.enter()
        cdef bint is_captured
        cdef int code
        ticket.kind, ticket.dtype, ticket.root = BROADCAST, torch.uint8, src
        ticket.numel = sum([t.nbytes for t in tensors])
        try:
            is_captured = self._note_capture(self.cuda.current_stream())
            self._begin(lane, ticket, None)
            try:
                places = [(t.data_ptr(), t.nbytes) for t in tensors if t.nbytes]
                code = self._launch_group(lane, places, src)
            finally:
                self._end(lane, ticket, is_captured)
            if code != ncclSuccess:
                raise self._error(code, CALLS[BROADCAST])
        except FastcommError as error:
            raise self._reason(error) from error
        finally:
            self.cuda.leave(before)
        self._order_current_after(ticket.done)

    cdef int _launch_group(self, Lane lane, list places, int root) except -1:
        """Broadcasts of (address, bytes). Returns NCCL's code: the first that is not success, but
        the group is ended in any case.
        """
        cdef CUstream current = self.cuda.current_stream(), stream = lane.stream.handle
        cdef size_t n = len(places), i
        cdef Bytes *pieces = <Bytes *>malloc((n + 1) * sizeof(Bytes))
        cdef int code, end
        if pieces == NULL:
            raise MemoryError("out of memory")
        for i in range(n):
            pieces[i] = Bytes(<void *><size_t>places[i][0], places[i][1])
        try:
            with nogil:  # may wait inside NCCL, which connects at the first collective
                check(driver.record_event(lane.ready.handle, current), b"cuEventRecord")
                check(driver.wait_event(stream, lane.ready.handle, 0), b"cuStreamWaitEvent")
                code = nccl.group_start()
                for i in range(n):
                    if code == ncclSuccess:
                        code = nccl.broadcast(pieces[i].data, pieces[i].data, pieces[i].nbytes,
                                              UINT8, root, lane.comm, stream)
                end = nccl.group_end()
                check(driver.record_event(lane.ticket.done.handle, stream), b"cuEventRecord")
        finally:
            free(pieces)
        return code if code != ncclSuccess else end

    def all_gather_single(self, out, inp, *, bint async_op=False):
        """Concatenates every rank's `inp`, by rank, into `out` of world_size * inp.numel()
        elements. Errors as all_reduce.
        """
        self._check(inp)
        self._check_out("all_gather_single", out, inp, inp.numel() * self.world_size)
        return self._collective(ALL_GATHER, inp, out, None, 0, async_op, None)

    def reduce_scatter_single(self, out, inp, op="sum", *, bint async_op=False):
        """Reduces `inp` over all ranks; rank r keeps the r-th of world_size equal parts in `out`.
        Errors as all_reduce.
        """
        op = canonical_op(op)
        self._check(inp)
        numel = share_of("reduce_scatter_single", inp, self.world_size)
        self._check_out("reduce_scatter_single", out, inp, numel)
        if op == "mean" and not inp.is_floating_point():
            rows = addends_of_mean(inp.view(self.world_size, out.numel()), self.world_size)
            wide = torch.empty_like(rows[:, 0])
            parts = rows.transpose(0, 1).contiguous()  # what one rank keeps lies together
            return self._collective(REDUCE_SCATTER, parts, wide, op, 0, async_op, out)
        scaled = self._scale(inp.detach().clone()) if op == "mean" else inp
        return self._collective(REDUCE_SCATTER, scaled, out, op, 0, async_op, None)

    cdef _scale(self, tensor):
        if tensor.dtype in FP8:
            raise TypeError(f"no mean of {tensor.dtype} tensors: use op='sum'")
        return tensor.mul_(1.0 / self.world_size)

    def barrier(self, *, bint async_op=False):
        """Returns when every rank has called it, and all that was launched on the current stream
        before is done.
        """
        self._check_usable()
        self._refuse_capture("barrier()")
        if self.one is None:
            self.one = torch.zeros(1, dtype=torch.uint8, device=self.device)
        work = self._collective(ALL_REDUCE, self.one, self.one, "max", 0, async_op, None)
        if async_op:
            (<NcclWork>work).is_barrier = True
            return work
        self._wait_for((<Lane>self.lanes[0]).ticket)

    # -- the way of every collective --

    cdef int _check(self, tensor) except -1:
        self._check_usable()
        if not isinstance(tensor, TENSOR):
            refuse_tensor(tensor, self.backend, self.device)
        dtype_number(tensor.dtype)
        is_here = tensor.device == self.device and tensor.layout is torch.strided
        if not is_here or not tensor.is_contiguous() or tensor.is_neg():
            refuse_tensor(tensor, self.backend, self.device)
        return 0

    cdef int _check_out(self, str name, out, inp, numel) except -1:
        self._check(out)
        check_out(name, out, inp, numel)
        return 0

    cdef object _collective(self, Kind kind, inp, out, op, int root, bint async_op, divided):
        """Launches on the first lane. divided: where the mean of integers goes that `out` sums up.
        """
        cdef Lane lane = self.lanes[0]
        cdef NcclWork work = NcclWork.__new__(NcclWork)
        cdef Ticket ticket = self._new_ticket() if async_op else lane.ticket
        cdef CUstream current = self.cuda.current_stream()
        cdef CUcontext before = self.cuda.enter()
        cdef bint is_captured
        cdef int code
        try:
            is_captured = self._note_capture(current)
            ticket.kind, ticket.root = kind, root
            ticket.dtype, ticket.numel = inp.dtype, inp.numel()
            self._begin(lane, ticket, op)
            try:
                code = self._launch_on(lane, ticket, current, kind, inp, out, op, root)
            finally:
                self._end(lane, ticket, is_captured)
            if code != ncclSuccess:
                raise self._error(code, CALLS[kind])
        except FastcommError as error:
            raise self._reason(error) from error
        finally:
            self.cuda.leave(before)
        work.comm, work.ticket, work.tensors, work.epoch = self, ticket, (out, inp), self.epoch
        if divided is not None:
            work.tensors, work.divide_by = (divided, out), self.world_size
        if async_op and not is_captured:
            self.in_flight[ticket] = work.tensors  # also of those nobody waits for
        if async_op:
            return work
        work.wait()

    cdef int _launch_on(
        self, Lane lane, Ticket ticket, CUstream current, Kind kind, inp, out, op, int root
    ) except -1:
        """Returns NCCL's code."""
        cdef void *source = <void *><size_t>inp.data_ptr()
        cdef void *target = <void *><size_t>out.data_ptr()
        cdef size_t numel = out.numel() if kind == REDUCE_SCATTER else inp.numel()
        cdef int dtype = dtype_number(inp.dtype), op_code = 0 if op is None else op_number(op), code
        cdef CUstream stream = lane.stream.handle
        with nogil:  # may wait inside NCCL, which connects at the first collective
            check(driver.record_event(lane.ready.handle, current), b"cuEventRecord")
            check(driver.wait_event(stream, lane.ready.handle, 0), b"cuStreamWaitEvent")
            if kind == ALL_REDUCE:
                code = nccl.all_reduce(source, target, numel, dtype, op_code, lane.comm, stream)
            elif kind == BROADCAST:
                code = nccl.broadcast(source, target, numel, dtype, root, lane.comm, stream)
            elif kind == ALL_GATHER:
                code = nccl.all_gather(source, target, numel, dtype, lane.comm, stream)
            else:
                code = nccl.reduce_scatter(source, target, numel, dtype, op_code, lane.comm, stream)
            if code == ncclSuccess:
                check(driver.record_event(ticket.done.handle, stream), b"cuEventRecord")
        return code


Communicator.register(NcclCommunicator)
