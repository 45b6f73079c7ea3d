# cython: language_level=3
"""Ring: one rank's end of the ring of announcements in shared memory. Posts collectives, waits for
them, abandons them, and says what went wrong.

It drives the C core (kernels/shm), releases the GIL around every wait, and turns status codes into
exceptions. communicator.pyx and bucket.pyx decide what is posted. docs/design.md explains the ring.
"""

import sys

import torch

from fastcomm.comm import collective, words
from fastcomm.comm.collective import CPU_DTYPES
from fastcomm.comm.deadline import running_s
from fastcomm.comm.words import (
    ABORTED, CLOSED, DROPPED, ENDED, KILLED, RAISED, has_aborted, has_ended,
)
from fastcomm.errors import AbandonedError, FastcommError, PeerLostError, TimeoutError
from fastcomm.comm.communicator import Work
from fastcomm.comm.standing import again
from fastcomm.postmortem.script_end import tell_at_end
from fastcomm.postmortem.whereabouts import whereabouts_of

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

from fastcomm.comm.gradient_slot cimport DLTensor, is_described, is_without_memory
from fastcomm.control.announcement cimport *
from fastcomm.transports.shm.memory cimport Segments


MAX_RANKS = SHM_MAX_RANKS  # of one communicator
cdef uint64_t SLICE_NS = 50_000_000  # how often a waiting rank looks at signals and its deadline
cdef shm_counting NOT_COUNTED = shm_counting(0, False)
cdef int DL_CPU = 1  # kDLCPU of dlpack.h
cdef double NOTICE_S = 1  # how long an interrupted rank waits before it prints why
# How a rank has ended, by its state; an aborted one may name another as the cause.
cdef dict GONE = {
    SHM_ALIVE: KILLED, SHM_CLOSED: CLOSED, SHM_ABORTED: ABORTED,
    SHM_DROPPED: DROPPED, SHM_ENDED: ENDED, SHM_RAISED: RAISED,
}

cdef object TENSOR = torch.Tensor, PARAMETER = torch.nn.Parameter
# Found once: to look each of them up takes a hundredth of a small collective.
cdef object IS_CONTIGUOUS = TENSOR.is_contiguous, IS_NEG = TENSOR.is_neg
cdef object DATA_PTR = TENSOR.data_ptr, NUMEL = TENSOR.numel
cdef object CPU = torch.device("cpu")
# of tensors in a sequence: autograd then knows that they were written to
cdef object INCREMENT_VERSION = torch._C._increment_version
# the address of a tensor without elements: not NULL, which means that an exception was raised
cdef char *NO_DATA = b""
cdef dict DTYPE_CODES = {dtype: code for code, dtype in enumerate(CPU_DTYPES)}
cdef int DESCRIBED_CODES[8][9]  # the same, by DLPack's code of a dtype and its bytes; else -1


