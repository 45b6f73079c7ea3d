# cython: language_level=3
"""ShmCommunicator: the ranks of one host over shared memory. A thin skin over kernels/shm.

Owns the segments (anonymous memory files: nothing in /dev/shm, nothing left after any exit), hands
out tensors that lie in them, checks arguments, releases the GIL around every wait, and turns status
codes into exceptions. How the ranks find each other is rendezvous.py's business: it arrives here as
a `bootstrap` whose `exchange(value)` returns every rank's value.
"""

import os
import sys
import time

import torch

from fastcomm.communicator import (
    OPS, BoundBucket, BucketWork, Communicator, canonical_op, is_abandoned_already, presence_values,
)
from fastcomm.errors import (
    AbandonedError, FastcommError, InitError, MismatchError, PeerLostError, TimeoutError,
)
from fastcomm.shm.memory import keep_freed_memory

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from posix.unistd cimport close as close_fd

from fastcomm.lifetime cimport forks
from fastcomm.shm.core cimport *
from fastcomm.shm.memory cimport Block, Segment


MAX_RANKS = SHM_MAX_RANKS  # of one communicator
cdef uint64_t SLICE_NS = 50_000_000  # how often a waiting rank looks at signals and its deadline
cdef double NOTICE_S = 1  # how long an interrupted rank waits before it says what for
cdef size_t SMALL_GRADIENT = 16384  # bytes
cdef int MAX_TOKENS = 16

cdef object TENSOR = torch.Tensor
# where a tensor without elements lies: not NULL, which says that an exception was raised
cdef char *NO_DATA = b""
cdef dict DTYPES = {
    torch.float32: SHM_FLOAT32, torch.float64: SHM_FLOAT64, torch.float16: SHM_FLOAT16,
    torch.bfloat16: SHM_BFLOAT16,
    torch.int32: SHM_INT32, torch.int64: SHM_INT64, torch.uint8: SHM_UINT8,
}
cdef tuple DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
# OPS stands in the order of enum shm_op
cdef dict OP_CODES = {op: code for code, op in enumerate(OPS)}
cdef tuple KIND_NAMES = (
    "nothing", "barrier", "all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single",
    "abandon",
)


# ---- work ----------------------------------------------------------------------------------------

@cython.freelist(8)
cdef class ShmWork:
    """A collective under way. Holds its tensors, and its outcome once that is known."""

    cdef ShmCommunicator comm
    cdef uint32_t seq
    cdef object tensors  # kept alive while they are needed
    cdef ShmBucket bucket
    cdef shm_piece *pieces
    cdef size_t n_pieces
    cdef str op
    cdef object presence
    cdef bint finished, is_realigning
    cdef object error

    def __dealloc__(self):
        free(self.pieces)

    def wait(self):
        """Blocks until the result is in place. Raises the FastcommError that ended the collective,
        if one did.

        What a signal handler raises meanwhile (Ctrl-C) is raised when the collective is over,
        because the peers count on it; what it raises a second time is raised at once, and aborts
        the communicator.
        """
        if not self.finished:
            self.comm._finish(self)
        self.comm._raise_what_ended(self)

    def is_completed(self):
        """Whether the result is in place, or never will be; does on the way whatever can be done
        without waiting. Raises only what any call would: after a fork, or while another thread is
        inside.
        """
        if not self.finished:
            self.comm._advance(self, 0)
        return self.finished

    def present(self):
        """See BucketWork.present."""
        self.wait()
        absent, _ = presence_values(self.op)
        return (self.presence != absent).tolist()

    cdef int settle(self, object error) except -1:
        """The outcome is known: an error, or None."""
        self.finished = True
        self.error = error
        if error is None and self.bucket is not None and self.bucket.wire is not self.bucket.flat:
            self.bucket.flat.copy_(self.bucket.wire)
        return 0

    cdef void release(self):
        """Nobody reads or writes the tensors any more."""
        self.tensors = self.bucket = None
        free(self.pieces)
        self.pieces = NULL


# ---- buckets -------------------------------------------------------------------------------------

cdef struct Place:
    uint64_t offset, numel
    bint is_contiguous


cdef struct Range:  # of memory in which gradients have their places
    char *base
    size_t nbytes
    Range *next


