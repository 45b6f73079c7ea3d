# cython: language_level=3
"""NcclBucket: reduces a flat buffer over NCCL. One call launches all steps: it gathers the
gradients from where autograd has put them, reduces them, and scatters the result. BlockWire reduces
in 8 bits, which NCCL does not.
"""

import torch

from fastcomm.comm.collective import WEIGHTED_OPS, real_numel
from fastcomm.comm.transport import ALIKE, BoundBucket, BucketWork
from fastcomm.transports.cuda.blocks import covered_bits

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from fastcomm.transports.cuda.blocks cimport BLOCK_NUMEL, BlockKernels, coded_block
from fastcomm.transports.cuda.clock cimport Span
from fastcomm.transports.cuda.driver cimport (
    CUcontext, CUevent, CUstream, Event, Producers, check, driver, order_streams,
)
from fastcomm.transports.cuda.multi_tensor cimport MultiTensor
from fastcomm.comm.gathering cimport GatheringBucket
from fastcomm.comm.gradient_slot cimport GradientSlot
from fastcomm.transports.nccl.calls cimport (
    ALL_GATHER, ALL_REDUCE, RECV, SEND, NcclCall, call_all, reduce_scatter_v,
)
from fastcomm.transports.nccl.lane cimport Lane, InFlight
from fastcomm.transports.nccl.library cimport dtype_number, ncclComm_t, ncclSuccess, op_number
from fastcomm.transports.nccl.link cimport Link


cdef size_t ALIGNED = 4  # blocks of a row: NCCL copies 16 bytes at a time if rows begin there
cdef int MAX_KEPT = 2  # buckets whose gradients are kept until they have been flattened


cdef class BlockWire:
    """Reduces the float32 elements of a bucket by bytes with a scale for every 256. NCCL only moves
    them; kernels add, in float32.

    The elements are cut into a row for each rank, of whole blocks, which may go on behind their
    end. Each rank sends every other rank its row, adds up its own row, encodes the sum, and sends
    that to all. All ranks decode the same bytes, also the rank that has made them, so that they end
    with the same bits. The rank's own part of the sum is not rounded before it is added.

    wire: a flat float32 tensor, with the gradients of these numels at these offsets, and at the
    end one element for each, the used mask: no rounding may change that, so it is reduced as it is.

    allocate: of the communicator, for memory that outlives what is launched on it.
    """

    cdef BlockKernels kernels
    cdef object memory
    cdef int rank, world_size
    cdef float *values
    cdef size_t numel
    cdef uint32_t *covered
    cdef uint32_t n_blocks  # of a row
    cdef coded_block *coded  # a row for each rank, here and in `received`
    cdef coded_block *received
    cdef NcclCall *calls
    cdef size_t n_calls  # of the first group; two more are the second

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


@cython.freelist(8)
cdef class NcclBucketWork:
    """The reduction of a bucket, under way or over."""

    cdef NcclBucket bucket
    cdef InFlight in_flight  # the bucket's, or another one if it was captured
    cdef object op, own_mask
    cdef int epoch
    cdef uint64_t number  # among those of the epoch
    cdef bint is_captured, is_awaited
    cdef CUstream awaited_on  # the stream that wait() ordered after the work
    cdef readonly list kept  # gradients that are flattened beside the stream that launched
    cdef CUstream launched_on
    cdef Span span  # of the times that somebody asks for; or None

    def wait(self):
        """Orders the current stream after the result. Raises if this rank has lost a peer."""
        self.bucket.link.check_work(self.epoch, self.number)
        self.awaited_on = self.bucket.link.cuda.order_current_after(self.in_flight.done)
        self.is_awaited = True
        self.drop_gradients(self.awaited_on)

    cdef drop_gradients(self, CUstream current):
        """Called when the current stream waits until they have been flattened."""
        cdef Link link = self.bucket.link
        if self.kept:
            if self.launched_on != current and link.cuda.record_stream is not None:
                for gradient in self.kept:
                    link.cuda.record_stream(gradient)
            self.kept.clear()
            link.launches.flattening.remove(self)

    def is_completed(self):
        """Whether the result is in place. True for what was captured: nobody may ask for that."""
        return self.is_captured or self.in_flight.done.is_over()

    def present(self):
        """Tells by slot whether a rank had a gradient. Waits for the device; while a CUDA graph is
        captured all parameters count as present.
        """
        if self.is_captured:
            return [True] * len(self.bucket.views)
        present = self.bucket.used_mask.present(self.op)
        self.bucket.link.check_work(self.epoch, self.number)
        return present

    def is_skipped(self):
        """Returns False: no vote travels over NCCL."""
        return False

    def times(self):
        """Returns when the device was at it; None for what was captured."""
        return None if self.span is None else self.span.times()