cdef _fill_in_codes():
    cdef DLTensor found
    for kind in range(8):
        for nbytes in range(9):
            DESCRIBED_CODES[kind][nbytes] = -1
    for dtype, code in DTYPE_CODES.items():
        if is_described(torch.empty(0, dtype=dtype, device="cpu"), &found):
            DESCRIBED_CODES[found.dtype.code][found.dtype.bits // 8] = code


_fill_in_codes()


# ---- work ----------------------------------------------------------------------------------------

@cython.freelist(8)
cdef class ShmWork:
    """A collective under way. Holds its tensors, and its outcome once that is known."""

    __reduce_ex__, instead = Work.__reduce_ex__, Work.instead

    def __dealloc__(self):
        free(self.pieces)
        free(self.bounds)

    def wait(self):
        """What a signal handler raises meanwhile (Ctrl-C) is raised when the collective is over,
        because the peers count on it. A second exception is raised at once, and aborts the
        communicator.
        """
        if not self.finished:
            self.ring.finish(self)
        self.ring.raise_what_ended(self)

    def is_completed(self):
        """Raises only what any call would: after a fork, or while another thread is inside."""
        if not self.finished:
            self.ring.advance(self, 0)
        return self.finished

    def present(self):
        self.wait()
        return self.used_mask.present(self.op)

    def is_skipped(self):
        return self.outcome.is_skipped

    def times(self):
        it = self.outcome
        return (0, it.began_ns, it.ended_ns) if it.ended_ns else None

    cdef int take_bounds(self, tuple bounds) except -1:
        """Keeps them for the C core."""
        self.bounds = <uint64_t *>malloc(len(bounds) * sizeof(uint64_t))
        if self.bounds == NULL:
            raise MemoryError("out of memory")
        for i, bound in enumerate(bounds):
            self.bounds[i] = bound
        return 0

    cdef int take_pieces(self, size_t n) except -1:
        """Makes room for so many."""
        self.pieces = <shm_piece *>malloc(n * sizeof(shm_piece))
        if self.pieces == NULL:
            raise MemoryError("out of memory")
        return 0

    cdef int resolve(self, object error) except -1:
        """Sets the outcome: an error, or None for a result."""
        if self.written is not None:  # whoever saw them since the call
            INCREMENT_VERSION(self.written)
        self.finished = True
        self.error = error
        self.entry.end(error)
        if error is None and self.wide is not None:
            for wide, narrow in zip(self.wide, self.narrow):
                wide.copy_(narrow)
        return 0

    cdef void release(self):
        """Drops the tensors: nobody reads or writes them any more."""
        self.tensors = self.written = self.wide = self.narrow = None
        free(self.pieces)
        self.pieces = NULL


# ---- the ring ------------------------------------------------------------------------------------

@cython.no_gc_clear  # __dealloc__ needs the segments
cdef class Ring:
    """The ring as one rank has it. Made by ShmCommunicator, on all ranks together."""

    def __cinit__(self, int rank, int world_size, object bootstrap, object timeout):
        cdef Segments segments = Segments(rank, world_size, bootstrap, shm_control_bytes())
        self.segments, self.rank, self.world_size = segments, rank, world_size
        self.timeout_s = timeout.total_seconds()
        self.standing, self.works = Standing(), [None] * SHM_RING
        self.flight = FlightRecorder("shm", rank, segments.processes)
        self.arena = segments.of(rank)
        self.handle = shm_open_comm(
            rank, world_size, segments.bases, segments.nbytes, segments.pidfds,
            segments.is_crowded,
        )
        if self.handle == NULL:
            raise MemoryError("out of memory")
        tell_at_end(self)

    def __dealloc__(self):
        # without close(), and not in a forked child: the segment is the parent's
        if self.handle != NULL and self.standing.failure is None and not self.standing.is_forked():
            shm_set_state(self.handle, SHM_DROPPED, -1)
        shm_free_comm(self.handle)

    # -- the end --

    def tell_of_end(self, bint has_raised):
        if not self.standing.is_forked():
            state = SHM_RAISED if has_raised else SHM_ENDED
            self._end(state, -1, FastcommError(has_ended(self.rank)))

    cdef close(self, int state, str message):
        """Ends the use of the ring on this rank. state: SHM_CLOSED or SHM_ABORTED."""
        if not self.standing.is_forked():
            self._end(state, -1, FastcommError(message))

    def _end(self, int state, int blames, failure):
        """Ends the use of the communicator, now or, if a thread is inside it, as soon as that comes
        out.
        """
        if self.standing.failure is not None:
            return
        self.standing.end(failure)
        shm_set_state(self.handle, state, blames)
        if not self.busy:
            self._bury()

    def _bury(self):
        """All unfinished works end with the communicator's failure. The C core's part stays as long
        as this ring: a thread that is back from the core still reads there what has come of it.
        """
        cdef ShmWork work
        unfinished = [work for work in self.works if work is not None]
        self.works = [None] * SHM_RING
        for work in unfinished:
            work.resolve(self.standing.failure)
            work.release()

    cdef int _come_out(self) except -1:
        """Called when a thread is back from the C core."""
        self.busy = False
        if self.standing.failure is not None:
            self._bury()
        return 0

    cdef keep_times(self, bint is_on):
        shm_keep_times(self.handle, 1 if is_on else -1)

    # -- how every collective is posted and finished --

    cdef char *take(self, tensor, announcement *d) except NULL:
        """Checks that the communicator can be used and can take the tensor; fills in its dtype,
        numel and place. Returns its address.

        Every call comes through here. For a small tensor this is most of the call's time: each line
        costs a tenth of the whole.
        """
        cdef char *data = NULL
        cdef bint is_taken
        cdef DLTensor found
        self.check_usable()
        if (type(tensor) is TENSOR or type(tensor) is PARAMETER) and is_described(tensor, &found):
            # in place of five calls; what is not taken here is looked at more closely below
            data = <char *>found.data + found.byte_offset
            if _takes(&found, d) and not IS_NEG(tensor) and not is_without_memory(tensor, data):
                return self._place(data, d)
        if type(tensor) is not TENSOR and not isinstance(tensor, TENSOR):
            collective.refuse_tensor(tensor, "shm", CPU)
        dtype = DTYPE_CODES.get(tensor.dtype)
        if dtype is None:
            if tensor.dtype.is_complex and tensor.layout is torch.strided:
                return self.take(collective.as_pairs(tensor, collective.OPS[d.op]), d)
            collective.refuse_dtype(tensor.dtype, CPU_DTYPES)
        try:
            is_taken = tensor.is_cpu and IS_CONTIGUOUS(tensor) and not IS_NEG(tensor)
            data = <char *><size_t>DATA_PTR(tensor)
        except RuntimeError:  # sparse tensors have no address
            is_taken = False
        d.dtype, d.numel = dtype, NUMEL(tensor)
        if not is_taken or is_without_memory(tensor, data):
            collective.refuse_tensor(tensor, "shm", CPU)
        return self._place(data, d)

    cdef char *_place(self, char *data, announcement *d) noexcept:
        """Notes where the tensor lies. Returns its address, never NULL."""
        cdef size_t offset = data - self.arena.base
        d.wire, d.offset = d.dtype, offset
        d.place = IN_ARENA if offset < self.arena.nbytes else PRIVATE_MEMORY
        return data if data != NULL else NO_DATA

    cdef int check_usable(self) except -1:
        """Raises the reason if no collective can begin."""
        if self.standing.failure is not None or self.standing.is_forked():
            refusal = self.standing.refusal()
            if not self.standing.is_forked():
                self._raise_from_handler(refusal)
            raise refusal
        if self.busy:
            raise FastcommError(words.OTHER_THREAD)
        return 0

    cdef object call(
        self, announcement *d, inp, char *input, out, char *output, bint async_op
    ):
        """inp, out: held until it is over; the tensor it writes to is `out`, if there is one."""
        cdef ShmWork work
        cdef Entry entry = None
        cdef tuple written = None if out is None else (out,)
        cdef uint32_t seq
        cdef int posted = SHM_AGAIN, status = SHM_AGAIN
        if self.interruption is not None:
            self.hear()
        if not async_op and self.works[(self.last + 1) % SHM_RING] is None:
            # The fast path of a blocking call: no Work, and one release of the GIL for posting and
            # the first slice of waiting.
            if written is not None:
                INCREMENT_VERSION(written)
            entry = noted(self.flight, d, self.last + 1)
            self.busy = True
            with nogil:
                posted = shm_post(
                    self.handle, d, input, output, NULL, 0, NULL, NOT_COUNTED, &seq
                )
                if posted == SHM_OK:
                    status = shm_wait(self.handle, seq, SLICE_NS)
            self._come_out()
            if posted == SHM_OK:
                self.last = seq
            if status == SHM_OK:
                entry.end()
                return None
            self.check_usable()
        work = ShmWork.__new__(ShmWork)
        work.ring, work.tensors, work.entry = self, inp, entry
        work.written = written
        if posted == SHM_OK:
            work.seq, work.n_abandoned = seq, self.standing.n_abandoned
            self.works[seq % SHM_RING] = work
        else:
            self.post(d, input, output, work)
        if not async_op:
            work.wait()
            return None
        self._raise_from_handler(None)
        return work

    cdef bint follow(self) except -1:
        cdef announcement d = announced(CALL_ALL_REDUCE, SHM_SUM)
        d.presence = HAS_NO_DATA
        self.check_usable()
        self.call(&d, None, NULL, None, NULL, False)
        return shm_outcome_of(self.handle, self.last).has_no_data

    cdef int post(self, announcement *d, char *input, char *output, ShmWork work) except -1:
        """Posts a collective; waits only when the ring is full."""
        cdef int status
        cdef Patience patience = Patience(0, 0)
        cdef ShmWork older = self.works[(self.last + 1) % SHM_RING]
        if older is not None:
            self.finish(older)
        if self.interruption is not None:  # this collective belongs to the abandoned round
            self.hear()
        if work.written is not None:
            INCREMENT_VERSION(work.written)
        if work.entry is None:
            work.entry = noted(self.flight, d, self.last + 1)
        while True:
            self.check_usable()
            self.busy = True
            with nogil:  # gathers the pieces
                status = shm_make_room(self.handle, SLICE_NS)
                if status == SHM_OK:
                    status = shm_post(
                        self.handle, d, input, output, work.pieces, work.n_pieces, work.bounds,
                        work.counting, &work.seq,
                    )
            self._come_out()
            if status == SHM_OK:
                break
            self.check_usable()
            if status == SHM_PEER_LOST:
                self._give_up(self._lost())
            else:
                self._between_slices(&patience)
        self.last, work.n_abandoned = work.seq, self.standing.n_abandoned
        self.works[work.seq % SHM_RING] = work
        return 0

    cdef int finish(self, ShmWork work) except -1:
        """Waits until the work is finished, with a result or an error."""
        cdef Patience patience = Patience(0, 0)
        while not self.advance(work, SLICE_NS):
            self._between_slices(&patience)
        return 0

    cdef bint advance(self, ShmWork work, uint64_t slice_ns) except -1:
        """Moves `work` forward for at most a slice; returns whether it is finished."""
        cdef int status
        if work.finished:
            return True
        self.check_usable()
        self.busy = True
        with nogil:  # may wait up to slice_ns
            status = shm_wait(self.handle, work.seq, slice_ns)
        self._come_out()
        if work.finished:  # another thread has ended the communicator meanwhile
            return True
        if status == SHM_AGAIN:
            return False
        if status == SHM_PEER_LOST:
            self._give_up(self._lost())
            return True
        error = None if status == SHM_OK else self._uncut(self._failure_of, work.seq, status)
        self.works[work.seq % SHM_RING] = None
        if status == SHM_OK:
            work.outcome = shm_outcome_of(self.handle, work.seq)
        work.resolve(error)
        # the caller's next call that may raise raises it; until then nothing more is posted
        if status == SHM_ABANDONED and not self.is_realigning:
            self.interruption = error
            self._resolve_behind(work)
        work.release()
        return True

    cdef int hear(self) except -1:
        """Raises what has interrupted this rank's collectives, if anything has. What is called from
        here on belongs to the next round.
        """
        if self.interruption is None:
            return 0
        error, self.interruption = self.interruption, None
        self._realign()
        copy = self._uncut(self.standing.to_raise, error, -1)
        self._raise_from_handler(copy)
        raise copy

    cdef int raise_what_ended(self, ShmWork work) except -1:
        """Raises the error that has ended the work, if one has, and what was deferred meanwhile."""
        if work.error is not None and work.error is self.interruption:
            self.hear()
        if self.from_handler is not None:
            self._raise_from_handler(work.error)
        if work.error is not None:
            raise self.standing.to_raise(work.error, work.n_abandoned)
        return 0

    cdef int _raise_from_handler(self, cause) except -1:
        if self.from_handler is not None:
            error, self.from_handler = self.from_handler, None
            raise error from cause
        return 0

    cdef abandon(self):
        self.interruption = None  # if another rank has abandoned this round, join it
        self._realign()
        self._raise_from_handler(None)

    def _realign(self):
        """Posts CALL_ABANDON against what the peers have still posted, until all ranks stand at the
        same number. What was posted before ends here as it does on all ranks.
        """
        cdef announcement d = announced(CALL_ABANDON, SHM_SUM)
        cdef ShmWork work
        self.standing.n_abandoned += 1
        self.is_realigning = True
        try:
            while True:
                work = ShmWork.__new__(ShmWork)
                work.ring = self
                self.post(&d, NULL, NULL, work)
                self.finish(work)
                if work.error is None:
                    break
                if self.standing.failure is not None:
                    raise again(work.error)
            for work in [work for work in self.works if work is not None]:
                self.finish(work)
        finally:
            self.is_realigning = False
        try:
            self.standing.note_abandonment()
        except BaseException as raised:
            self._defer(raised)

    def _failure_of(self, uint32_t seq, int status):
        """Returns the error that ends a collective."""
        if status == SHM_MISMATCH:
            return self._mismatch(seq)
        return self._first_failure(seq)

    def _first_failure(self, uint32_t seq):
        """Why collective `seq` was abandoned: an earlier one did not match, and nobody has waited
        for it yet; else the peers abandoned it.
        """
        cdef ShmWork work
        for work in sorted((work for work in self.works if work is not None), key=_seq_of):
            if shm_wait(self.handle, work.seq, 0) == SHM_MISMATCH:
                return self._mismatch(work.seq)
        return AbandonedError(self._abandonment(seq))

    def _resolve_behind(self, ShmWork ended):
        """The works posted after an abandoned one end with its error, and move no data any more:
        the rank that abandons does so until all have met. Those before it may end well on all.
        """
        cdef ShmWork work
        for work in [work for work in self.works if work is not None]:
            if <int32_t>(work.seq - ended.seq) > 0:
                self.works[work.seq % SHM_RING] = None
                work.resolve(ended.error)
                work.release()

    cdef int _between_slices(self, Patience *patience) except -1:
        """Called after each slice of waiting. Looks at signals (Ctrl-C) and at the deadline, which
        counts from the last progress.
        """
        self._look_at_signals()
        cdef double now = running_s()
        cdef uint64_t progress
        if self.standing.failure is not None:  # a signal handler has ended the communicator
            return 0
        progress = shm_progress(self.handle)
        if patience.deadline == 0 or progress != patience.progress:
            patience.deadline, patience.progress = now + self.timeout_s, progress
        elif now >= patience.deadline:
            self._give_up(TimeoutError(self._timeout_message()))
        return 0

    def _defer(self, raised):
        """Keeps what a signal handler has raised until the peers do not depend on this rank any
        more. A second exception is raised here and aborts the communicator.
        """
        if self.from_handler is not None:
            self.from_handler = None
            self.close(SHM_ABORTED, has_aborted(self.rank))
            raise raised
        self.from_handler, self.raised_since = raised, running_s()

    def _uncut(self, function, first, second):
        """Returns function(first, second), though a signal handler may raise in its Python."""
        try:
            return function(first, second)
        except BaseException as raised:
            self._defer(raised)
            return function(first, second)

    def _look_at_signals(self):
        """Runs the handlers of signals. Says so where one has raised and the peers take long."""
        try:
            PyErr_CheckSignals()
        except BaseException as raised:
            self._defer(raised)
        if self.from_handler is not None and running_s() - self.raised_since > NOTICE_S:
            self.raised_since = float("inf")
            print(f"fastcomm: rank {self.rank} was interrupted "
                  f"({type(self.from_handler).__name__}) and ends a collective first, on which its "
                  "peers count; interrupt it again to abort", file=sys.stderr, flush=True)

    # -- errors --

    def _give_up(self, failure):
        """Ends the communicator with `failure`, here and for the peers."""
        cdef int culprit = shm_stalled_on(self.handle)
        if shm_blamed_by(self.handle, culprit) >= 0:  # it is itself a victim
            culprit = shm_blamed_by(self.handle, culprit)
        self._end(SHM_ABORTED, culprit, failure)

    def _lost(self):
        """The error for a peer that is gone, or has given up."""
        cdef int rank = shm_stalled_on(self.handle), state = shm_state_of(self.handle, rank)
        cdef int blamed = shm_blamed_by(self.handle, rank)
        what, dead = GONE.get(state, KILLED), state in (SHM_ALIVE, SHM_ENDED, SHM_RAISED)
        where = ""
        if state == SHM_ABORTED and blamed >= 0:
            what = f"gave up on {self._who(blamed)}"
            if blamed != self.rank:
                where = self._where([blamed])
        return PeerLostError(
            f"{self._who(rank)} {what}; {self._history(rank)}; "
            f"{self._position()}{where}",
            (rank,) if dead else (),
        )

    def _timeout_message(self):
        cdef uint32_t here = shm_posted(self.handle, self.rank)
        late = [r for r in range(self.world_size) if shm_posted(self.handle, r) < here]
        late = late or [shm_stalled_on(self.handle)]
        names = "; ".join(f"{self._who(r)}: {self._history(r)}" for r in late)
        waited = words.waited(self.timeout_s)
        return f"{waited}; {self._position()}; missing: {names}{self._where(late)}"

    def _who(self, int rank):
        return self.segments.processes[rank].in_words()

    def _where(self, list ranks):
        return self._uncut(_whereabouts_of, self.segments.processes, ranks)

    def _mismatch(self, uint32_t seq):
        return words.mismatch(seq, {r: self._called(r, seq) for r in range(self.world_size)})

    def _abandonment(self, uint32_t seq):
        return words.abandonment([
            r for r in range(self.world_size)
            if shm_announcement_of(self.handle, r, seq).kind == CALL_ABANDON
        ])

    def _history(self, int rank):
        cdef uint32_t last = shm_posted(self.handle, rank)
        if not last:
            return "it has joined no collective yet"
        return f"the last collective it joined is number {last}, {self._name(rank, last)}"

    def _position(self):
        cdef uint32_t last = shm_posted(self.handle, self.rank)
        return f"rank {self.rank} is at number {last}, {self._name(self.rank, last)}"

    def _name(self, int rank, uint32_t seq):
        """Names a collective, where nobody compares records."""
        return self._called(rank, seq).without_record()

    def _called(self, int rank, uint32_t seq):
        cdef announcement d = shm_announcement_of(self.handle, rank, seq)
        if not shm_is_possible(self.handle, rank, &d):
            return words.Called("", "what is no collective")
        return called_by(&d)


cdef bint _takes(const DLTensor *found, announcement *d) noexcept:
    """Whether this is a contiguous tensor on the CPU, of a dtype that is reduced. Fills in its
    dtype and numel.
    """
    cdef uint64_t numel = 1
    cdef int i, code = -1
    if found.device_type == DL_CPU and found.dtype.code < 8 and found.dtype.bits <= 64:
        code = DESCRIBED_CODES[found.dtype.code][found.dtype.bits // 8]
    if code < 0:
        return False
    for i in range(found.ndim - 1, -1, -1):
        if found.strides[i] != <int64_t>numel and found.shape[i] != 1:
            return False  # also some without elements, which are looked at below
        numel *= found.shape[i]
    d.dtype, d.numel = code, numel
    return True


def _whereabouts_of(processes, ranks):
    return whereabouts_of([processes[rank] for rank in ranks])


def _seq_of(ShmWork work):
    return work.seq
