# cython: language_level=3
"""NcclCommunicator: the ranks' GPUs over NCCL, driven directly on fastcomm's streams.

The host waits only in barrier(). Events order each launch after and before the work of the caller's
stream, so that a whole training step can be captured in a CUDA graph. The watchdog ends what would
never end, and the next call raises. The ranks find each other through the `bootstrap`; see
bootstrap.py.
"""


import torch

from fastcomm.comm.coalesced import checked_together, sizes
from fastcomm.comm.collective import (
    WIRE_DTYPES, addends_of_mean, as_pairs, canonical_op, check_numel, check_out, check_root,
    lacks_memory, mean_of_addends, real_numel, refuse_error_feedback, refuse_tensor, shard_of,
)
from fastcomm.comm.communicator import Work
from fastcomm.comm.parts import exchanged, rooted
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.transports.cuda.clock import Mark
from fastcomm.transports.nccl import rounds
from fastcomm.transports.nccl.block_wire import BlockWire
from fastcomm.transports.nccl.bucket import NcclBucket

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from fastcomm.transports.cuda.clock cimport DeviceClock
from fastcomm.transports.cuda.driver cimport (
    CUcontext, CUstream, Device, Event, check, driver, order_streams,
)
from fastcomm.transports.nccl.calls cimport (
    ALL_GATHER, ALL_GATHER_V, ALL_REDUCE, ALL_TO_ALL, BROADCAST, GATHER, REDUCE_SCATTER, SCATTER,
    Call, Kind, all_gather_v, call_all, sends_and_receives,
)
from fastcomm.transports.nccl.lane cimport Lane, InFlight
from fastcomm.transports.nccl.launches cimport Launches
from fastcomm.transports.nccl.library cimport dtype_number, nccl, ncclSuccess, op_number
from fastcomm.transports.nccl.link cimport Link


cdef object TENSOR = torch.Tensor
cdef object INCREMENT_VERSION = torch._C._increment_version  # of tensors in a sequence
cdef tuple FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
cdef int UINT8 = dtype_number(torch.uint8)


@cython.freelist(8)
@cython.no_gc_clear
cdef class NcclWork:
    """A collective that has been launched. Holds its tensors until the caller's stream is ordered
    after it; the in-flight record holds them until it is over, if no wait() has let go of them.
    """

    __reduce_ex__, instead = Work.__reduce_ex__, Work.instead

    cdef Link link
    cdef InFlight in_flight
    cdef object tensors
    cdef object written  # those of the user's that it writes to: a sequence, or None
    cdef list sums  # pairs: the tensor for a mean, and the sum to make it of; else None
    cdef Event divided  # recorded after the division, where one is made
    cdef int epoch
    cdef uint64_t number  # among those of the epoch
    cdef CUstream launched_on  # the stream that was current then
    cdef bint is_barrier, has_own_record, is_captured

    def __dealloc__(self):
        if self.has_own_record:
            self.link.launches.unused.append(self.in_flight)

    def wait(self):
        """Orders the current stream after the collective; blocks only for a barrier. Raises the
        error that has ended the communicator.
        """
        if self.tensors is None:  # waited for already, perhaps on another stream
            if self.is_captured:  # nothing may wait across the end of a capture
                return
            self.link.cuda.order_current_after(self.in_flight.done)
            if self.divided is not None:
                self.link.cuda.order_current_after(self.divided)
            return
        cdef CUstream current
        self.link.check_work(self.epoch, self.number)
        current = self.link.cuda.order_current_after(self.in_flight.done)
        if self.is_barrier:
            self.link.wait_for(self.in_flight)
        if self.sums is not None:
            self._divide(current)
        if self.written is not None:  # whoever saw them since the call
            INCREMENT_VERSION(self.written)
        self.tensors = self.written = None
        if current == self.launched_on:  # else that stream could use their memory too early
            self.in_flight.tensors = None

    cdef _divide(self, CUstream current):
        """Makes means of sums, on the current stream."""
        cdef Device cuda = self.link.cuda
        cdef int n = self.link.world_size
        for out, total in self.sums:
            if total is out:
                out.mul_(1.0 / n)
                continue
            out.copy_(mean_of_addends(total, n).view(out.shape))
            # The record lets go of `total` when the sum is there, perhaps before it is divided.
            if current != self.launched_on and cuda.record_stream is not None:
                cuda.record_stream(total)
        self.sums = None
        if self.has_own_record:  # else nobody waits again
            self.divided = Event(cuda)
            with nogil:  # may wait for room in the device's queue
                cuda.record(self.divided, current)

    def is_completed(self):
        """Whether the result is in place. True for what was captured: nobody may ask for that."""
        return self.is_captured or self.in_flight.done.is_over()


