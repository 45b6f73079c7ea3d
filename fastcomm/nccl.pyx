# cython: language_level=3
"""NcclCommunicator: the ranks' GPUs over NCCL, driven directly on streams of its own.

The host does not wait here, but in barrier(): what is launched is ordered by events, after and before the work of the caller's stream, so
that a whole training step can be captured in a CUDA graph. What would never end is ended by the watchdog, and the next call raises.
Owns the lanes and the watchdog. How the ranks find each other is rendezvous.py's business: it arrives here as a `bootstrap`.
"""

import contextlib
import json
import os
import socket
import threading
import time
import weakref

import torch

from fastcomm.communicator import BoundBucket, BucketWork, Communicator, canonical_op, presence_values
from fastcomm.errors import FastcommError, InitError, NcclError, PeerLostError
from fastcomm.nccl_library import load, unique_id, version_text
from fastcomm.watchdog import Watchdog, failure_note

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from fastcomm.cuda cimport (
    CU_GRAPH_USER_OBJECT_MOVE, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUcontext, CUgraph, CUstream, CUuserObject, Device, Event, check, driver,
)
from fastcomm.multi_tensor cimport MultiTensor
from fastcomm.nccl_lane cimport ALL_GATHER, ALL_REDUCE, BROADCAST, MEETING, REDUCE_SCATTER, REGISTRATION, Kind, Lane, Ticket
from fastcomm.nccl_library cimport error_of, nccl, ncclComm_t, ncclInProgress, ncclInternalError, ncclRemoteError, ncclSuccess
from fastcomm.nccl_memory cimport Pool, pool_of
from fastcomm.shm_memory cimport forks


cdef object TENSOR = torch.Tensor
# NCCL's numbers.
cdef dict DTYPES = {
    torch.float32: 7, torch.float64: 8, torch.float16: 6, torch.bfloat16: 9, torch.int32: 2, torch.int64: 4, torch.uint8: 1,
    torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}
cdef tuple FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
cdef int FIRST_WITH_FP8 = 22400
cdef dict OP_CODES = {"sum": 0, "mean": 0, "prod": 1, "max": 2, "min": 3}  # a mean is a scaled sum: ncclAvg would turn NVLink SHARP off
cdef tuple CALLS = (b"ncclAllReduce", b"ncclBroadcast", b"ncclAllGather", b"ncclReduceScatter")
cdef double ABORT_S = 10  # NCCL's abort may hang itself; nobody waits longer for it
cdef double POLL_S = 50e-6


# ---- work ------------------------------------------------------------------------------------------------------------------------

@cython.freelist(8)
cdef class NcclWork:
    """A collective that has been launched. Holds its tensors until the caller's stream is ordered after it."""

    cdef NcclCommunicator comm
    cdef Ticket ticket
    cdef object tensors, divide_by
    cdef int epoch

    def wait(self):
        """Orders the current stream after the collective; does not block. Raises the error that ended the communicator, if one did."""
        if self.tensors is None:
            return
        self.comm._check_alive(self.epoch)
        self.comm._order_current_after(self.ticket.done)
        if self.divide_by is not None:
            self.tensors[0].copy_(self.tensors[1].div_(self.divide_by, rounding_mode="trunc"))
        self.tensors = None

    def is_completed(self):
        """Whether the result is in place."""
        return self.comm._is_over(self.ticket.done)


@cython.freelist(8)
cdef class NcclBucketWork:
    """A bucket under way."""

    cdef NcclBucket bucket
    cdef object op
    cdef int epoch
    cdef bint is_captured

    def wait(self):
        """As NcclWork.wait."""
        self.bucket.comm._check_alive(self.epoch)
        self.bucket.last_waited_on = self.bucket.comm._order_current_after(self.bucket.ticket.done)

    def is_completed(self):
        """Whether the result is in place."""
        return self.bucket.comm._is_over(self.bucket.ticket.done)

    def present(self):
        """See BucketWork.present. Waits for the device; while a CUDA graph is captured all parameters count as present."""
        if self.is_captured:
            return [True] * len(self.bucket.views)
        absent, _ = presence_values(self.op)
        present = (self.bucket.presence.float() != absent).tolist()
        self.bucket.comm._check_alive(self.epoch)
        return present


# ---- buckets ---------------------------------------------------------------------------------------------------------------------

cdef struct Range:
    char *base
    size_t nbytes
    Range *next


