# cython: language_level=3
"""NcclBucket: a flat buffer and its way over NCCL, from the gradients where autograd has put them
and back, launched in one call.
"""

import torch

from fastcomm.collective import OTHERS_GRADIENT, presence_values
from fastcomm.communicator import BoundBucket, BucketWork
from fastcomm.errors import FastcommError

cimport cython
from libc.stdint cimport uint32_t

from fastcomm.cuda.driver cimport CUcontext, CUstream, Event, check, driver
from fastcomm.cuda.multi_tensor cimport MultiTensor
from fastcomm.flat_buffers cimport FlatBuffer, is_in_a_flat_buffer
from fastcomm.nccl.lane cimport ALL_REDUCE, Lane, Ticket
from fastcomm.nccl.library cimport dtype_number, nccl, ncclSuccess, op_number
from fastcomm.nccl.link cimport Link


cdef int MAX_TOKENS = 16


@cython.freelist(8)
cdef class NcclBucketWork:
    """A bucket under way."""

    cdef NcclBucket bucket
    cdef object op
    cdef int epoch
    cdef bint is_captured

    def wait(self):
        """As NcclWork.wait."""
        self.bucket.comm._check_work(self.epoch)
        self.bucket.awaited_on = self.bucket.comm._order_current_after(self.bucket.ticket.done)
        self.bucket.is_awaited = True

    def is_completed(self):
        """Whether the result is in place."""
        return self.bucket.comm._is_over(self.bucket.ticket.done)

    def present(self):
        """See BucketWork.present. Waits for the device; while a CUDA graph is captured all
        parameters count as present.
        """
        if self.is_captured:
            return [True] * len(self.bucket.views)
        absent, _ = presence_values(self.op)
        present = (self.bucket.presence.float() != absent).tolist()
        self.bucket.comm._check_work(self.epoch)
        return present