cdef class NcclBucket(GatheringBucket):
    """A flat buffer, the slots of the gradients in it, and its wire. The host launches once per
    round.

    bounds: see Transport.bind_bucket. blocks: what reduces the wire, a float32 one, by bytes; or
        None. Then there are no bounds.
    """

    cdef readonly NcclBucketWork posted  # see BoundBucket.posted
    cdef NcclBucketWork last  # of the newest launch, also while the next is gathered
    cdef Link link
    cdef object __weakref__
    cdef Lane lane
    cdef InFlight in_flight
    cdef object wire
    cdef void *wire_address
    cdef object own_mask  # whose address the last of `gathering.addresses` is
    cdef BlockWire blocks
    cdef NcclCall *calls  # of a launch without them
    cdef size_t n_calls
    cdef MultiTensor gathering, scattering, measuring
    cdef list kept  # gradients of this round that the launch will read where they are
    cdef Event flattened
    cdef Producers producers
    cdef bint is_captured

    def __cinit__(
        self, Link link, flat, list views, list offsets, wire, uint32_t label, int lane,
        tuple bounds, BlockWire blocks,
    ):
        cdef size_t n = len(views)
        self.link, self.wire, self.blocks = link, wire, blocks
        self.lane = link.lane(lane)
        self.in_flight = self._new_record(
            "all_reduce" if bounds is None else "reduce_scatter_v", label
        )
        self.kept, self.wire_address = [], <void *><size_t>wire.data_ptr()
        self._fill_in_calls(bounds)
        self.flattened, self.producers = Event(link.cuda), Producers(link.cuda)
        self.set_up(flat, views, wire, link.world_size)
        numels = [real_numel(view) for view in views]
        self.gathering = MultiTensor(
            [*numels, n], [*offsets, wire.numel() - n], flat.dtype, wire.dtype, link.cuda
        )
        if wire is not flat:
            self._prepare_scattering(numels, offsets, bounds)
        self.measuring = MultiTensor(
            numels, offsets, flat.dtype, flat.dtype, link.cuda, self.gathering
        )
        for i in range(n):
            self.gathering.addresses[i] = (<GradientSlot>self.slots[i]).address
            self.measuring.addresses[i] = self.gathering.addresses[i]
        link.register(self.lane, wire, label)
        link.buckets.add(self)

    def __dealloc__(self):
        free(self.calls)

    cdef int _fill_in_calls(self, tuple bounds) except -1:
        """Each rank gets the whole, or its shard and the used mask behind all shards."""
        cdef char *wire = <char *>self.wire_address
        cdef int dtype = dtype_number(self.wire.dtype)
        cdef size_t itemsize = self.wire.element_size(), first = 0, n = 0
        self.calls = <NcclCall *>calloc(self.link.world_size + 1, sizeof(NcclCall))
        if self.calls == NULL:
            raise MemoryError("out of memory")
        if bounds is not None:
            first = bounds[len(bounds) - 1]
            n = reduce_scatter_v(self.calls, wire, itemsize, dtype, bounds, self.link.rank)
        wire += first * itemsize
        self.calls[n] = NcclCall(ALL_REDUCE, wire, wire, self.wire.numel() - first, dtype, 0, 0)
        self.n_calls = n + 1
        return 0

    cdef InFlight _new_record(self, str kind, uint32_t label):
        cdef InFlight in_flight = self.link.launches.new_record()
        in_flight.kind, in_flight.label = kind, label
        in_flight.dtype, in_flight.numel = self.wire.dtype, self.wire.numel()
        if self.blocks is not None:
            in_flight.dtype = torch.int8
        return in_flight

    cdef int _prepare_scattering(self, list numels, list offsets, tuple bounds) except -1:
        """What is cast back into the flat buffer: all gradients, or what of them is in this rank's
        shard.
        """
        cdef char *flat = <char *><size_t>self.flat.data_ptr()
        cdef size_t itemsize = self.flat.element_size()
        cdef MultiTensor longer = self.gathering
        if bounds is not None:
            begin, end = bounds[self.link.rank], bounds[self.link.rank + 1]
            spans = [
                (max(offset, begin), min(offset + numel, end))
                for offset, numel in zip(offsets, numels)
            ]
            offsets = [first for first, last in spans if first < last]
            numels = [last - first for first, last in spans if first < last]
            longer = None
        self.scattering = MultiTensor(
            numels, offsets, self.flat.dtype, self.wire.dtype, self.link.cuda, longer
        )
        for i, offset in enumerate(offsets):
            self.scattering.addresses[i] = flat + <size_t>offset * itemsize
        return 0

    @property
    def label(self):
        return self.in_flight.label

    def register_window(self):
        """Makes the wire's memory a window again. Collective."""
        self.link.pool.register(<size_t>self.wire_address, self.lane)

    def note_stream(self):
        """Notes that a gradient has been produced on the current stream."""
        self.producers.note()

    def gather(self, list parameters):
        """Only notes where the gradients are: the launch moves them."""
        self.posted = None
        self._order_gathering()
        self.kept = []
        # in their slots, as `measuring` knows them, but for what move() finds elsewhere
        memcpy(
            self.gathering.addresses, self.measuring.addresses, len(self.views) * sizeof(void *)
        )
        return self.gather_gradients(parameters)

    cdef int move(self, Py_ssize_t i, gradient, char *source) except -1:
        """Moves nothing: the launch does."""
        self.gathering.addresses[i] = source
        self.kept.append(gradient)
        return 0

    cdef int note_copied(self, gradient) except -1:
        """Notes a gradient that torch has copied into its place."""
        self.producers.keep(gradient)
        return 0

    def clear(self):
        """In place of gather, for a rank without data. Returns how many gradients that are."""
        self.gather([None] * len(self.views))
        self.flat.zero_()
        return len(self.views)

    def launch(self, str op, list missing, uint64_t fingerprint=0, part=ALIKE):
        """Flattens, reduces and unflattens beside what the current stream does next. Gradients that
        do not lie in the flat buffer are kept until they have been flattened, on a stream that
        waits for no collective. The current stream flattens them itself in a CUDA graph, and where
        they have come on several streams.
        """
        cdef NcclBucketWork work = NcclBucketWork.__new__(NcclBucketWork)
        cdef Link link = self.link
        cdef double scale = 1.0 / link.world_size if op == "mean" else 1.0
        cdef const void *divisor = NULL
        cdef const char *failed = NULL
        cdef int code
        link.check_usable()
        if part.votes:
            self.flat[0] = float("nan")
        if part.total is not None:  # what is added is scaled before
            total, adding_up = part.total
            adding_up.wait()  # the current stream does
            scale, divisor = part.scale, <const void *><size_t>total.data_ptr()
            if op == "mean":  # of the ranks with data
                op = WEIGHTED_OPS[op]
        self.posted = None
        cdef CUstream current = link.cuda.current_stream(), reader = self.lane.stream.handle
        if self.kept:
            is_alone = not self.is_captured and not self.producers.are_others(current)
            reader = link.flattener.handle if is_alone else current
        work.is_captured = self.is_captured
        work.own_mask = self.used_mask.own(op, () if work.is_captured else tuple(missing))
        if self.own_mask is not work.own_mask:
            self.gathering.addresses[len(self.views)] = <void *><size_t>work.own_mask.data_ptr()
            self.own_mask = work.own_mask
        # If nothing moves and nothing is scaled, the wire still holds the last round's used mask:
        # see used_values.
        flattens = (bool(missing) or bool(self.kept) or scale != 1 or divisor != NULL
                    or self.wire is not self.flat
                    or self.last is None or self.last.own_mask is not work.own_mask)
        if link.clock is not None and not work.is_captured:
            work.span = link.clock.span()
        work.in_flight = self.in_flight
        if work.is_captured:
            work.in_flight = self._new_record(self.in_flight.kind, self.in_flight.label)
        work.in_flight.fingerprint = fingerprint
        link.launches.begin(self.lane, work.in_flight, op)
        try:
            code = self._launch_on(
                work.in_flight, current, reader, scale, divisor, flattens,
                op_number(op if divisor == NULL else "sum"), work.span, &failed,
            )
        finally:
            link.launches.end(self.lane, work.in_flight, work.is_captured)
        if code != ncclSuccess:
            if self.kept:  # they are dropped, but may be read yet
                link.cuda.order_after(current, self.flattened)
            raise link.reason(link.error(code, failed))
        work.bucket, work.op = self, op
        work.epoch, work.number = link.epoch, work.in_flight.number
        self.posted = self.last = work
        self._release(current, work if reader != current else None)
        return work

    cdef int _launch_on(
        self, InFlight in_flight, CUstream current, CUstream reader, double scale,
        const void *divisor, bint flattens, int op, Span span, const char **failed,
    ) except -1:
        """Launches all steps of a bucket in one release of the GIL. Returns NCCL's code. failed:
        see call_all(). reader: the stream that flattens.
        """
        cdef void *wire = self.wire_address
        cdef bint scatters = self.scattering is not None
        cdef bint is_in_blocks = self.blocks is not None
        cdef CUstream stream = self.lane.stream.handle
        cdef CUevent gathered = NULL, began = NULL, ended = NULL
        cdef CUcontext before
        cdef size_t i
        cdef int code
        if span is not None:
            gathered, began = span.gathered.handle, span.began.handle
            ended = span.ended.handle
        for i in range(self.n_calls):
            self.calls[i].op = op
        with nogil:  # may wait inside NCCL, which connects at the first collective
            before = self.link.cuda.enter()
            try:
                if reader != current:
                    order_streams(reader, self.lane.ready.handle, current)
                if flattens:  # scaled here: ncclAvg would turn NVLink SHARP off
                    self.gathering.flatten_on(reader, wire, scale, divisor)
                _record(gathered, current if reader == stream else reader)
                if reader != stream:
                    order_streams(stream, self.flattened.handle, reader)
                _record(began, stream)
                if is_in_blocks:
                    code = self.blocks.reduce_on(stream, self.lane.comm, op, failed)
                else:
                    code = call_all(self.calls, self.n_calls, self.lane.comm, stream, failed)
                if code != ncclSuccess:
                    return code
                if scatters:
                    self.scattering.unflatten_on(stream, wire, 1, True)
                _record(ended, stream)
                check(driver.record_event(in_flight.done.handle, stream), b"cuEventRecord")
            finally:
                self.link.cuda.leave(before)
        return ncclSuccess

    cdef int _order_gathering(self) except -1:
        """Orders the current stream after the gradients, whatever streams they were produced on,
        and after the last round's results.
        """
        cdef CUstream current = self.link.cuda.current_stream()
        cdef NcclBucketWork last = self.last
        self.link.check_usable()
        self.is_captured = self.link.graphs.note_capture(current)
        self.producers.order_before(current)
        is_known = last is None or (last.is_awaited and current == last.awaited_on)
        # A capture cannot wait for what is outside it; the caller synchronises around it.
        if not is_known and not self.is_captured:
            with nogil:  # may wait for room in the device's queue
                self.link.cuda.order_after(current, self.in_flight.done)
        return 0

    cdef _release(self, CUstream current, NcclBucketWork work):
        """Drops the gradients, or hands them to the work that reads them beside this stream."""
        cdef list flattening = self.link.launches.flattening
        if self.kept and work is not None:
            work.kept, work.launched_on = self.kept, current
            flattening.append(work)
            if len(flattening) > MAX_KEPT:
                work = flattening[0]
                with nogil:  # may wait for room in the device's queue
                    self.link.cuda.order_after(current, work.bucket.flattened)
                work.drop_gradients(current)
        elif self.producers.are_others(current):
            for gradient in self.kept:
                self.producers.keep(gradient)
        self.kept = []
        self.producers.clear()

    def count_results(self, bint adds_squares):
        """Counts when somebody asks, or in the cast."""
        return True

    def square_sum(self):
        """One pass over the flat buffer."""
        self._measure()
        return self.measuring.square_sum

    def n_nonfinite(self):
        """Where gradients are cast back, the cast has counted; else this takes one pass over the
        flat buffer.
        """
        if self.scattering is not None:
            return self.scattering.n_nonfinite
        self._measure()
        return self.measuring.n_nonfinite

    cdef int _measure(self) except -1:
        cdef CUstream current = self.link.cuda.current_stream()
        with nogil:  # may wait for room in the device's queue
            self.measuring.norm_on(current)
        return 0


cdef inline int _record(CUevent event, CUstream stream) except -1 nogil:
    """For a timeline; NULL where nobody asks."""
    if event != NULL:
        check(driver.record_event(event, stream), b"cuEventRecord")
    return 0


BoundBucket.register(NcclBucket)
BucketWork.register(NcclBucketWork)