@cython.no_gc_clear  # __dealloc__ needs the communicator
cdef class NcclBucket:
    """A flat buffer, the places of the gradients in it, and its way over the wire: one launch of the host's per round."""

    cdef NcclCommunicator comm
    cdef object __weakref__
    cdef Lane lane
    cdef Ticket ticket
    cdef object flat, wire, presence
    cdef list views, kept
    cdef MultiTensor gathering, scattering, measuring
    cdef char *base
    cdef size_t nbytes, numel
    cdef Range *range
    cdef int dtype
    cdef set streams  # on which gradients of this round were produced
    cdef CUstream last_waited_on
    cdef dict tokens  # by op: what the presence of all parameters looks like, on the device
    cdef Event side
    cdef object token  # what last round has left in the wire
    cdef bint is_moved, was_captured

    def __cinit__(self, NcclCommunicator comm, flat, list views, list offsets, wire, uint32_t label, int lane):
        cdef size_t n = len(views)
        self.comm, self.flat, self.wire, self.views = comm, flat, wire, views
        self.lane = comm._lane(lane)
        self.ticket = comm._new_ticket()
        self.ticket.kind, self.ticket.dtype, self.ticket.numel, self.ticket.label = ALL_REDUCE, wire.dtype, wire.numel(), label
        self.base, self.nbytes = <char *><size_t>flat.data_ptr(), flat.numel() * flat.element_size()
        self.dtype, self.numel = DTYPES[wire.dtype], wire.numel()
        self.presence = wire[wire.numel() - n:]
        numels = [view.numel() for view in views]
        self.gathering = MultiTensor([*numels, n], [*offsets, wire.numel() - n], flat.dtype, wire.dtype, comm.cuda)
        self.scattering = None if wire is flat else MultiTensor(numels, offsets, flat.dtype, wire.dtype, comm.cuda)
        self.streams, self.tokens, self.kept, self.side = set(), {}, [], Event()
        for i in range(n):
            self.gathering.addresses[i] = <void *><size_t>views[i].data_ptr()
            if self.scattering is not None:
                self.scattering.addresses[i] = self.gathering.addresses[i]
        comm._register(self.lane, wire, label)
        self._claim_memory()
        comm.buckets.add(self)

    def register_memory(self):
        """Anew, with this rank's NCCL alone."""
        self.comm.pool.register(<void *><size_t>self.wire.data_ptr(), self.lane, False)

    cdef int _claim_memory(self) except -1:
        self.range = <Range *>malloc(sizeof(Range))
        if self.range == NULL:
            raise MemoryError("out of memory")
        self.range[0] = Range(self.base, self.nbytes, self.comm.ranges)
        self.comm.ranges = self.range
        return 0

    def __dealloc__(self):
        cdef Range **link
        if self.range != NULL:
            link = &self.comm.ranges
            while link[0] != self.range:
                link = &link[0].next
            link[0] = self.range.next
            free(self.range)

    cdef bint _is_another_gradient(self, char *source) noexcept:
        """Whether it lies in a flat buffer, this one or another bucket's, whose contents change at times of their own."""
        cdef Range *candidate = self.comm.ranges
        while candidate != NULL:
            if <size_t>(source - candidate.base) < candidate.nbytes:
                return True
            candidate = candidate.next
        return False

    def note_stream(self):
        """A gradient has been produced on the current stream."""
        self.streams.add(<size_t>self.comm.cuda.current_stream())

    def gather(self, list parameters):
        """See BoundBucket.gather. Only notes where the gradients are: the launch moves them."""
        cdef list left = []
        cdef char *source
        self.is_moved = False
        self.kept = []
        for i in range(len(parameters)):
            parameter, view = parameters[i], self.views[i]
            self.gathering.addresses[i] = place = <void *><size_t>view.data_ptr()
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                left.append(i)
                continue
            if gradient is view:
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError("sparse gradients cannot be gathered")
            source = <char *><size_t>gradient.data_ptr()
            if source != place and self._is_another_gradient(source):
                raise FastcommError("a parameter's gradient lies in that of another one: clone gradients before you exchange them")
            if gradient.dtype is not view.dtype or gradient.stride() != view.stride():
                view.copy_(gradient.clone() if source == place else gradient)
            else:
                self.gathering.addresses[i] = source
                self.kept.append(gradient)
                self.is_moved = True
            parameter.grad = view
        return left

    def launch(self, str op, list missing):
        """See BoundBucket.launch. Flattens on the current stream; reduces, and unflattens, on the lane's."""
        cdef NcclBucketWork work = NcclBucketWork.__new__(NcclBucketWork)
        cdef NcclCommunicator comm = self.comm
        cdef double scale = 1.0 / comm.world_size if op == "mean" else 1.0
        cdef int code = ncclInternalError
        comm._check_usable()
        cdef CUstream current = comm.cuda.current_stream()
        cdef CUcontext before = comm.cuda.enter()
        try:
            work.is_captured = comm._note_capture(current)
            token = self._token(op, () if work.is_captured else tuple(missing))
            self.gathering.addresses[len(self.views)] = <void *><size_t>token.data_ptr()
            self._order(current, work.is_captured)
            # Where nothing moves and nothing is scaled, last round's presence still stands in the wire: see presence_values.
            flattens = bool(missing) or self.is_moved or scale != 1 or self.wire is not self.flat or token is not self.token
            comm._begin(self.lane, self.ticket, op)
            try:
                code = self._launch_on(current, scale, flattens, OP_CODES[op])
            finally:
                comm._end(self.lane, self.ticket, work.is_captured)
            if code != ncclSuccess:
                raise comm._reason(comm._error(code, b"ncclAllReduce"))
        finally:
            comm.cuda.leave(before)
        self.token, self.was_captured = token, work.is_captured
        self._release(current)
        work.bucket, work.op, work.epoch = self, op, comm.epoch
        return work

    cdef int _launch_on(self, CUstream current, double scale, bint flattens, int op) except -1:
        """The whole way of a bucket, in one release of the GIL. Returns NCCL's code."""
        cdef void *wire = <void *><size_t>self.wire.data_ptr()
        cdef bint scatters = self.scattering is not None
        cdef CUstream stream = self.lane.stream.handle
        cdef int code
        with nogil:  # may wait inside NCCL, which connects at the first collective
            if flattens:
                self.gathering.flatten_on(current, wire, scale)
            check(driver.record_event(self.lane.ready.handle, current), b"cuEventRecord")
            check(driver.wait_event(stream, self.lane.ready.handle, 0), b"cuStreamWaitEvent")
            code = nccl.all_reduce(wire, wire, self.numel, self.dtype, op, self.lane.comm, stream)
            if code != ncclSuccess:
                return code
            if scatters:
                self.scattering.unflatten_on(stream, wire, 1, True)
            check(driver.record_event(self.ticket.done.handle, stream), b"cuEventRecord")
        return ncclSuccess

    cdef _token(self, str op, tuple missing):
        """What travels behind the gradients: for each parameter whether this rank has a gradient of it. On the device, kept for reuse."""
        token = self.tokens.get((op, missing))
        if token is None:
            absent, present = presence_values(op)
            values = [present * (self.comm.world_size if op == "mean" else 1)] * len(self.views)  # the flattening divides
            for i in missing:
                values[i] = absent
            host = torch.tensor(values, dtype=self.flat.dtype, device="cpu", pin_memory=self.flat.is_cuda)
            token = self.tokens[op, missing] = host.to(self.flat.device, non_blocking=True)
        return token

    cdef int _order(self, CUstream current, bint is_captured) except -1:
        """The flattening comes after the gradients, whatever streams they were produced on, and after the last round's results."""
        cdef CUstream other
        for stream in self.streams:
            other = <CUstream><size_t>stream
            if other != current:
                check(driver.record_event(self.side.handle, other), b"cuEventRecord")
                check(driver.wait_event(current, self.side.handle, 0), b"cuStreamWaitEvent")
        # A capture takes no events from outside, and none of its own out; the caller synchronises around it.
        if self.ticket.number and current != self.last_waited_on and not is_captured and not self.was_captured:
            check(driver.wait_event(current, self.ticket.done.handle, 0), b"cuStreamWaitEvent")
        return 0

    cdef _release(self, CUstream current):
        """The gradients have been read when the current stream comes this far: their memory may be used for what it does next."""
        if self.streams - {<size_t>current}:
            for gradient in self.kept:  # but they belong to other streams
                gradient.record_stream(torch.cuda.current_stream(self.flat.device))
        self.kept = []
        self.streams.clear()

    def statistics(self, *, bint is_changed):
        """See BoundBucket.statistics. Found on the way where gradients are cast back; else by one pass over the flat buffer."""
        counted = self.scattering
        if counted is None or is_changed:
            counted = self._measuring()
            counted.norm(self.views)
        return counted.square_sum, counted.n_nonfinite

    cdef object _measuring(self):
        if self.measuring is None:
            numels = [view.numel() for view in self.views]
            self.measuring = MultiTensor(numels, self.gathering.offsets[:-1], self.flat.dtype, self.flat.dtype, self.comm.cuda)
        return self.measuring


