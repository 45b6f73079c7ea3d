# cython: language_level=3
"""NcclCommunicator: the ranks' GPUs over NCCL, driven directly on fastcomm's streams.

The host waits only in barrier(). Events order each launch after and before the work of the caller's
stream, so that a whole training step can be captured in a CUDA graph. The watchdog ends what would
never end, and the next call raises. The ranks find each other through the `bootstrap`; see
bootstrap.py.
"""

import torch

from fastcomm.comm.collective import (
    OPS, WIRE_DTYPES, addends_of_mean, mean_of_addends, real_numel,
    refuse_error_feedback,
)
from fastcomm.comm.communicator import Work
from fastcomm.comm.parts import equal_parts
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.transports.cuda.clock import Mark
from fastcomm.transports.nccl import rounds
from fastcomm.transports.nccl.bucket import BlockWire, NcclBucket

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from fastcomm.control.announcement cimport *
from fastcomm.control.collectives cimport Collective, Collectives
from fastcomm.transports.cuda.clock cimport DeviceClock
from fastcomm.transports.cuda.driver cimport (
    CUcontext, CUstream, Device, Event, check, driver, order_streams,
)
from fastcomm.transports.nccl.calls cimport (
    ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, NcclCall, Kind, all_gather_v, call_all,
    sends_and_receives,
)
from fastcomm.transports.nccl.lane cimport InFlight, Lane, Launches
from fastcomm.transports.nccl.library cimport dtype_number, nccl, ncclSuccess, op_number
from fastcomm.transports.nccl.link cimport Link