cdef class NcclBucket:
    """A flat buffer, the places of the gradients in it, and its way over the wire: one launch of
    the host's per round.
    """

    cdef readonly NcclBucketWork posted  # see BoundBucket.posted
    cdef Link comm
    cdef object __weakref__
    cdef Lane lane
    cdef Ticket ticket
    cdef object flat, wire, presence
    cdef list views, kept
    cdef MultiTensor gathering, scattering, measuring
    cdef size_t numel
    cdef FlatBuffer known
    cdef int dtype
    cdef set streams  # on which gradients of this round were produced
    cdef CUstream awaited_on  # which stream was ordered after the last round, if one was
    cdef dict tokens  # by op: what the presence of all parameters looks like, on the device
    cdef Event side
    cdef object token  # what last round has left in the wire
    cdef bint is_moved, is_captured, was_captured, is_awaited

    def __cinit__(self, Link comm, flat, list views, list offsets, wire, uint32_t label, int lane):
        cdef size_t n = len(views)
        self.comm, self.flat, self.wire, self.views = comm, flat, wire, views
        self.lane = comm._lane(lane)
        self.ticket = comm._new_ticket()
        self.ticket.kind, self.ticket.label = ALL_REDUCE, label
        self.ticket.dtype, self.ticket.numel = wire.dtype, wire.numel()
        self.dtype, self.numel = dtype_number(wire.dtype), wire.numel()
        self.presence = wire[wire.numel() - n:]
        numels = [view.numel() for view in views]
        self.gathering = MultiTensor(
            [*numels, n], [*offsets, wire.numel() - n], flat.dtype, wire.dtype, comm.cuda
        )
        if wire is not flat:
            self.scattering = MultiTensor(numels, offsets, flat.dtype, wire.dtype, comm.cuda)
        self.measuring = MultiTensor(numels, offsets, flat.dtype, flat.dtype, comm.cuda)
        self.streams, self.tokens, self.kept, self.side = set(), {}, [], Event()
        for i in range(n):
            self.gathering.addresses[i] = <void *><size_t>views[i].data_ptr()
            self.measuring.addresses[i] = self.gathering.addresses[i]
            if self.scattering is not None:
                self.scattering.addresses[i] = self.gathering.addresses[i]
        comm._register(self.lane, wire, label)
        self.known = FlatBuffer(flat)
        comm.buckets.add(self)

    def register_memory(self):
        """Anew, with this rank's NCCL alone."""
        self.comm.pool.register(<void *><size_t>self.wire.data_ptr(), self.lane, False)

    def note_stream(self):
        """A gradient has been produced on the current stream."""
        self.streams.add(<size_t>self.comm.cuda.current_stream())

    def gather(self, list parameters):
        """See BoundBucket.gather. Only notes where the gradients are: the launch moves them."""
        cdef list left = []
        self.posted = None
        self._order_gathering()
        self.is_moved = False
        self.kept = []
        for i in range(len(parameters)):
            parameter, view = parameters[i], self.views[i]
            self.gathering.addresses[i] = <void *><size_t>view.data_ptr()
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                left.append(i)
            elif gradient is not view:
                try:
                    # first: torch refuses it where the parameter's data has been replaced by other
                    parameter.grad = view
                    self._take(i, gradient, view)
                except BaseException as error:
                    parameter.grad, error.slot = gradient, i
                    raise
        return left

    cdef int _take(self, Py_ssize_t i, gradient, view) except -1:
        """Notes where one gradient is, or moves it to its place if the launch cannot."""
        cdef char *source = <char *><size_t>gradient.data_ptr()
        cdef bint is_at_home = source == self.gathering.addresses[i]
        if not is_at_home and is_in_a_flat_buffer(source):
            raise FastcommError(OTHERS_GRADIENT)
        if gradient.dtype is not view.dtype or not _lies_alike(gradient, view) or gradient.is_neg():
            view.copy_(gradient.clone() if is_at_home else gradient)
        elif not is_at_home:
            self.gathering.addresses[i] = source
            self.kept.append(gradient)
            self.is_moved = True
        return 0

    def launch(self, str op, list missing):
        """See BoundBucket.launch. Flattens on the current stream; reduces, and unflattens, on the
        lane's.
        """
        cdef NcclBucketWork work = NcclBucketWork.__new__(NcclBucketWork)
        cdef Link comm = self.comm
        cdef double scale = 1.0 / comm.world_size if op == "mean" else 1.0
        cdef int code
        comm._check_usable()
        self.posted = None
        cdef CUstream current = comm.cuda.current_stream()
        cdef CUcontext before = comm.cuda.enter()
        try:
            work.is_captured = self.is_captured
            token = self._token(op, () if work.is_captured else tuple(missing))
            self.gathering.addresses[len(self.views)] = <void *><size_t>token.data_ptr()
            # Where nothing moves and nothing is scaled, last round's presence still stands in the
            # wire: see presence_values.
            flattens = (bool(missing) or self.is_moved or scale != 1 or self.wire is not self.flat
                        or token is not self.token)
            comm._begin(self.lane, self.ticket, op)
            try:
                code = self._launch_on(current, scale, flattens, op_number(op))
            finally:
                comm._end(self.lane, self.ticket, work.is_captured)
            if code != ncclSuccess:
                raise comm._reason(comm._error(code, b"ncclAllReduce"))
        finally:
            comm.cuda.leave(before)
        work.bucket, work.op, work.epoch = self, op, comm.epoch
        self.posted = work
        self.token, self.was_captured, self.is_awaited = token, work.is_captured, False
        self._release(current)
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
        """What travels behind the gradients: for each parameter whether this rank has a gradient of
        it. On the device, kept for reuse.
        """
        token = self.tokens.get((op, missing))
        if token is None:
            if missing:
                self._token(op, ())  # so that it is there when a graph is captured
            if len(self.tokens) > MAX_TOKENS:  # another pattern in every step
                self.tokens = {key: known for key, known in self.tokens.items() if not key[1]}
            absent, present = presence_values(op)
            # the flattening divides
            values = [present * (self.comm.world_size if op == "mean" else 1)] * len(self.views)
            for i in missing:
                values[i] = absent
            host = torch.tensor(
                values, dtype=self.flat.dtype, device="cpu", pin_memory=self.flat.is_cuda
            )
            token = self.tokens[op, missing] = host.to(self.flat.device, non_blocking=True)
        return token

    cdef int _order_gathering(self) except -1:
        """What happens on the current stream from here on comes after the gradients, whatever
        streams they were produced on, and after the last round's results.
        """
        cdef CUstream current = self.comm.cuda.current_stream()
        cdef CUcontext before
        self.comm._check_usable()
        before = self.comm.cuda.enter()
        try:
            self.is_captured = self.comm._note_capture(current)
            self._order(current)
        finally:
            self.comm.cuda.leave(before)
        return 0

    cdef int _order(self, CUstream current) except -1:
        cdef CUstream other
        for stream in self.streams:
            other = <CUstream><size_t>stream
            if other != current:
                check(driver.record_event(self.side.handle, other), b"cuEventRecord")
                check(driver.wait_event(current, self.side.handle, 0), b"cuStreamWaitEvent")
        # A capture takes no events from outside, and none of its own out; the caller synchronises
        # around it.
        is_known = self.is_awaited and current == self.awaited_on
        if self.ticket.number and not is_known and not self.is_captured and not self.was_captured:
            check(driver.wait_event(current, self.ticket.done.handle, 0), b"cuStreamWaitEvent")
        return 0

    cdef _release(self, CUstream current):
        """The gradients have been read when the current stream comes this far: their memory may be
        used for what it does next.
        """
        if self.streams - {<size_t>current}:
            for gradient in self.kept:  # but they belong to other streams
                gradient.record_stream(torch.cuda.current_stream(self.flat.device))
        self.kept = []
        self.streams.clear()

    def square_sum(self):
        """See BoundBucket.square_sum. One pass over the flat buffer."""
        self._measure()
        return self.measuring.square_sum

    def n_nonfinite(self):
        """See BoundBucket.n_nonfinite. Found on the way where gradients are cast back; else by one
        pass over the flat buffer.
        """
        if self.scattering is not None:
            return self.scattering.n_nonfinite
        self._measure()
        return self.measuring.n_nonfinite

    cdef int _measure(self) except -1:
        cdef CUcontext before = self.comm.cuda.enter()
        try:
            self.measuring.norm_on(self.comm.cuda.current_stream())
        finally:
            self.comm.cuda.leave(before)
        return 0


cdef bint _lies_alike(gradient, view) except -1:
    """Whether both have the same strides, where those of dimensions of size 1 mean nothing."""
    strides, places = gradient.stride(), view.stride()
    if strides == places:
        return True
    return all([one == other or n == 1 for one, other, n in zip(strides, places, view.shape)])


BoundBucket.register(NcclBucket)
BucketWork.register(NcclBucketWork)