# ---- the communicator ------------------------------------------------------------------------------------------------------------

@cython.no_gc_clear
cdef class NcclCommunicator:
    """Collectives between `world_size` processes with a GPU each. See fastcomm.communicator.Communicator for the contract.

    Made by fastcomm.init. Results are ordered before what the current stream does next; the host does not wait for them. An error that
    ends the communicator is raised by the next call, and by every one after it. Beside torch's own NCCL groups: both must launch in the
    same order on all ranks.
    """

    cdef readonly int rank, world_size, local_rank
    cdef readonly int n_abandoned, epoch
    cdef readonly uint64_t number
    cdef readonly object device, timeout
    cdef readonly tuple pids
    cdef readonly Device cuda
    cdef object __weakref__
    cdef object bootstrap, watchdog, tickets
    cdef list lanes
    cdef Range *ranges  # the flat buffers of all buckets
    cdef Pool pool
    cdef Ticket calling  # the collective whose launch has not returned
    cdef object one  # a tensor for barrier()
    cdef double timeout_s
    cdef int generation
    cdef dict in_flight  # by ticket: the tensors of collectives that have not ended
    cdef object buckets
    cdef object ending  # held while the lanes are aborted
    cdef bint busy, is_split_up, is_closed
    cdef int *n_graphs  # CUDA graphs alive that have captured collectives; outlives the communicator, as they may
    cdef uint64_t last_graph
    cdef object failure  # why the communicator cannot be used any more, or None
    cdef object interruption  # why the ranks have to meet anew, until somebody has been told

    backend = "nccl"
    has_streams = True

    def __cinit__(self, int rank, int world_size, int local_rank, object bootstrap, object timeout, object device, list neighbours):
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device, self.timeout, self.timeout_s = device, timeout, timeout.total_seconds()
        self.generation, self.bootstrap = forks(), bootstrap
        self.tickets, self.lanes = weakref.WeakSet(), []
        self.in_flight, self.buckets, self.ending = {}, weakref.WeakSet(), threading.Lock()
        self.n_graphs = <int *>calloc(1, sizeof(int))
        if self.n_graphs == NULL:
            raise MemoryError("out of memory")
        version, path = load()
        self.cuda = Device(device)
        facts = bootstrap.exchange(_facts(version, path, device))
        refuse_different_versions(facts)
        refuse_shared_cards(facts)
        self.pids = tuple(theirs["pid"] for theirs in facts)
        self.pool = pool_of(self.cuda)
        try:
            self._add_lane(bootstrap.look)
            self.one = torch.zeros(1, dtype=torch.uint8, device=device)
            self.watchdog = Watchdog(self, bootstrap, self.timeout_s, neighbours)
        except BaseException:
            self._abort_lanes()
            raise

    def __repr__(self):
        return f"<NcclCommunicator: rank {self.rank} of {self.world_size} on {self.device}{', ended' if self.failure else ''}>"

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            self.close()
        else:
            self.abort()

    # -- beginning and ending --

    cdef _add_lane(self, look):
        lane = Lane(self.cuda)
        self._connect(lane, len(self.lanes), look)
        self.tickets.add((<Lane>lane).ticket)
        self.lanes.append(lane)

    cdef _connect(self, Lane lane, int place, look):
        """Collective. The first lane meets over the store, the others over the first."""
        if place:
            lane.split_from(self.lanes[0], self.rank, self.timeout_s, look)
        else:
            identifier = self.bootstrap.exchange(unique_id() if self.rank == 0 else None, look)[0]
            lane.connect(identifier, self.rank, self.world_size, self.timeout_s, look)

    cdef Lane _lane(self, int place):
        while len(self.lanes) <= place:
            with self._meeting():
                self._add_lane(self._look)
        return self.lanes[place]

    @contextlib.contextmanager
    def _meeting(self):
        """The ranks meet once more, under the watchdog's eyes. An error of one ends the communicator on all."""
        cdef Lane lane = self.lanes[0]
        cdef Ticket ticket = Ticket()
        ticket.kind = MEETING
        self._begin(lane, ticket, None)
        try:
            yield
        except FastcommError as error:
            raise self._reason(error) from error
        finally:
            self._end(lane, ticket, True)

    def _look(self):
        """While the ranks meet once more: raises when the watchdog has found that they will not."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)

    cdef Ticket _new_ticket(self):
        cdef CUcontext before = self.cuda.enter()
        try:
            ticket = Ticket()
        finally:
            self.cuda.leave(before)
        self.tickets.add(ticket)
        return ticket

    def close(self, double timeout=30):
        """Ends the use of this communicator on this rank, when what was launched is done, or after `timeout` seconds. Tensors stay valid.

        Peers that still wait for this rank get PeerLostError. Raises FastcommError while a CUDA graph lives that has captured collectives:
        NCCL would wait for ever for it to go; TimeoutError or NcclError when the end was not in order. May be called twice.
        """
        if self.generation != forks() or self.failure is not None:
            return
        if self.n_graphs[0] > 0:
            raise FastcommError(f"{self.n_graphs[0]} CUDA graph(s) with collectives of this communicator are alive: delete them first")
        self.failure, self.is_closed = FastcommError(f"rank {self.rank} has closed this communicator"), True
        self.watchdog.stop()
        self._leave_note(f"closed/{self.rank}", json.dumps([self.epoch, self.number]))
        errors = []
        for lane in reversed(self.lanes):
            try:
                self.pool.forget((<Lane>lane).comm, True)
            except NcclError as error:
                errors.append(error)
            try:
                (<Lane>lane).close(timeout)
            except FastcommError as error:
                errors.append(error)
        self.in_flight.clear()
        if errors:
            raise errors[0]

    def abort(self):
        """Ends the use of this communicator at once, on this rank and, by PeerLostError, on the others."""
        if self.generation == forks() and self.failure is None:
            self._leave_note("failure", failure_note("PeerLostError", f"rank {self.rank} (pid {os.getpid()}) aborted its communicator"))
            self.is_closed = True
            self._fail(FastcommError(f"rank {self.rank} has aborted this communicator"))
            self.watchdog.stop()

    def abandon(self):
        """See Communicator.abandon. Ends NCCL's communicators on every rank; the ranks meet anew at their next collective.

        What other ranks have launched on gradients of this round is of no use, and their hosts may hear of it a step later.
        """
        self._check_alive(self.epoch)
        if self.is_split_up:  # the ranks have not met since the last time
            return
        self.n_abandoned += 1
        self._leave_note(
            f"abandoned/{self.epoch}",
            f"rank {self.rank} abandoned what was under way (an exception ended its backward?): skip this step. If the optimizer has made "
            "it already, the parameters differ between the ranks: restore them, or call refresh() on every rank",
        )
        self._abort_lanes()

    def check(self):
        """See Communicator.check."""
        if not self.is_closed:
            self._check_alive(self.epoch)

    cdef _leave_note(self, key, value):
        """For the other ranks' watchdogs. The store may be gone with its rank; then there is nobody to tell."""
        with contextlib.suppress(RuntimeError):
            self.bootstrap.write_once(key, value)

    cdef _abort_lanes(self):
        cdef ncclComm_t comm
        self.is_split_up = True
        with self.ending:
            for lane in self.lanes:
                comm = (<Lane>lane).comm
                (<Lane>lane).abort(ABORT_S)
                self.pool.forget(comm, False)

    cdef _meet_again(self):
        """After abandon(): new communicators for the old lanes. Collective."""
        with self.ending:  # the watchdog may not be through with the old ones
            pass
        self.epoch += 1
        self.number = 0
        self.in_flight.clear()
        self.is_split_up = False
        with self._meeting():
            for place, lane in enumerate(self.lanes):
                self._connect(lane, place, self._look)
        for bucket in self.buckets:  # not as windows: which buckets are left is each rank's own affair
            (<NcclBucket>bucket).register_memory()

    # -- what the watchdog asks for; see fastcomm.watchdog.Watched --

    def _enter_thread(self):
        cdef int mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL  # or its queries would end other threads' captures
        self.cuda.enter()
        check(driver.exchange_capture_mode(&mode), b"cuThreadExchangeStreamCaptureMode")

    def _oldest_unfinished(self):
        cdef Ticket ticket, oldest = self.calling
        for candidate in list(self.tickets):
            ticket = candidate
            if ticket.is_pending and ticket is not self.calling:
                if self._is_over(ticket.done):
                    ticket.is_pending = False
                    self.in_flight.pop(ticket, None)
                    continue
                if ticket.is_marked and self._is_over(ticket.mark):
                    ticket.is_marked, ticket.since = False, time.monotonic()
                if oldest is None or ticket.number < oldest.number:
                    oldest = ticket
        return None if oldest is None else (oldest.number, time.monotonic() - oldest.since, oldest.describe())

    def _asynchronous_error(self):
        cdef int code = ncclSuccess
        cdef Lane lane
        for candidate in self.lanes:
            lane = candidate
            if lane.comm != NULL:
                if nccl.async_error(lane.comm, &code) == ncclSuccess and code not in (ncclSuccess, ncclInProgress):
                    error = self._error(code, b"ncclCommGetAsyncError: a collective")
                    return PeerLostError(str(error)) if code == ncclRemoteError else error
        return None

    def _fail(self, error):
        if self.failure is None:
            self.failure = error
            self._abort_lanes()

    def _interrupt(self, error, epoch):
        if not self.is_split_up and epoch == self.epoch:
            self.is_split_up, self.interruption = True, error
            self._abort_lanes()

    # -- memory --

    def empty(self, numel, *, dtype):
        """A flat tensor of `numel` elements in memory that NCCL has allocated and registered, uninitialised. Local: no peer is asked.

        The memory lives as long as the tensor, also after close(). Synchronises the device if there is memory of dropped tensors to free.
        Raises ValueError for a negative numel, TypeError for a dtype that NCCL does not reduce, NcclError when the memory is used up.
        """
        self._check_usable()
        _nccl_dtype(dtype)
        if numel < 0:
            raise ValueError(f"numel must not be negative; got {numel}")
        if numel == 0 or nccl.mem_alloc == NULL:
            return torch.empty(numel, dtype=dtype, device=self.device)
        memory = self.pool.allocate(numel * dtype.itemsize)
        self.pool.register(<void *><size_t>memory.data_ptr(), self.lanes[0], False)
        return memory.view(dtype)

    def bind_bucket(self, flat, list views, list offsets, *, wire, uint32_t label, int lane=0):
        """See Communicator.bind_bucket. Collective, where NCCL registers memory as windows."""
        self._check_usable()
        _nccl_dtype(wire.dtype)
        return NcclBucket(self, flat, views, offsets, wire, label, lane)

    cdef _register(self, Lane lane, memory, uint32_t label):
        """Of a bucket's memory. Under the watchdog's eyes: as a window it waits for the peers."""
        cdef Ticket ticket = lane.ticket
        ticket.kind, ticket.dtype, ticket.numel, ticket.label = REGISTRATION, memory.dtype, memory.numel(), label
        self._begin(lane, ticket, None)
        try:
            self.pool.register(<void *><size_t>memory.data_ptr(), lane, self.world_size > 1)
        except NcclError as error:
            raise self._reason(error) from error
        finally:
            self._end(lane, ticket, True)
            ticket.label = 0

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        """Reduces `tensor` over all ranks, in place: contiguous, on this device, the same numel and dtype on every rank.

        op: sum, mean (alias avg), min, max, prod. A float mean is the sum of tensors scaled beforehand; an integer mean is rounded towards
        zero. 16-bit floats are added as NCCL does it, from 3 ranks on with a rounding at each step. With async_op, returns a Work at once:
        leave the tensor alone until work.wait() has ordered the stream that is current then after the result.
        Raises ValueError or TypeError for a bad argument, before any peer is involved, and what has ended the communicator.
        """
        op = canonical_op(op)
        self._check(tensor)
        tensor = tensor.detach()
        if op != "mean":
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        if tensor.is_floating_point():
            self._scale(tensor)
            return self._collective(ALL_REDUCE, tensor, tensor, op, 0, async_op, None)
        wide = tensor.to(torch.int64, copy=True)
        return self._collective(ALL_REDUCE, wide, wide, op, 0, async_op, tensor)

    def broadcast(self, tensor, int src=0):
        """Copies rank `src`'s `tensor` into every other rank's. Same numel and dtype on every rank. Errors as all_reduce."""
        self._check(tensor)
        if not 0 <= src < self.world_size:
            raise ValueError(f"src must be a rank from 0 to {self.world_size - 1}; got {src}")
        self._collective(BROADCAST, tensor, tensor, None, src, False, None)

    def all_gather_single(self, out, inp):
        """Concatenates every rank's `inp`, by rank, into `out` of world_size * inp.numel() elements. Errors as all_reduce."""
        self._check(inp)
        self._check_out("all_gather_single", out, inp, inp.numel() * self.world_size)
        self._collective(ALL_GATHER, inp, out, None, 0, False, None)

    def reduce_scatter_single(self, out, inp, op="sum"):
        """Reduces `inp` over all ranks; rank r keeps the r-th of world_size equal parts in `out`. Errors as all_reduce."""
        op = canonical_op(op)
        self._check(inp)
        if inp.numel() % self.world_size:
            raise ValueError(f"reduce_scatter_single: inp has {inp.numel()} elements, not a multiple of {self.world_size} ranks")
        self._check_out("reduce_scatter_single", out, inp, inp.numel() // self.world_size)
        if op == "mean" and not inp.is_floating_point():
            wide = torch.empty(out.numel(), dtype=torch.int64, device=self.device)
            self._collective(REDUCE_SCATTER, inp.to(torch.int64), wide, op, 0, False, None)
            out.copy_(wide.div_(self.world_size, rounding_mode="trunc").view(out.shape))
            return
        scaled = self._scale(inp.detach().clone()) if op == "mean" else inp
        self._collective(REDUCE_SCATTER, scaled, out, op, 0, False, None)

    cdef _scale(self, tensor):
        if tensor.dtype in FP8:
            raise TypeError(f"no mean of {tensor.dtype} tensors: use op='sum'")
        return tensor.mul_(1.0 / self.world_size)

    def barrier(self):
        """Returns when every rank has called it, and all that was launched on the current stream before is done."""
        self._check_usable()
        self._collective(ALL_REDUCE, self.one, self.one, "max", 0, False, None)
        cdef Lane lane = self.lanes[0]
        while not self._is_over(lane.ticket.done):
            PyErr_CheckSignals()
            time.sleep(POLL_S)
            self._check_alive(self.epoch)
        self._check_alive(self.epoch)

    # -- the way of every collective --

    cdef int _check(self, tensor) except -1:
        self._check_usable()
        if not isinstance(tensor, TENSOR):
            raise TypeError(f"expected a torch.Tensor; got {type(tensor).__name__}")
        _nccl_dtype(tensor.dtype)
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise ValueError(f"this communicator takes dense tensors on {self.device}; got {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor must be contiguous; its shape is {tuple(tensor.shape)}, its strides are {tensor.stride()}")
        return 0

    cdef int _check_out(self, str name, out, inp, numel) except -1:
        self._check(out)
        if out.dtype != inp.dtype:
            raise TypeError(f"{name}: out is {out.dtype}, inp is {inp.dtype}")
        if out.numel() != numel:
            raise ValueError(f"{name}: out must have {numel} elements; it has {out.numel()}")
        return 0

    cdef int _check_usable(self) except -1:
        """Before every launch. After an abandoned round the ranks meet anew here."""
        self._check_alive(self.epoch)
        if self.busy:
            raise FastcommError("another thread is inside this communicator: give each thread its own, or let them take turns")
        if self.is_split_up:
            self._meet_again()
        return 0

    cdef int _check_alive(self, int epoch) except -1:
        """Raises what has ended the communicator, or the collectives of that epoch; each interruption once."""
        if self.generation != forks():
            raise FastcommError(f"this communicator belongs to process {self.pids[self.rank]}, and this process was forked from it: "
                                "call fastcomm.init here, or start workers with the spawn method")
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        if self.interruption is not None:
            error, self.interruption = self.interruption, None
            self.n_abandoned += 1
            raise error
        if epoch != self.epoch:
            raise FastcommError("this collective was abandoned with all that was under way")
        return 0

    cdef object _error(self, int code, const char *call):
        """As the other ranks read it, too: they are told which rank it was."""
        return NcclError(f"rank {self.rank}: {error_of(code, call)}")

    cdef object _reason(self, error):
        """Why a call into NCCL has failed: because the watchdog has ended it, or for a reason of its own, which ends the communicator."""
        if self.interruption is not None:
            interruption, self.interruption = self.interruption, None
            self.n_abandoned += 1
            return interruption
        if self.failure is None:
            self.watchdog.give_up(self, error)
        return type(self.failure)(*self.failure.args)

    cdef object _collective(self, Kind kind, inp, out, op, int root, bint async_op, divided):
        """Launches on the first lane. `divided`: where the integer mean goes of which `out` is the sum."""
        cdef Lane lane = self.lanes[0]
        cdef NcclWork work = NcclWork.__new__(NcclWork)
        cdef Ticket ticket = self._new_ticket() if async_op else lane.ticket
        cdef CUstream current = self.cuda.current_stream()
        cdef CUcontext before = self.cuda.enter()
        cdef bint is_captured
        cdef int code = ncclInternalError
        try:
            is_captured = self._note_capture(current)
            ticket.kind, ticket.dtype, ticket.numel, ticket.root = kind, inp.dtype, inp.numel(), root
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
        if async_op:
            self.in_flight[ticket] = work.tensors  # also of those nobody waits for
            return work
        work.wait()

    cdef int _launch_on(self, Lane lane, Ticket ticket, CUstream current, Kind kind, inp, out, op, int root) except -1:
        """Returns NCCL's code."""
        cdef void *source = <void *><size_t>inp.data_ptr()
        cdef void *target = <void *><size_t>out.data_ptr()
        cdef size_t numel = out.numel() if kind == REDUCE_SCATTER else inp.numel()
        cdef int dtype = DTYPES[inp.dtype], op_code = OP_CODES.get(op, 0), code
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

    cdef int _begin(self, Lane lane, Ticket ticket, op) except -1:
        """From here on the watchdog counts the launch as unfinished."""
        self.number += 1
        ticket.number, ticket.op = self.number, op
        if not ticket.is_pending:  # else the one before has not ended, as far as is known
            ticket.since = time.monotonic()
        self.calling, lane.in_call, self.busy = ticket, True, True
        return 0

    cdef int _end(self, Lane lane, Ticket ticket, bint is_captured) except -1:
        """The launch has returned. What is only captured does not run, and its events must not be looked at."""
        ticket.is_pending = not is_captured
        if ticket.is_pending and not ticket.is_marked:
            ticket.is_marked = driver.record_event(ticket.mark.handle, lane.stream.handle) == CUDA_SUCCESS
        self.calling, lane.in_call, self.busy = None, False, False
        return 0

    cdef CUstream _order_current_after(self, Event done) except? NULL:
        """Returns the current stream, on which all that comes now comes after `done`."""
        cdef CUstream current = self.cuda.current_stream()
        cdef CUcontext before = self.cuda.enter()
        try:
            check(driver.wait_event(current, done.handle, 0), b"cuStreamWaitEvent")
        finally:
            self.cuda.leave(before)
        return current

    cdef bint _is_over(self, Event done) except -1:
        cdef int code
        with nogil:
            code = driver.query_event(done.handle)
        if code != CUDA_ERROR_NOT_READY:
            check(code, b"cuEventQuery")
        return code == CUDA_SUCCESS

    cdef bint _note_capture(self, CUstream current) except -1:
        """Whether the stream is being captured into a CUDA graph. Each graph is counted until it, and all that was made of it, is gone."""
        cdef int status = 0
        cdef unsigned long long identifier = 0
        cdef CUgraph graph = NULL
        cdef CUuserObject counted = NULL
        if current == NULL:  # the legacy default stream, which cannot be captured
            return False
        check(driver.capture_info(current, &status, &identifier, &graph, NULL, NULL), b"cuStreamGetCaptureInfo")
        if status != CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return False
        if identifier != self.last_graph:
            self.last_graph = identifier
            check(driver.create_user_object(&counted, self.n_graphs, _graph_is_gone, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                  b"cuUserObjectCreate")
            check(driver.retain_user_object(graph, counted, 1, CU_GRAPH_USER_OBJECT_MOVE), b"cuGraphRetainUserObject")
            fastcomm_count_up(self.n_graphs)
        return True


cdef extern from *:
    """
    static void fastcomm_count_up(void *counter) { __atomic_add_fetch((int *)counter, 1, __ATOMIC_RELAXED); }
    static void fastcomm_count_down(void *counter) { __atomic_sub_fetch((int *)counter, 1, __ATOMIC_RELAXED); }
    """
    void fastcomm_count_up(void *counter) noexcept nogil
    void fastcomm_count_down(void *counter) noexcept nogil


cdef void _graph_is_gone(void *counter) noexcept nogil:
    """Called by the driver, on a thread of its own."""
    fastcomm_count_down(counter)


cdef int _nccl_dtype(dtype) except -1:
    code = DTYPES.get(dtype)
    if code is None:
        raise TypeError(f"dtype must be one of {', '.join(str(known).removeprefix('torch.') for known in DTYPES)}; got {dtype}")
    if dtype in FP8 and load()[0] < FIRST_WITH_FP8:
        raise TypeError(f"{dtype} needs NCCL 2.24 or newer; this is {version_text(load()[0])}")
    return code


# ---- what the ranks must agree on before they connect -------------------------------------------------------------------------------

def _facts(version, path, device):
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {
        "pid": os.getpid(), "host": os.environ.get("NCCL_HOSTID", socket.gethostname()), "version": version, "path": path, "card": card,
        "device": str(device), "may_share": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    }


def refuse_different_versions(facts):
    """Raises InitError, on every rank, when the ranks have found different versions of NCCL: those would not understand each other."""
    if len({theirs["version"] for theirs in facts}) > 1:
        found = "; ".join(f"rank {r}: {version_text(theirs['version'])} in {theirs['path']}" for r, theirs in enumerate(facts))
        raise InitError(f"the ranks have different versions of NCCL: {found}")


def refuse_shared_cards(facts):
    """Raises InitError, on every rank, when two ranks use one GPU without having been set up for it."""
    seen = {}
    for r, theirs in enumerate(facts):
        if theirs["card"] is None or (theirs["may_share"] and theirs["version"] >= 23000):
            continue
        first = seen.setdefault((theirs["host"], theirs["card"]), r)
        if first != r:
            raise InitError(
                f"ranks {first} and {r} use the same GPU ({theirs['device']} on {theirs['host']}): pass device=f'cuda:{{local_rank}}', or "
                "set CUDA_VISIBLE_DEVICES for each rank. To share one on purpose, for tests: NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or "
                "newer), or a NCCL_HOSTID of its own for each rank"
            )


BoundBucket.register(NcclBucket)
BucketWork.register(NcclBucketWork)
Communicator.register(NcclCommunicator)