cdef object INCREMENT_VERSION = torch._C._increment_version  # of tensors in a sequence
# By Kind, of what one call of NCCL's does.
cdef tuple NAMES = ("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single")
cdef tuple FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
cdef class NcclCommunicator(Collectives, Transport):
    """Collectives between `world_size` processes with a GPU each. See
    fastcomm.comm.transport.Transport for the contract.

    Made by fastcomm.init. Results are ordered before what the current stream does next; the host
    does not wait for them. An error that ends the communicator is raised by the next call, and by
    every one after it. Beside torch's own NCCL groups: both must launch in the same order on all
    ranks.
    """

    # in a join(), while a round is open: n_abandoned when it began; else -1
    cdef public int begun_after
    cdef readonly Device cuda
    cdef Link link
    cdef object one  # a tensor for barrier()

    backend = "nccl"
    has_streams = progresses_itself = True
    is_threadsafe = feeds_back_errors = False
    crosses_network = adds_by_tree = False
    wire_dtypes = (*WIRE_DTYPES, *FP8, torch.int8)
    begin_round, follow, refuse_vote = rounds.begin_round, rounds.follow, rounds.refuse_vote

    def __cinit__(
        self, int rank, int world_size, int local_rank, object bootstrap, object timeout,
        object device, list neighbours,
    ):
        self.device, self.begun_after = device, -1
        self.link = Link(
            rank, world_size, bootstrap, timeout.total_seconds(), device, neighbours
        )
        self.processes, self.cuda = self.link.processes, self.link.cuda
        self.standing, self.flight = self.link.standing, self.link.launches.flight

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

    def _abort(self):
        self.link.abort()

    def _abandon(self):
        """What other ranks have launched in this round is lost. They may learn of it a step later.
        What came before the round all ranks have, also one that is late.
        """
        self.link.check_open()
        self.link.abandon()

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
        link.standing.forget_abandonment()
        link.n_settled = 0 if link.is_split_up else link.launches.number

    def check(self):
        self.link.hear()

    # -- memory --

    def _empty(self, numel, dtype):
        """A bucket made of it is a window. Synchronises the device if there is memory of dropped
        tensors to free. Raises NcclError when the memory is used up.
        """
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
        self.check_tensor(flat)
        rounds.refuse_in_join(self)
        cdef NcclWork work = self._new_work("all_gather_v", flat.dtype, bounds[-1], 0, True)
        cdef bytearray memory = bytearray(self.world_size * sizeof(NcclCall))
        cdef NcclCall *calls = <NcclCall *><char *>memory
        cdef size_t n
        work.in_flight.label = label
        n = all_gather_v(
            calls, <char *><size_t>flat.data_ptr(), flat.element_size(), dtype_number(flat.dtype),
            bounds, self.rank,
        )
        work.written = (flat,)
        return self._launch(work, None, calls, n, (flat,), True)

    def add_up(self, numbers):  # for rounds.py
        self.link.check_usable()
        return self._collective(ALL_REDUCE, numbers, numbers, "sum", 0, True, None)

    def is_captured(self):
        return self.link.graphs.note_capture(self.cuda.current_stream())

    def refuse_capture(self, str what):
        if self.is_captured():
            raise FastcommError(f"{what} waits for the device, which cannot be captured in a CUDA "
                                "graph")

    # -- collectives: see Collectives --

    cdef int _check_usable(self) except -1:
        self.link.check_usable()
        rounds.refuse_in_join(self)
        return 0

    cdef int _check_dtype(self, dtype) except -1:
        dtype_number(dtype)
        return 0

    cdef object _run(self, Collective *it, inp, out, bint async_op):
        cdef announcement *d = &it.d
        if d.kind == CALL_ALL_REDUCE:
            return self._all_reduce(inp.detach(), OPS[d.op], async_op)
        if d.kind == CALL_BROADCAST:
            return self._collective(BROADCAST, inp, inp, None, d.root, async_op, None)
        if d.kind == CALL_ALL_GATHER:
            return self._collective(ALL_GATHER, inp, out, None, 0, async_op, None)
        if d.kind == CALL_REDUCE_SCATTER:
            return self._reduce_scatter(out, inp, OPS[d.op], async_op)
        if d.kind == CALL_BARRIER:
            return self._barrier(async_op)
        parts = equal_parts(kind_of(d), self, d.numel, d.root)
        return self._run_parts(it, inp, out, parts, async_op)

    cdef object _all_reduce(self, tensor, op, bint async_op):
        """A float mean is the sum of tensors scaled beforehand; an integer mean is rounded towards
        zero. 16-bit floats are added as NCCL does it, from 3 ranks on with a rounding at each step.
        """
        if op != "mean":
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        if tensor.is_floating_point():
            self._refuse_mean_of_fp8(tensor)
            tensor.mul_(1.0 / self.world_size)
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        wide = addends_of_mean(tensor, self.world_size)
        return self._collective(ALL_REDUCE, wide, wide, op, 0, async_op, tensor)

    cdef object _run_together(self, Collective *it, list tensors, bint async_op):
        """One launch, of a group of calls: the tensors stay where they are."""
        cdef Kind kind = ALL_REDUCE if it.d.kind == CALL_ALL_REDUCE else BROADCAST
        op, outs = None, [tensor.detach() for tensor in tensors]
        if kind == ALL_REDUCE:
            op = OPS[it.d.op]
        summed = self._for_mean(outs) if op == "mean" else outs
        dtype = summed[0].dtype if summed else torch.uint8
        cdef NcclWork work = self._new_work(
            kind_of(&it.d), dtype, it.d.numel, it.d.root, async_op
        )
        cdef int dtype_code = dtype_number(dtype), op_code = 0 if op is None else op_number(op)
        cdef bytearray memory = bytearray((len(outs) + 1) * sizeof(NcclCall))
        cdef NcclCall *calls = <NcclCall *><char *>memory
        cdef size_t n = 0
        for tensor in summed:
            if tensor.nbytes:
                data = <void *><size_t>tensor.data_ptr()
                calls[n] = NcclCall(
                    kind, data, data, tensor.numel(), dtype_code, op_code, it.d.root
                )
                n += 1
        work.in_flight.fingerprint = it.d.fingerprint
        if kind == ALL_REDUCE or it.d.root != self.rank:
            work.written = outs
        if summed is not outs:
            work.sums = list(zip(outs, summed))
        return self._launch(work, op, calls, n, (*outs, *summed), async_op)

    cdef list _for_mean(self, list tensors):
        """What is summed for means of these: they themselves, scaled, or of integers other
        tensors.
        """
        if not tensors[0].is_floating_point():
            return [addends_of_mean(tensor, self.world_size) for tensor in tensors]
        self._refuse_mean_of_fp8(tensors[0])
        torch._foreach_mul_(tensors, 1.0 / self.world_size)
        return tensors

    cdef object _reduce_scatter(self, out, inp, op, bint async_op):
        """A float mean is a sum that is scaled, when wait() has ordered the current stream after
        it; of float16, a sum of what was scaled beforehand.
        """
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

    cdef _refuse_mean_of_fp8(self, tensor):
        if tensor.dtype in FP8:
            raise TypeError(f"no mean of {tensor.dtype} tensors: use op='sum'")

    cdef object _barrier(self, bint async_op):
        """Over when all that was launched on the current stream before is done, too."""
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
        self._viewed(tensor, "sum")

    cdef object _collective(self, Kind kind, inp, out, op, int root, bint async_op, divided):
        """Launches one collective. divided: the tensor for the mean of what is summed in `out`."""
        cdef NcclWork work = self._new_work(
            NAMES[<int>kind], inp.dtype, inp.numel(), root, async_op
        )
        cdef NcclCall call
        call.kind, call.root, call.dtype = kind, root, dtype_number(inp.dtype)
        call.source, call.target = <void *><size_t>inp.data_ptr(), <void *><size_t>out.data_ptr()
        call.numel = out.numel() if kind == REDUCE_SCATTER else inp.numel()
        call.op = 0 if op is None else op_number(op)
        if kind != BROADCAST or root != self.rank:
            work.written = (out if divided is None else divided,)
        if divided is not None:
            work.sums = [(divided, out)]
        return self._launch(work, op, &call, 1, (divided, out, inp), async_op)

    cdef object _run_parts(self, Collective *it, inp, out, parts, bint async_op):
        """One group of sends and receives."""
        dtype = out.dtype if inp is None else inp.dtype
        cdef NcclWork work = self._new_work(
            kind_of(&it.d), dtype, parts.numel, it.d.root, async_op
        )
        cdef bytearray memory = bytearray(2 * self.world_size * sizeof(NcclCall))
        cdef NcclCall *calls = <NcclCall *><char *>memory
        cdef size_t n = sends_and_receives(
            calls, it.input, it.output, parts.sent, parts.received, dtype.itemsize,
            dtype_number(dtype),
        )
        work.written = None if out is None else (out,)
        return self._launch(work, None, calls, n, (out, inp), async_op)

    cdef NcclWork _new_work(self, str kind, dtype, size_t numel, int root, bint is_async):
        """A collective that is about to be launched on the first lane, and what it is called in
        messages.
        """
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
        work.in_flight.kind, work.in_flight.root = kind, root
        work.in_flight.dtype, work.in_flight.numel = dtype, numel
        work.in_flight.label = work.in_flight.fingerprint = 0
        return work

    cdef object _launch(
        self, NcclWork work, op, NcclCall *calls, size_t n, tuple tensors, bint async_op
    ):
        """Launches on the first lane, after the work of the current stream. Returns the Work, or
        waits. tensors: kept until it is over.
        """
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
        work.tensors = tensors
        if not async_op:
            work.wait()
            return None
        if not work.is_captured:
            in_flight.tensors = tensors  # kept also if nobody waits
        return work


cdef int _launch_on(
    Lane lane, InFlight in_flight, CUstream current, NcclCall *calls, size_t n, const char **failed
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