@cython.no_gc_clear
cdef class NcclCommunicator:
    """Collectives between `world_size` processes with a GPU each. See
    fastcomm.comm.transport.Transport for the contract.

    Made by fastcomm.init. Results are ordered before what the current stream does next; the host
    does not wait for them. An error that ends the communicator is raised by the next call, and by
    every one after it. Beside torch's own NCCL groups: both must launch in the same order on all
    ranks.
    """

    cdef readonly int rank, world_size, local_rank
    cdef public object membership, open_join  # see Transport
    # in a join(), while a round is open: n_abandoned when it began; else -1
    cdef public int begun_after
    cdef readonly object device, timeout
    cdef readonly tuple processes
    cdef readonly Device cuda
    cdef object __weakref__
    cdef Link link
    cdef object one  # a tensor for barrier()

    backend = "nccl"
    has_streams = progresses_itself = True
    is_threadsafe = feeds_back_errors = False
    crosses_network = False
    wire_dtypes = (*WIRE_DTYPES, *FP8, torch.int8)
    __enter__, __exit__ = Transport.__enter__, Transport.__exit__
    __copy__, __deepcopy__ = Transport.__copy__, Transport.__deepcopy__
    __reduce_ex__, instead = Transport.__reduce_ex__, Transport.instead
    rebuild, split = Transport.rebuild, Transport.split
    send, recv, end_channels = Transport.send, Transport.recv, Transport.end_channels
    n_abandoned, failure = Transport.n_abandoned, Transport.failure
    begin_round, follow, refuse_vote = rounds.begin_round, rounds.follow, rounds.refuse_vote

    def __cinit__(
        self, int rank, int world_size, int local_rank, object bootstrap, object timeout,
        object device, list neighbours,
    ):
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device, self.timeout, self.begun_after = device, timeout, -1
        self.link = Link(
            rank, world_size, bootstrap, timeout.total_seconds(), device, neighbours
        )
        self.processes, self.cuda = self.link.processes, self.link.cuda

    def close(self, double timeout=30):
        """Ends the use of this communicator on this rank, when what was launched is done, or after
        `timeout` seconds. Tensors stay valid.

        Peers that still wait for this rank get PeerLostError. Raises FastcommError while a CUDA
        graph that has captured collectives is alive, because NCCL would wait for it for ever;
        TimeoutError or NcclError if the communicator did not end in order. May be called twice.
        """
        if self.link.graphs.count() == 0:
            self.end_channels(aborts=False)
        self.link.close(timeout)

    def abort(self):
        """Ends the use of this communicator at once, on this rank and, by PeerLostError, on the
        others.
        """
        self.end_channels(aborts=True)
        self.link.abort()

    def abandon(self, *, bint in_any_case=False):
        """Ends NCCL's communicators on every rank; the ranks meet again at their next collective.

        What other ranks have launched in this round is lost. They may learn of it a step later.
        What came before the round all ranks have, also one that is late.
        """
        self.link.check_open()
        if not in_any_case and self.link.life.is_told():
            return
        self.link.abandon()
        if not in_any_case:
            self.link.life.leave_backward(self.rank)

    def keep_times(self, bint is_on):
        """At first waits for the current stream."""
        self.link.n_timekeepers += 1 if is_on else -1
        if self.link.n_timekeepers == 0:
            self.link.clock = None
        elif self.link.clock is None:
            self.link.clock = DeviceClock(self.link.cuda)

    @property
    def has_captured(self):
        return self.is_captured() or self.link.graphs.newest != 0

    def mark(self):
        if self.is_captured():
            return None
        try:
            return Mark(self.cuda)
        except FastcommError:  # a device that fails is told of by what matters more
            return None

    def end_round(self):
        """What was launched so far is not abandoned with what comes."""
        cdef Link link = self.link
        self.begun_after = -1
        link.life.settle()
        link.n_settled = 0 if link.is_split_up else link.launches.number

    def check(self):
        self.link.hear()

    @property
    def flight(self):
        return self.link.launches.flight

    @property
    def standing(self):
        return self.link.life

    def __repr__(self):
        return (
            f"<NcclCommunicator: rank {self.rank} of {self.world_size} on "
            f"{self.device}{', ended' if self.link.life.failure else ''}>"
        )

    # -- memory --

    def empty(self, numel, *, dtype):
        """A flat tensor of `numel` elements in memory that NCCL has allocated, uninitialised. A
        bucket made of it is a window. Local: no peer is asked.

        The memory lives as long as the tensor, also after close(). Synchronises the device if there
        is memory of dropped tensors to free. Raises ValueError for a negative numel, TypeError for
        a dtype that NCCL does not reduce, NcclError when the memory is used up.
        """
        self.link.check_open()
        dtype_number(dtype)
        check_numel(numel)
        if numel == 0 or nccl.mem_alloc == NULL:
            return torch.empty(numel, dtype=dtype, device=self.device)
        self.refuse_capture("empty()")
        return self.link.pool.allocate(numel * dtype.itemsize).view(dtype)

    def bind_bucket(
        self, flat, list views, list offsets, *, wire_dtype, uint32_t label, int lane=0,
        tuple bounds=None, bint error_feedback=False,
    ):
        """Collective, where NCCL registers memory as windows. Raises TypeError for dtypes without a
        kernel, or that NCCL does not reduce; InitError without kernels.

        A wire of int8 has a scale for each block, and leaves the whole result whatever the bounds.
        """
        cdef bint is_in_blocks = wire_dtype is torch.int8
        self.link.check_usable()
        if error_feedback:
            refuse_error_feedback(self.backend)
        wire, blocks = flat, None
        if is_in_blocks:
            wire_dtype, bounds = torch.float32, None
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
        if is_in_blocks:
            numels = [real_numel(view) for view in views]
            blocks = BlockWire(self.link, wire, numels, offsets, self.empty)
        return NcclBucket(self.link, flat, views, offsets, wire, label, lane, bounds, blocks)

    def make_window(self, flat, *, uint32_t label):
        """The copy engines gather windows only. Does nothing in a capture."""
        if not self.is_captured():
            self.link.check_usable()
            self.link.register(self.link.lanes[0], flat, label)

    def all_gather_v(self, flat, tuple bounds, *, uint32_t label=0):
        """One launch."""
        self._check(flat)
        cdef NcclWork work = self._new_work(True)
        cdef InFlight in_flight = work.in_flight
        cdef bytearray memory = bytearray(self.world_size * sizeof(Call))
        cdef Call *calls = <Call *><char *>memory
        cdef size_t n
        in_flight.kind, in_flight.label = ALL_GATHER_V, label
        in_flight.dtype, in_flight.numel = flat.dtype, bounds[-1]
        n = all_gather_v(
            calls, <char *><size_t>flat.data_ptr(), flat.element_size(), dtype_number(flat.dtype),
            bounds, self.rank,
        )
        work.written = (flat,)
        self._launch(work, None, calls, n)
        work.tensors = (flat,)
        return self._launched(work, True)

    def add_up(self, numbers):  # for rounds.py
        self.link.check_usable()
        return self._collective(ALL_REDUCE, numbers, numbers, "sum", 0, True, None)

    def is_captured(self):
        return self.link.graphs.note_capture(self.cuda.current_stream())

    def refuse_capture(self, str what):
        if self.is_captured():
            raise FastcommError(f"{what} waits for the device, which cannot be captured in a CUDA "
                                "graph")

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        """A float mean is the sum of tensors scaled beforehand; an integer mean is rounded towards
        zero. 16-bit floats are added as NCCL does it, from 3 ranks on with a rounding at each step.
        wait() of the Work orders the current stream after it.
        """
        op = canonical_op(op)
        tensor = self._check(tensor, op).detach()
        if op != "mean":
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        if tensor.is_floating_point():
            self._scale(tensor)
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        wide = addends_of_mean(tensor, self.world_size)
        return self._collective(ALL_REDUCE, wide, wide, op, 0, async_op, tensor)

    def all_reduce_coalesced(self, tensors, op="sum", *, bint async_op=False):
        """One launch, of a group of calls: the tensors stay where they are."""
        op = canonical_op(op)
        outs = checked_together(tensors, lambda tensor: self._check(tensor, op).detach())
        numels = [tensor.numel() for tensor in outs]
        summed = self._for_mean(outs) if op == "mean" else outs
        dtype = summed[0].dtype
        cdef int dtype_code = dtype_number(dtype), op_code = op_number(op)
        cdef bytearray memory = bytearray(len(outs) * sizeof(Call))
        cdef Call *calls = <Call *><char *>memory
        cdef size_t n = 0
        for tensor in summed:
            if tensor.nbytes:
                data = <void *><size_t>tensor.data_ptr()
                calls[n] = Call(ALL_REDUCE, data, data, tensor.numel(), dtype_code, op_code, 0)
                n += 1
        cdef NcclWork work = self._new_work(async_op)
        self._note(work.in_flight, ALL_REDUCE, dtype, sum(numels), 0)
        work.in_flight.step, work.written = sizes(numels), outs
        self._launch(work, op, calls, n)
        work.tensors = (*outs, *summed)
        if summed is not outs:
            work.sums = list(zip(outs, summed))
        return self._launched(work, async_op)

    cdef list _for_mean(self, list tensors):
        """What is summed for means of these: they themselves, scaled, or of integers other
        tensors.
        """
        if not tensors[0].is_floating_point():
            return [addends_of_mean(tensor, self.world_size) for tensor in tensors]
        self._refuse_mean_of_fp8(tensors[0])
        torch._foreach_mul_(tensors, 1.0 / self.world_size)
        return tensors

    def broadcast(self, tensor, int src=0, *, bint async_op=False):
        tensor = self._check(tensor)
        check_root("src", src, self.world_size)
        return self._collective(BROADCAST, tensor, tensor, None, src, async_op, None)

    def broadcast_all(self, list tensors, int src=0):
        """Broadcasts many tensors of any dtype, in one launch."""
        tensors = [self._check(tensor) for tensor in tensors]
        check_root("src", src, self.world_size)
        cdef NcclWork work = self._new_work(False)
        cdef InFlight in_flight = work.in_flight
        cdef bytearray memory = bytearray((len(tensors) + 1) * sizeof(Call))
        cdef Call *calls = <Call *><char *>memory
        cdef size_t n = 0
        for tensor in tensors:
            if tensor.nbytes:
                data = <void *><size_t>tensor.data_ptr()
                calls[n] = Call(BROADCAST, data, data, tensor.nbytes, UINT8, 0, src)
                n += 1
        in_flight.kind, in_flight.dtype, in_flight.root = BROADCAST, torch.uint8, src
        work.written = None if src == self.rank else tensors
        in_flight.numel = sum([tensor.nbytes for tensor in tensors])
        self._launch(work, None, calls, n)
        self.cuda.order_current_after(in_flight.done)

    def all_gather_single(self, out, inp, *, bint async_op=False):
        source = self._check(inp)
        out = self._check_out("all_gather_single", out, inp, inp.numel() * self.world_size)
        return self._collective(ALL_GATHER, source, out, None, 0, async_op, None)

    def reduce_scatter_single(self, out, inp, op="sum", *, bint async_op=False):
        """A float mean is a sum that is scaled, when wait() has ordered the current stream after
        it; of float16, a sum of what was scaled beforehand.
        """
        op = canonical_op(op)
        source = self._check(inp, op)
        numel = shard_of("reduce_scatter_single", inp, self.world_size)
        out, inp = self._check_out("reduce_scatter_single", out, inp, numel), source
        if op == "mean" and not inp.is_floating_point():
            rows = addends_of_mean(inp.view(self.world_size, out.numel()), self.world_size)
            wide = torch.empty_like(rows[:, 0])
            parts = rows.transpose(0, 1).contiguous()  # what one rank keeps lies together
            return self._collective(REDUCE_SCATTER, parts, wide, op, 0, async_op, out)
        if op != "mean":
            return self._collective(REDUCE_SCATTER, inp, out, op, 0, async_op, None)
        self._refuse_mean_of_fp8(inp)
        out = out.detach()
        if inp.dtype is torch.float16:  # of which the sum may overflow
            scaled = inp.detach() * (1.0 / self.world_size)
            return self._collective(REDUCE_SCATTER, scaled, out, op, 0, async_op, None)
        return self._collective(REDUCE_SCATTER, inp, out, op, 0, async_op, out)

    cdef _scale(self, tensor):
        self._refuse_mean_of_fp8(tensor)
        return tensor.mul_(1.0 / self.world_size)

    cdef _refuse_mean_of_fp8(self, tensor):
        if tensor.dtype in FP8:
            raise TypeError(f"no mean of {tensor.dtype} tensors: use op='sum'")

    # One group of sends and receives.

    def gather(self, out, inp, int dst=0, *, bint async_op=False):
        source, target = self._check(inp), None if out is None else self._check(out)
        parts = rooted("gather", self, out, inp, dst)
        return self._exchange_parts(GATHER, target, source, parts, dst, async_op)

    def scatter(self, out, inp, int src=0, *, bint async_op=False):
        source, target = None if inp is None else self._check(inp), self._check(out)
        parts = rooted("scatter", self, inp, out, src)
        return self._exchange_parts(SCATTER, target, source, parts, src, async_op)

    def all_to_all_single(self, out, inp, out_splits=None, in_splits=None, *, bint async_op=False):
        source, target = self._check(inp), self._check(out)
        if out_splits is not None or in_splits is not None:
            self.refuse_capture("all_to_all_single() with splits")
        parts = exchanged(self, out, inp, out_splits, in_splits)
        return self._exchange_parts(ALL_TO_ALL, target, source, parts, 0, async_op)

    def barrier(self, *, bint async_op=False):
        """Returns when every rank has called it, and all that was launched on the current stream
        before is done.
        """
        self.link.check_usable()
        rounds.refuse_in_join(self)
        self.refuse_capture("barrier()")
        if self.one is None:
            self.one = torch.zeros(1, dtype=torch.uint8, device=self.device)
        work = self._collective(ALL_REDUCE, self.one, self.one, "max", 0, async_op, None)
        if async_op:
            (<NcclWork>work).is_barrier = True
            return work
        self.link.wait_for((<Lane>self.link.lanes[0]).in_flight)

    # -- how every collective is launched --

    @property
    def buckets(self):
        return list(self.link.buckets)

    def check_tensor(self, tensor):
        """Also in a join(): what two ranks do alone the others need not hear of."""
        self.link.check_usable()
        self._as_taken(tensor, "sum")

    cdef object _check(self, tensor, str op="sum"):
        """As _as_taken, where a collective may begin."""
        self.link.check_usable()
        rounds.refuse_in_join(self)
        return self._as_taken(tensor, op)

    cdef object _as_taken(self, tensor, str op):
        """Returns the tensor, a complex one as pairs. op: what it is reduced by."""
        if not isinstance(tensor, TENSOR):
            refuse_tensor(tensor, self.backend, self.device)
        is_here = tensor.device == self.device and tensor.layout is torch.strided
        if is_here and tensor.dtype.is_complex:
            tensor = as_pairs(tensor, op)
        dtype_number(tensor.dtype)
        if (not is_here or not tensor.is_contiguous() or tensor.is_neg()
                or lacks_memory(tensor)):
            refuse_tensor(tensor, self.backend, self.device)
        return tensor

    cdef object _check_out(self, str name, out, inp, numel):
        checked = self._check(out)
        check_out(name, out, inp, numel)
        return checked

    cdef object _collective(self, Kind kind, inp, out, op, int root, bint async_op, divided):
        """Launches one collective. divided: the tensor for the mean of what is summed in `out`."""
        cdef NcclWork work = self._new_work(async_op)
        cdef Call call
        call.kind, call.root, call.dtype = kind, root, dtype_number(inp.dtype)
        call.source, call.target = <void *><size_t>inp.data_ptr(), <void *><size_t>out.data_ptr()
        call.numel = out.numel() if kind == REDUCE_SCATTER else inp.numel()
        call.op = 0 if op is None else op_number(op)
        self._note(work.in_flight, kind, inp.dtype, inp.numel(), root)
        if kind != BROADCAST or root != self.rank:
            work.written = (out if divided is None else divided,)
        self._launch(work, op, &call, 1)
        work.tensors = (out, inp)
        if divided is not None:
            work.tensors, work.sums = (divided, out, inp), [(divided, out)]
        return self._launched(work, async_op)

    cdef object _exchange_parts(
        self, Kind kind, target, source, parts, int root, bint async_op
    ):
        """target, source: None where this rank has nothing to receive or to send."""
        cdef NcclWork work = self._new_work(async_op)
        cdef size_t n
        cdef char *to = NULL if target is None else <char *><size_t>target.data_ptr()
        cdef char *origin = NULL if source is None else <char *><size_t>source.data_ptr()
        cdef bytearray memory = bytearray(2 * self.world_size * sizeof(Call))
        cdef Call *calls = <Call *><char *>memory
        dtype = target.dtype if source is None else source.dtype
        n = sends_and_receives(
            calls, origin, to, parts.sent, parts.received, dtype.itemsize, dtype_number(dtype)
        )
        self._note(work.in_flight, kind, dtype, parts.numel, root)
        work.written = None if target is None else (target,)
        self._launch(work, None, calls, n)
        work.tensors = (target, source)
        return self._launched(work, async_op)

    cdef int _note(self, InFlight in_flight, Kind kind, dtype, size_t numel, int root) except -1:
        """What the ranks call, for messages."""
        in_flight.kind, in_flight.root, in_flight.label = kind, root, 0
        in_flight.dtype, in_flight.numel = dtype, numel
        return 0

    cdef object _launched(self, NcclWork work, bint async_op):
        if async_op and not work.is_captured:
            work.in_flight.tensors = work.tensors  # kept also if nobody waits
        if async_op:
            return work
        work.wait()

    cdef NcclWork _new_work(self, bint is_async):
        """A collective that is about to be launched on the first lane."""
        cdef NcclWork work = NcclWork.__new__(NcclWork)
        cdef Launches launches = self.link.launches
        work.link, work.launched_on = self.link, self.cuda.current_stream()
        work.is_captured = self.link.graphs.note_capture(work.launched_on)
        if work.is_captured:
            work.in_flight = launches.new_record()
        elif is_async:
            work.in_flight, work.has_own_record = launches.take_record(), True
        else:
            work.in_flight = (<Lane>self.link.lanes[0]).in_flight
        work.in_flight.step = 0
        return work

    cdef int _launch(self, NcclWork work, op, Call *calls, size_t n) except -1:
        """Launches on the first lane, after the work of the current stream."""
        cdef Link link = self.link
        cdef Lane lane = link.lanes[0]
        cdef InFlight in_flight = work.in_flight
        cdef CUstream current = work.launched_on
        cdef const char *failed = NULL
        cdef int code
        if work.written is not None:
            INCREMENT_VERSION(work.written)
        try:
            link.launches.begin(lane, in_flight, op)
            work.epoch, work.number = link.epoch, in_flight.number
            try:
                with nogil:  # may wait inside NCCL, which connects at the first collective
                    code = _launch_on(lane, in_flight, current, calls, n, &failed)
            finally:
                link.launches.end(lane, in_flight, work.is_captured)
            if code != ncclSuccess:
                raise link.error(code, failed)
        except FastcommError as error:
            raise link.reason(error) from error
        return 0


cdef int _launch_on(
    Lane lane, InFlight in_flight, CUstream current, Call *calls, size_t n, const char **failed
) except -1 nogil:
    """Returns NCCL's code. failed: see call_all()."""
    cdef CUstream stream = lane.stream.handle
    cdef CUcontext before = lane.device.enter()
    cdef int code
    try:
        order_streams(stream, lane.ready.handle, current)
        code = call_all(calls, n, lane.comm, stream, failed)
        if code == ncclSuccess:
            check(driver.record_event(in_flight.done.handle, stream), b"cuEventRecord")
    finally:
        lane.device.leave(before)
    return code


Transport.register(NcclCommunicator)