@cython.no_gc_clear  # __dealloc__ needs the communicator
cdef class ShmBucket:
    """A flat buffer and the places of the gradients in it: worked out once, launched once per
    round.
    """

    cdef readonly ShmWork posted  # see BoundBucket.posted
    cdef ShmCommunicator comm
    cdef Range range
    cdef object flat, wire, dtype, presence
    cdef dict tokens  # by op and by what is missing: what to put into `presence`
    cdef list views
    cdef uint32_t label
    cdef size_t itemsize
    cdef char *base
    cdef Place *places
    cdef ShmWork next  # holds what gather has left to the next launch

    def __cinit__(
        self, ShmCommunicator comm, flat, list views, list offsets, wire_dtype, uint32_t label
    ):
        self.comm, self.flat, self.wire, self.views, self.label = comm, flat, flat, views, label
        if wire_dtype is not None and wire_dtype is not flat.dtype:
            self.wire = comm.empty(flat.numel(), dtype=wire_dtype).zero_()
        self.dtype, self.itemsize = flat.dtype, flat.element_size()
        self.base = <char *><size_t>flat.data_ptr()
        self.presence, self.tokens = flat[flat.numel() - len(views):], {}
        self.places = <Place *>malloc(max(len(views), 1) * sizeof(Place))
        if self.places == NULL:
            raise MemoryError("out of memory")
        for i, view in enumerate(views):
            self.places[i] = Place(offsets[i], view.numel(), view.is_contiguous())
        self.range = Range(self.base, flat.nbytes, comm.ranges)
        comm.ranges = &self.range

    def __dealloc__(self):
        cdef Range **link
        if self.range.base != NULL:
            link = &self.comm.ranges
            while link[0] != &self.range:
                link = &link[0].next
            link[0] = self.range.next
        free(self.places)

    def gather(self, list parameters):
        """See BoundBucket.gather. A large gradient is left where autograd has put it: the launch
        copies what the peers will read, and the reduction reads the rest there. Small ones are
        copied here, which is cheaper than to keep many tensors alive.
        """
        cdef ShmWork work = self._next_work(len(parameters))
        cdef list left = []
        self.posted = None
        for i in range(len(parameters)):
            parameter, view = parameters[i], self.views[i]
            gradient = None if parameter is None else parameter.grad
            if gradient is None:
                left.append(i)
            elif gradient is not view:
                try:
                    # first: torch refuses it where the parameter's data has been replaced by other
                    parameter.grad = view
                    self._take(work, self.places[i], gradient, view)
                except BaseException as error:
                    parameter.grad, error.slot = gradient, i
                    raise
        return left

    cdef int _take(self, ShmWork work, Place place, gradient, view) except -1:
        """Moves one gradient to its place, now or in the launch."""
        cdef const char *source = <const char *><size_t>gradient.data_ptr()
        cdef char *target = self.base + place.offset * self.itemsize
        cdef size_t nbytes = place.numel * self.itemsize
        cdef bint is_at_home = source == target
        if not is_at_home and self.comm.is_in_a_bucket(source):
            raise FastcommError("lies in that of another one: clone gradients before you exchange "
                                "them")
        if (gradient.dtype is not self.dtype
                or not _lies_alike(gradient, view, place.is_contiguous) or gradient.is_neg()):
            view.copy_(gradient.clone() if is_at_home else gradient)
        elif is_at_home:  # a tensor of the user's on our memory
            pass
        elif self.wire is not self.flat or nbytes < SMALL_GRADIENT:
            memcpy(target, source, nbytes)
        else:
            work.pieces[work.n_pieces] = shm_piece(source, place.offset, place.numel)
            work.n_pieces += 1
            work.tensors.append(gradient)
        return 0

    cdef ShmWork _next_work(self, Py_ssize_t n_pieces):
        cdef ShmWork work = ShmWork.__new__(ShmWork)
        work.comm, work.bucket, work.tensors = self.comm, self, []
        if n_pieces:
            work.pieces = <shm_piece *>malloc(n_pieces * sizeof(shm_piece))
            if work.pieces == NULL:
                raise MemoryError("out of memory")
        self.next = work
        return work

    def launch(self, str op, list missing):
        """See BoundBucket.launch."""
        cdef ShmWork work = self.next or self._next_work(0)
        cdef shm_descriptor d = _descriptor(SHM_ALL_REDUCE, _op_code(op))
        cdef char *data = self.comm._check(self.wire, &d)
        self.next = self.posted = None
        work.op, work.presence = op, self.presence
        d.label = self.label
        self.presence.copy_(self._token(op, tuple(missing)))
        if self.wire is not self.flat:
            self.wire.copy_(self.flat)
        self.comm._post(&d, data, data, work)
        self.posted = work
        self.comm._advance(work, 0)  # earlier buckets, too, whose peers have come meanwhile
        if work.error is not None or self.comm.deferred is not None:
            self.comm._raise_what_ended(work)
        return work

    cdef object _token(self, str op, tuple missing):
        token = self.tokens.get((op, missing))
        if token is None:
            if len(self.tokens) > MAX_TOKENS:  # another pattern in every step
                self.tokens.clear()
            absent, present = presence_values(op)
            token = self.tokens[op, missing] = torch.full_like(self.presence, present)
            token[list(missing)] = absent
        return token

    def note_stream(self):
        """See BoundBucket.note_stream. There are no streams."""

    def square_sum(self):
        """See BoundBucket.square_sum."""

    def n_nonfinite(self):
        """See BoundBucket.n_nonfinite."""


cdef inline bint _lies_alike(gradient, view, bint is_contiguous) except -1:
    """Whether both have the same strides."""
    return gradient.is_contiguous() if is_contiguous else gradient.stride() == view.stride()


cdef struct Patience:  # of one wait
    double deadline
    uint64_t progress


# ---- the communicator ----------------------------------------------------------------------------

@cython.no_gc_clear  # __dealloc__ needs the segments
cdef class ShmCommunicator:
    """Collectives between `world_size` processes of one host. See
    fastcomm.communicator.Communicator for the contract.

    Made by fastcomm.init. One thread at a time may use it; all ranks call the same collectives in
    the same order.
    """

    cdef readonly int rank, world_size, local_rank
    cdef readonly int n_abandoned
    cdef public int left_in_backward
    cdef readonly object device, timeout
    cdef readonly tuple pids
    cdef object __weakref__
    cdef shm_comm *handle
    cdef list segments
    cdef list works  # the unfinished ShmWork of each slot of the ring, or None
    cdef list leaving  # works that were abandoned, and whose tensors may still be read or written
    cdef Range *ranges  # the flat buffers of all buckets
    # another rank has abandoned what was under way, which the caller has not heard of yet
    cdef object interruption
    # what a signal handler has raised while this rank waits, to be raised when that is over
    cdef object deferred
    cdef double deferred_since
    cdef uint32_t last  # number of the newest collective
    cdef int pidfds[SHM_MAX_RANKS]
    cdef int n_pidfds  # how many of them are initialised
    cdef double timeout_s
    cdef int generation
    cdef bint busy
    cdef object failure  # why the communicator cannot be used any more, or None

    backend = "shm"
    has_streams = False

    def __cinit__(self, int rank, int world_size, int local_rank, object bootstrap, object timeout):
        if world_size > SHM_MAX_RANKS:
            raise InitError(f"the shm transport takes up to {SHM_MAX_RANKS} ranks, not "
                            f"{world_size}")
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device = torch.device("cpu")
        self.timeout, self.timeout_s = timeout, timeout.total_seconds()
        self.generation, self.left_in_backward = forks(), -1
        self.works = [None] * SHM_RING
        self.segments, self.leaving = [], []
        for r in range(SHM_MAX_RANKS):
            self.pidfds[r] = -1
        self.n_pidfds = SHM_MAX_RANKS
        self._connect(bootstrap)

    def _connect(self, bootstrap):
        """Every rank makes a memory file, opens its peers', and closes the descriptors once all
        ranks have mapped everything.
        """
        cdef char *bases[SHM_MAX_RANKS]
        cdef Segment segment
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # sparse: costs only what is touched
        nbytes = min(memory, (1 << 45) // self.world_size) // 4096 * 4096
        fd = os.memfd_create("fastcomm", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            cores = sorted(os.sched_getaffinity(0))
            mine = {"pid": os.getpid(), "fd": fd, "nbytes": nbytes, "cores": cores}
            ranks = bootstrap.exchange(mine)
            self.pids = tuple(theirs["pid"] for theirs in ranks)
            try:
                for r, theirs in enumerate(ranks):
                    self._map_memory(r, theirs)
            except (OSError, InitError) as error:
                trouble = f"rank {self.rank} cannot reach the memory of its peers: {error}"
                raise InitError(trouble) from error
            bootstrap.exchange("mapped")
        finally:
            os.close(fd)
        for r in range(self.world_size):
            segment = self.segments[r]
            bases[r] = segment.base
        n_cores = len(set().union(*(theirs["cores"] for theirs in ranks)))
        self.handle = shm_open_comm(
            self.rank, self.world_size, bases, self.pidfds, self.world_size > n_cores
        )
        if self.handle == NULL:
            raise MemoryError("out of memory")

    def _map_memory(self, rank, theirs):
        fd = os.open(f"/proc/{theirs['pid']}/fd/{theirs['fd']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            is_own = rank == self.rank
            self.segments.append(Segment(fd, theirs["nbytes"], shm_control_bytes(), is_own))
        finally:
            os.close(fd)
        if rank != self.rank:
            self.pidfds[rank] = os.pidfd_open(theirs["pid"])

    def __dealloc__(self):
        # not in a forked child: the segment is the parent's to close
        if self.handle != NULL and self.generation == forks():
            shm_set_state(self.handle, SHM_CLOSED, -1)
        self._shut()
        for r in range(self.n_pidfds):
            if self.pidfds[r] >= 0:
                close_fd(self.pidfds[r])

    cdef void _shut(self) noexcept:
        shm_free_comm(self.handle)
        self.handle = NULL

    def close(self):
        """Ends the use of this communicator on this rank; peers that still wait for it get
        PeerLostError. Tensors stay valid.
        """
        if self.generation == forks():
            self._end(SHM_CLOSED, -1, FastcommError(f"rank {self.rank} has closed this "
                                                    "communicator"))

    def abort(self):
        """As close, but says to the peers that something went wrong: their collectives end with
        PeerLostError at once.
        """
        if self.generation == forks():
            self._end(SHM_ABORTED, -1, FastcommError(f"rank {self.rank} has aborted this "
                                                     "communicator"))

    cdef _end(self, int state, int blames, object failure):
        """Ends the use of the communicator, now or, if a thread is inside it, as soon as that comes
        out.
        """
        if self.handle == NULL or self.failure is not None:
            return
        self.failure = failure
        shm_set_state(self.handle, state, blames)
        if not self.busy:
            self._bury()

    cdef _bury(self):
        """Whoever still waits for a collective gets what ended the communicator."""
        self._shut()
        for work in [*self._settle_all(self.failure), *self.leaving]:
            (<ShmWork>work).release()
        self.leaving = []

    cdef int _come_out(self) except -1:
        """A thread is back from the C core."""
        self.busy = False
        if self.failure is not None and self.handle != NULL:
            self._bury()
        return 0

    def __repr__(self):
        return (
            f"<ShmCommunicator: rank {self.rank} of "
            f"{self.world_size}{', ended' if self.failure is not None else ''}>"
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
        """A flat tensor of `numel` elements in shared memory, uninitialised (zero when the memory
        is new). Local: no peer is asked.

        Collectives on it take the direct path: no copy. The memory lives as long as the tensor,
        also after close(). Raises ValueError for a negative numel, TypeError for a dtype the
        transport does not reduce, MemoryError.
        """
        self._check_usable()
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(DTYPE_NAMES)}; got {dtype}")
        if numel < 0:
            raise ValueError(f"numel must not be negative; got {numel}")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        block = Block(self.segments[self.rank], numel * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=numel)

    # -- collectives --

    def all_reduce(self, tensor, op="sum", *, bint async_op=False):
        """Reduces `tensor` over all ranks, in place: contiguous, on the CPU, the same numel and
        dtype on every rank.

        op: sum, mean (alias avg), min, max, prod. float16 and bfloat16 accumulate in float32 and
        round once. The result is bitwise the same on every rank. With async_op, returns a Work at
        once: leave the tensor alone until work.wait() returns. Raises MismatchError, PeerLostError
        or TimeoutError; ValueError or TypeError for a bad argument, before any peer is involved.
        """
        cdef shm_descriptor d = _descriptor(SHM_ALL_REDUCE, _op_code(op))
        cdef char *data = self._check(tensor, &d)
        return self._collective(&d, tensor, data, tensor, data, async_op)

    def broadcast(self, tensor, int src=0, *, bint async_op=False):
        """Copies rank `src`'s `tensor` into every other rank's. Same numel and dtype on every rank.
        Errors as all_reduce.
        """
        cdef shm_descriptor d = _descriptor(SHM_BROADCAST, SHM_SUM)
        cdef char *data = self._check(tensor, &d)
        if not 0 <= src < self.world_size:
            raise ValueError(f"src must be a rank from 0 to {self.world_size - 1}; got {src}")
        d.root = src
        return self._collective(&d, tensor, data, tensor, data, async_op)

    def broadcast_all(self, list tensors, int src=0):
        """As broadcast, of one tensor after the other."""
        for tensor in tensors:
            self.broadcast(tensor, src)

    def all_gather_single(self, out, inp, *, bint async_op=False):
        """Concatenates every rank's `inp`, by rank, into `out` of world_size * inp.numel()
        elements. Errors as all_reduce.
        """
        cdef shm_descriptor d = _descriptor(SHM_ALL_GATHER, SHM_SUM)
        cdef char *input = self._check(inp, &d)
        cdef char *output = self._check_out(
            "all_gather_single", out, inp, inp.numel() * self.world_size
        )
        return self._collective(&d, inp, input, out, output, async_op)

    def reduce_scatter_single(self, out, inp, op="sum", *, bint async_op=False):
        """Reduces `inp` over all ranks; rank r keeps the r-th of world_size equal parts in `out`.
        Errors as all_reduce.
        """
        cdef shm_descriptor d = _descriptor(SHM_REDUCE_SCATTER, _op_code(op))
        cdef char *input = self._check(inp, &d)
        if inp.numel() % self.world_size:
            raise ValueError(f"reduce_scatter_single: inp has {inp.numel()} elements, not a "
                             f"multiple of {self.world_size} ranks")
        cdef char *output = self._check_out(
            "reduce_scatter_single", out, inp, inp.numel() // self.world_size
        )
        return self._collective(&d, inp, input, out, output, async_op)

    def barrier(self, *, bint async_op=False):
        """Returns when every rank has called it."""
        cdef shm_descriptor d = _descriptor(SHM_BARRIER, SHM_SUM)
        self._check_usable()
        return self._collective(&d, None, NULL, None, NULL, async_op)

    def check(self):
        """See Communicator.check. Waits only after another rank has abandoned what was under way:
        until the ranks have met anew.
        """
        self._check_usable()
        self._hear()

    def abandon(self, *, bint in_any_case=False):
        """See Communicator.abandon."""
        self._check_usable()
        if not in_any_case and is_abandoned_already(self):
            return
        self.interruption = None  # if another rank has abandoned the same, this one joins it
        self._realign(FastcommError(f"rank {self.rank} abandoned the collectives under way"))
        self._raise_deferred(None)

    def bind_bucket(
        self, flat, list views, list offsets, *, wire_dtype, uint32_t label, int lane=0
    ):
        """See Communicator.bind_bucket. There are no lanes: every core is busy with one bucket
        already.
        """
        keep_freed_memory()
        return ShmBucket(self, flat, views, offsets, wire_dtype, label)

    cdef bint is_in_a_bucket(self, const char *address) noexcept:
        """Whether gradients have their places there, this bucket's or another's, which change at
        times of their own.
        """
        cdef Range *candidate = self.ranges
        while candidate != NULL:
            if <size_t>(address - candidate.base) < candidate.nbytes:
                return True
            candidate = candidate.next
        return False

    # -- the way of every collective --

    cdef char *_check(self, tensor, shm_descriptor *d) except NULL:
        """Checks that the communicator can be used and can take the tensor; fills in its dtype,
        numel and place. Returns its address.

        On the way of every call, and most of the time that a small one takes: each line costs a
        tenth of the whole.
        """
        cdef Segment arena = <Segment>self.segments[self.rank]
        cdef char *data = NULL
        cdef bint is_taken
        self._check_usable()
        if type(tensor) is not TENSOR and not isinstance(tensor, TENSOR):
            raise TypeError(f"expected a torch.Tensor; got {type(tensor).__name__}")
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise TypeError(f"dtype must be one of {', '.join(DTYPE_NAMES)}; got {tensor.dtype}")
        try:
            is_taken = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
            data = <char *><size_t>tensor.data_ptr()
        except RuntimeError:  # sparse tensors have no such things
            is_taken = False
        if not is_taken:
            _refuse(tensor)
        d.dtype, d.numel = dtype, tensor.numel()
        d.where = data - arena.base if <size_t>(data - arena.base) < arena.nbytes else SHM_PRIVATE
        return data if data != NULL else NO_DATA

    cdef char *_check_out(self, str name, out, inp, numel) except NULL:
        cdef shm_descriptor d
        cdef char *data = self._check(out, &d)
        if out.dtype != inp.dtype:
            raise TypeError(f"{name}: out is {out.dtype}, inp is {inp.dtype}")
        if out.numel() != numel:
            raise ValueError(f"{name}: out must have {numel} elements; it has {out.numel()}")
        return data

    cdef int _check_usable(self) except -1:
        if self.generation != forks():
            raise FastcommError(f"this communicator belongs to process {self.pids[self.rank]}, "
                                "and this process was forked from it: "
                                "call fastcomm.init here, or start workers with the spawn method")
        if self.failure is not None:
            failure = type(self.failure)(*self.failure.args)
            self._raise_deferred(failure)
            raise failure
        if self.busy:
            raise FastcommError("another thread is inside this communicator: give each thread its "
                                "own, or let them take turns")
        return 0

    cdef object _collective(
        self, shm_descriptor *d, inp, char *input, out, char *output, bint async_op
    ):
        cdef ShmWork work
        cdef uint32_t seq
        cdef int posted = SHM_AGAIN, status = SHM_AGAIN
        if self.interruption is not None:
            self._hear()
        if not async_op and self.works[(self.last + 1) % SHM_RING] is None:
            # The short way of a blocking call: no Work, and one release of the GIL for posting and
            # the first slice of waiting.
            self.busy = True
            with nogil:
                posted = shm_post(self.handle, d, input, output, NULL, 0, &seq)
                if posted == SHM_OK:
                    status = shm_wait(self.handle, seq, SLICE_NS)
            self._come_out()
            if posted == SHM_OK:
                self.last = seq
            if status == SHM_OK:
                return None
            self._check_usable()
        work = ShmWork.__new__(ShmWork)
        work.comm, work.tensors = self, (inp, out)
        if posted == SHM_OK:
            work.seq = seq
            self.works[seq % SHM_RING] = work
        else:
            self._post(d, input, output, work)
        if not async_op:
            work.wait()
            return None
        self._raise_deferred(None)
        return work

    cdef int _post(self, shm_descriptor *d, char *input, char *output, ShmWork work) except -1:
        """Posts a collective; waits only when the ring is full."""
        cdef int status
        cdef Patience patience = Patience(0, 0)
        cdef ShmWork older = self.works[(self.last + 1) % SHM_RING]
        if older is not None:
            self._finish(older)
        if self.interruption is not None:  # this collective belongs to what was abandoned
            self._hear()
        while True:
            self._check_usable()
            self.busy = True
            with nogil:  # gathers the pieces
                status = shm_make_room(self.handle, SLICE_NS)
                if status == SHM_OK:
                    status = shm_post(
                        self.handle, d, input, output, work.pieces, work.n_pieces, &work.seq
                    )
            self._come_out()
            if status == SHM_OK:
                break
            self._check_usable()
            if status == SHM_PEER_LOST:
                self._give_up(PeerLostError, self._lost_message())
            else:
                self._between_slices(&patience)
        self.last = work.seq
        self.works[work.seq % SHM_RING] = work
        return 0

    cdef int _finish(self, ShmWork work) except -1:
        """Waits until the work is finished, for good or ill."""
        cdef Patience patience = Patience(0, 0)
        while not self._advance(work, SLICE_NS):
            self._between_slices(&patience)
        return 0

    cdef bint _advance(self, ShmWork work, uint64_t slice_ns) except -1:
        """Does what can be done for `work` within a slice; returns whether it is finished."""
        cdef int status
        if work.finished:
            return True
        self._check_usable()
        self.busy = True
        with nogil:  # may wait up to slice_ns
            status = shm_wait(self.handle, work.seq, slice_ns)
        self._come_out()
        if work.finished:  # another thread has ended the communicator meanwhile
            return True
        if status == SHM_AGAIN:
            return False
        if status == SHM_PEER_LOST:
            self._give_up(PeerLostError, self._lost_message())
            return True
        self.works[work.seq % SHM_RING] = None
        if status == SHM_OK:
            work.settle(None)
        elif status == SHM_MISMATCH:
            work.settle(MismatchError(self._mismatch_message(work.seq)))
        else:
            work.settle(self._first_failure(work.seq))
            # the caller hears of it in its next call that may raise; until then nothing more is
            # posted
            if not work.is_realigning:
                self.interruption = work.error
                self.leaving += self._settle_all(work.error)
                self.leaving.append(work)
                return True
        work.release()
        return True

    cdef int _hear(self) except -1:
        """Raises what has interrupted this rank's collectives, if anything has. What is called from
        here on belongs to the next round.
        """
        if self.interruption is None:
            return 0
        error, self.interruption = self.interruption, None
        self._realign(error)
        self._raise_deferred(error)
        raise error

    cdef int _raise_what_ended(self, ShmWork work) except -1:
        """Raises the error that has ended the work, if one has, and what was deferred meanwhile."""
        if work.error is not None and work.error is self.interruption:
            self._hear()
        if self.deferred is not None:
            self._raise_deferred(work.error)
        if work.error is not None:
            # it may be raised again, and each time adds to its traceback
            raise type(work.error)(*work.error.args)
        return 0

    cdef int _raise_deferred(self, cause) except -1:
        if self.deferred is not None:
            error, self.deferred = self.deferred, None
            raise error from cause
        return 0

    cdef _realign(self, error):
        """Ends what is under way on this rank with `error`, and meets what the peers have still
        posted, until all stand at one place.
        """
        cdef shm_descriptor d = _descriptor(SHM_ABANDON, SHM_SUM)
        cdef ShmWork work
        self.leaving += self._settle_all(error)  # their tensors are in use until all ranks have met
        self.n_abandoned += 1
        while True:
            work = ShmWork.__new__(ShmWork)
            work.comm, work.is_realigning = self, True
            self._post(&d, NULL, NULL, work)
            self._finish(work)
            if work.error is None:
                break
            if self.handle == NULL:
                raise work.error
        for work in self.leaving:
            work.release()
        self.leaving = []

    cdef object _first_failure(self, uint32_t seq):
        """Why collective `seq` was abandoned: an earlier one that did not match, and nobody has
        asked for yet, or the peers know.
        """
        cdef ShmWork work
        for work in sorted((work for work in self.works if work is not None), key=_seq_of):
            if shm_wait(self.handle, work.seq, 0) == SHM_MISMATCH:
                return MismatchError(self._mismatch_message(work.seq))
        return AbandonedError(self._abandoned_message(seq))

    cdef list _settle_all(self, error):
        unfinished = [work for work in self.works if work is not None]
        self.works = [None] * SHM_RING
        for work in unfinished:
            (<ShmWork>work).settle(error)
        return unfinished

    cdef int _between_slices(self, Patience *patience) except -1:
        """A slice of waiting has passed: looks at signals (Ctrl-C) and at the clock, which runs
        while nothing moves.
        """
        self._look_at_signals()
        cdef double now = time.monotonic()
        cdef uint64_t progress
        if self.handle == NULL:  # a signal handler has ended the communicator
            return 0
        progress = shm_progress(self.handle)
        if patience.deadline == 0 or progress != patience.progress:
            patience.deadline, patience.progress = now + self.timeout_s, progress
        elif now >= patience.deadline:
            self._give_up(TimeoutError, self._timeout_message())
        return 0

    cdef int _look_at_signals(self) except -1:
        """What a handler raises waits until the peers do not depend on this rank any more; the
        second one ends the communicator.
        """
        try:
            PyErr_CheckSignals()
        except BaseException as error:
            if self.deferred is not None:
                self.deferred = None
                self.abort()
                raise
            self.deferred, self.deferred_since = error, time.monotonic()
        if self.deferred is not None and time.monotonic() - self.deferred_since > NOTICE_S:
            self.deferred_since = float("inf")
            print(f"fastcomm: rank {self.rank} was interrupted ({type(self.deferred).__name__}) "
                  "and ends a collective first, on which its "
                  "peers count; interrupt it again to abort", file=sys.stderr, flush=True)
        return 0

    # -- when it goes wrong --

    cdef _give_up(self, kind, str message):
        """The communicator is of no more use: tells the peers, and everybody on this rank who still
        waits.
        """
        cdef int culprit = shm_stalled_on(self.handle)
        if shm_blamed_by(self.handle, culprit) >= 0:  # it is itself a victim
            culprit = shm_blamed_by(self.handle, culprit)
        self._end(SHM_ABORTED, culprit, kind(message))

    cdef str _lost_message(self):
        cdef int rank = shm_stalled_on(self.handle), state = shm_state_of(self.handle, rank)
        cdef int blamed = shm_blamed_by(self.handle, rank)
        if state == SHM_CLOSED:
            what = "closed its communicator"
        elif state == SHM_ABORTED:
            what = "aborted its communicator"
            if blamed >= 0:
                what = f"gave up on rank {blamed} (pid {self.pids[blamed]})"
        else:
            what = "died"
        return (
            f"rank {rank} (pid {self.pids[rank]}) {what}; {self._history(rank)}; "
            f"{self._position()}"
        )

    cdef str _timeout_message(self):
        cdef uint32_t here = shm_posted(self.handle, self.rank)
        late = [r for r in range(self.world_size) if shm_posted(self.handle, r) < here]
        late = late or [shm_stalled_on(self.handle)]
        names = "; ".join(f"rank {r} (pid {self.pids[r]}): {self._history(r)}" for r in late)
        return f"waited {self.timeout_s:g} s; {self._position()}; missing: {names}"

    cdef str _mismatch_message(self, uint32_t seq):
        wanted = "; ".join([
            f"rank {r}: {_name(shm_descriptor_of(self.handle, r, seq))}"
            for r in range(self.world_size)
        ])
        return f"the ranks call different collectives (number {seq} on this communicator): {wanted}"

    cdef str _abandoned_message(self, uint32_t seq):
        ranks = [
            r for r in range(self.world_size)
            if shm_descriptor_of(self.handle, r, seq).kind == SHM_ABANDON
        ]
        return (
            f"rank {', '.join(map(str, ranks))} abandoned what was under way (an exception ended "
            "its backward?): skip this step"
        )

    cdef str _history(self, int rank):
        cdef uint32_t last = shm_posted(self.handle, rank)
        if not last:
            return "it has joined no collective yet"
        name = _name(shm_descriptor_of(self.handle, rank, last))
        return f"the last collective it joined is number {last}, {name}"

    cdef str _position(self):
        cdef uint32_t last = shm_posted(self.handle, self.rank)
        return (
            f"rank {self.rank} is at number {last}, "
            f"{_name(shm_descriptor_of(self.handle, self.rank, last))}"
        )


cdef int _refuse(tensor) except -1:
    """Says what is wrong with the tensor."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(f"the shm transport takes dense tensors on the CPU; got {tensor.layout} "
                         f"on {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor must be contiguous; its shape is {tuple(tensor.shape)}, its "
                         f"strides are {tensor.stride()}")
    raise ValueError("the tensor is a negated view of its memory: pass tensor.resolve_neg()")


cdef inline shm_descriptor _descriptor(int kind, int op) noexcept:
    cdef shm_descriptor d
    d.kind, d.op, d.dtype, d.root, d.numel, d.where, d.label = kind, op, 0, 0, 0, SHM_PRIVATE, 0
    return d


cdef str _name(shm_descriptor d):
    """A collective in words, for messages."""
    if d.kind == SHM_BARRIER or d.kind == SHM_ABANDON:
        return KIND_NAMES[d.kind]
    words = f"{KIND_NAMES[d.kind]} of {d.numel} {DTYPE_NAMES[d.dtype]} elements"
    if d.kind == SHM_BROADCAST:
        words += f" from rank {d.root}"
    elif d.kind != SHM_ALL_GATHER:
        words += f", op {OPS[d.op]}"
    if d.label:
        words += f" (bucket {d.label % 65536 - 1} of reducer {d.label // 65536})"
    return words


def _seq_of(ShmWork work):
    return work.seq


cdef int _op_code(str op) except -1:
    code = OP_CODES.get(op)
    return OP_CODES[canonical_op(op)] if code is None else code


def reduce_shards(list buffers, str op="sum"):
    """Reduces n flat tensors of equal numel and dtype element by element and writes the result into
    every one of them.

    One pass that reads n and writes n tensors, in this process alone: the arithmetic of all_reduce
    without its flags. The benchmarks take it for the streaming bound of the machine. Raises
    ValueError or TypeError for tensors that do not fit together.
    """
    cdef const void *inputs[SHM_MAX_RANKS]
    cdef int code = _op_code(op), n = len(buffers)
    if not 1 <= n <= SHM_MAX_RANKS:
        raise ValueError(f"expected 1 to {SHM_MAX_RANKS} tensors; got {n}")
    first = buffers[0]
    if first.dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(DTYPE_NAMES)}; got {first.dtype}")
    for i, buffer in enumerate(buffers):
        is_alike = buffer.dtype is first.dtype and buffer.numel() == first.numel()
        if not (is_alike and buffer.is_cpu and buffer.is_contiguous()):
            raise ValueError("the tensors must be contiguous, on the CPU, and of one dtype and "
                             "numel")
        inputs[i] = <const void *><size_t>buffer.data_ptr()
    cdef int dtype = DTYPES[first.dtype]
    cdef size_t numel = first.numel()
    with nogil:
        shm_reduce(dtype, code, numel, inputs, n, <void *const *>inputs, n)


BoundBucket.register(ShmBucket)
BucketWork.register(ShmWork)
Communicator.register(ShmCommunicator)
