# cython: language_level=3
"""Lane: one NCCL communicator, with the stream that all of its collectives are launched on. Begins
and ends it. Launches: what was launched on the lanes, and what of it is unfinished.

A call that begins or ends a communicator may never return. So it is made on another thread.
Nothing can end that thread; it is left behind when the time is up, with what it works on. (NCCL's
own answer, non-blocking communicators, makes it start a thread for every collective, which costs
more than the whole launch of a bucket.)
"""

import contextlib
import functools
import threading
import time
import weakref
from collections import deque

from fastcomm.comm.deadline import Deadline, running_s
from fastcomm.comm.times import DRIVER_ANSWER_S, SLICE_S
from fastcomm.comm.words import Called, called, waited
from fastcomm.errors import InitError, NcclError, TimeoutError

cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from fastcomm.postmortem.flight_recorder cimport FlightRecorder
from fastcomm.transports.cuda.driver cimport (
    CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CapturedGraphs, CUcontext,
    CUevent, Device, Event, Stream, check as check_driver, driver,
)
from fastcomm.transports.nccl.library cimport (
    check, nccl, ncclComm_t, ncclSuccess, ncclUniqueId,
)


@cython.no_gc_clear  # a work that is collected hands its record on
cdef class InFlight:
    """What the watchdog knows of the newest of the collectives that share an event.

    A collective that is captured in a CUDA graph shares its event with no other one: nobody may ask
    for an event of a capture, and what was launched before may be under way.
    """

    def __cinit__(self, Device device):
        self.done, self.mark = Event(device), Event(device)

    def describe(self):
        if self.dtype is None:
            return Called(self.kind, self.kind)
        return called(
            self.kind, self.numel, self.dtype, op=self.op,
            root=self.root, label=self.label, fingerprint=self.fingerprint,
        )

    cdef int note(self, FlightRecorder flight, int lane) except -1:
        """The record's next collective is launched."""
        self.entry = flight.note(
            self.kind, self.dtype, self.numel, self.number,
            <str>self.op if self.op is not None else None, self.root, self.label, self.fingerprint,
        )
        self.entry.lane = lane
        return 0


cdef class Lane:
    """One NCCL communicator and its stream. Its owner calls `connect` or `split_from` first, and
    `close` or `begin_abort` last.
    """

    def __cinit__(self, Device device, CapturedGraphs graphs):
        self.device, self.graphs = device, graphs
        self.stream, self.ready = Stream(device), Event(device)
        self.in_flight = InFlight(device)

    def connect(self, str identifier, int rank, int world_size, double timeout_s, look):
        """Meets the other ranks. `look()` is called while waiting and raises if one of them has
        failed. Raises InitError, NcclError.
        """
        try:
            raw = bytes.fromhex(identifier)
        except (TypeError, ValueError):
            raw = b""
        if len(raw) != sizeof(ncclUniqueId):
            raise InitError(f"rank 0 has sent {identifier!r}, which is no identifier of NCCL's")
        call = ThreadCall(self.device, functools.partial(_init, raw, rank, world_size))
        self._take(call, f"rank {rank} in ncclCommInitRankConfig", timeout_s, look)

    def split_from(self, Lane other, int rank, double timeout_s, look):
        """Connects the same ranks again, which meet over a lane they have already."""
        call = ThreadCall(self.device, functools.partial(_split, other, rank))
        self._take(call, f"rank {rank} in ncclCommSplit", timeout_s, look)

    def _take(self, call, str what, double timeout_s, look):
        """Waits until the call has returned a communicator. Meanwhile calls `look()`, which raises
        when the other ranks will not come. Raises the call's error.
        """
        deadline = Deadline(timeout_s)
        call.start()
        while not call.over.wait(SLICE_S):
            look()
            if deadline.is_over():
                raise InitError(
                    f"{waited(timeout_s)} for {what}: all ranks have met, but NCCL does not get "
                    "through between them. NCCL_DEBUG=INFO shows "
                    "what it tries; NCCL_SOCKET_IFNAME chooses the network interface"
                )
        if call.error is not None:
            raise call.error
        self.comm = <ncclComm_t><size_t>call.result

    def close(self, double timeout_s, memory, bint aborts):
        """Ends the communicator when all that was launched is done, and begins to free it. Returns
        the call that does: see `errors_of`. After an error, or when the time is up, aborts it and
        raises NcclError or TimeoutError. memory: as in begin_abort. aborts: frees it by an abort,
        as another rank has: NCCL 2.31 waits without a limit for the others that destroy theirs.
        """
        if self.comm == NULL:
            return None
        call = ThreadCall(self.device, functools.partial(self._finalize, memory)).start()
        in_time = Deadline(timeout_s).await_(call.over.wait)
        if in_time and call.error is None:
            if aborts:
                return self.begin_abort(memory, None)
            destroying = functools.partial(_destroy, <size_t>self.comm)
            self.comm = NULL
            return ThreadCall(self.device, destroying).start()
        self.is_given_up = True
        has_ended = Deadline(timeout_s).await_(self.begin_abort(memory, None).over.wait)
        raise call.error if in_time else TimeoutError(
            f"{waited(timeout_s)} for what was launched to end; "
            + ("it was aborted" if has_ended else "NCCL does not abort it either: it is left "
               "behind")
        )

    def _finalize(self, memory):
        with nogil:  # waits for the device
            check_driver(driver.synchronize_stream(self.stream.handle), b"cuStreamSynchronize")
        if self.is_given_up:
            return
        self.n_inside += 1
        memory.begin_ending()  # nobody frees the memory of a window that is still registered
        try:
            memory.forget(<size_t>self.comm, True)
            with nogil:
                check(nccl.finalize(self.comm), b"ncclCommFinalize")
        finally:
            memory.end_ending()
            self.n_inside -= 1

    def begin_abort(self, memory, all_begun):
        """Begins to end the communicator at once, on another thread, so that its kernels leave
        the device. Returns that thread's call, or None if there is nothing to end.

        memory: the pool, which must not free anything until the call is over. all_begun: an event
        that is set when all lanes have begun; None if there is one lane. First come the
        revocations, as a lane's may wait for another lane's kernels.
        """
        call = self.ending
        if call is None and self.comm != NULL:
            call = ThreadCall(self.device, functools.partial(self._abort, memory, all_begun))
            self.ending = call
            memory.begin_ending()
            call.start()
        return call

    def _abort(self, memory, all_begun):
        """Revokes, then aborts. One thread does both: an abort frees what a revocation uses, and
        the revocation may take as long as the work before the last kernel of NCCL's.
        """
        cdef ncclComm_t comm = self.comm
        try:
            # without a revocation kernels may still use the windows
            is_revoked = nccl.revoke != NULL and self._revoke(all_begun)
            self._wait_for_graphs()
            self.comm = NULL
            with contextlib.suppress(NcclError):  # the abort ends the windows in any case
                memory.forget(<size_t>comm, is_revoked)
            with nogil:  # waits for the kernels to leave
                check(nccl.abort(comm), b"ncclCommAbort")
        finally:
            self.ending = None
            memory.end_ending()

    def _revoke(self, all_begun):
        """Returns whether NCCL has: it refuses where a close hangs."""
        cdef int code
        with nogil:  # waits for the kernels to leave
            code = nccl.revoke(self.comm, 0)
        if all_begun is not None:
            all_begun.wait()
        # An abort frees what a thread inside NCCL uses. One may stay inside: some loops there look
        # at no flag. It is left behind then, and the communicator with it.
        while code == ncclSuccess and self._is_in_use():
            time.sleep(0.005)
        return code == ncclSuccess

    def _is_in_use(self):
        """Whether another thread is inside NCCL with this communicator."""
        is_calling = self.calling is not None and self.calling.dtype is not None
        return is_calling or self.n_inside > 0

    def _wait_for_graphs(self):
        """A graph that goes writes to the communicators it has captured, and an abort frees them.
        (Without a revocation before it, NCCL waits for the graphs.) Nobody waits for this thread
        meanwhile: the device is free already.
        """
        cdef bint is_alive = nccl.revoke != NULL and self.graphs.count() > 0
        if is_alive:
            self.ending.over.set()
        while is_alive:  # looks once more at the end: the driver may tell NCCL after us
            is_alive = self.graphs.count() > 0
            time.sleep(SLICE_S)


def _init(bytes identifier, int rank, int world_size):
    cdef ncclUniqueId unique
    cdef ncclComm_t comm = NULL
    memcpy(unique.internal, <const char *>identifier, sizeof(ncclUniqueId))
    with nogil:  # waits for all ranks
        check(nccl.init_rank(&comm, world_size, unique, rank, NULL), b"ncclCommInitRankConfig")
    return <size_t>comm


def _split(Lane parent, int rank):
    cdef ncclComm_t comm = NULL
    parent.n_inside += 1
    try:
        with nogil:  # waits for all ranks
            check(nccl.split(parent.comm, 0, rank, &comm, NULL), b"ncclCommSplit")
    finally:
        parent.n_inside -= 1
    return <size_t>comm


def _destroy(size_t comm):
    """Frees a communicator that has nothing left to do. Nothing ends this call: NCCL waits in it
    until the host's other ranks have left the communicator, too, and an abort would free it twice.
    """
    with nogil:
        check(nccl.destroy(<ncclComm_t>comm), b"ncclCommDestroy")


def errors_of(list calls, double timeout_s):
    """What has gone wrong in those that are over by then; the others go on by themselves."""
    deadline = Deadline(timeout_s)
    over = [call for call in calls if deadline.await_(call.over.wait)]
    return [call.error for call in over if call.error is not None]


cdef class ThreadCall:
    """A call into NCCL or the driver on another thread: `make()`. `over` is set when it has
    returned; `result` and `error` then say what, and what it has raised.
    """

    cdef Device device
    cdef object make
    cdef readonly object over, result, error

    def __init__(self, Device device, make):
        self.device, self.make, self.over = device, make, threading.Event()

    def start(self):
        # Not start_thread(): the call may never return, and the end of the script does not wait.
        threading.Thread(target=self._run, name="fastcomm call", daemon=True).start()
        return self

    def _run(self):
        make, self.make = self.make, None
        try:
            with nogil:
                self.device.enter()
            self.result = make()
        except Exception as error:
            self.error = error
        self.over.set()


# ---- what was launched ---------------------------------------------------------------------------

@cython.no_gc_clear  # a work that is collected hands its record on
cdef class Launches:
    """What a rank has launched over the lanes of one communicator, and which of it is unfinished.

    Numbers the launches, and keeps the tensors of those that nobody may be waiting for. Only says
    which unfinished launch is the oldest; the watchdog judges it.

    The thread that launches calls `begin` and `end` around each launch; the watchdog's thread calls
    `ask` and `oldest_unfinished`. The driver may keep whoever asks for an event waiting, while a
    launch of this process waits for room in the device's queue. So the watchdog asks on another
    thread, and goes on without an answer.
    """

    def __cinit__(self, Device cuda, list lanes, FlightRecorder flight):
        self.cuda, self.lanes, self.flight = cuda, lanes, flight
        self.records, self.unused, self.flattening = weakref.WeakSet(), deque(), []

    cdef InFlight new_record(self):
        in_flight = InFlight(self.cuda)
        self.records.add(in_flight)
        return in_flight

    cdef InFlight take_record(self):
        """A record for one asynchronous collective. Whoever drops the work puts it in `unused`."""
        cdef InFlight in_flight
        if self.unused:
            in_flight = self.unused[0]
            if not in_flight.is_pending or _is_over(in_flight):
                self.unused.popleft()
                if in_flight.is_pending:
                    in_flight.entry.end()
                in_flight.is_pending = in_flight.is_marked = False
                in_flight.tensors = None
                self.records.add(in_flight)  # where the work was collected it was thought gone
                return in_flight
        return self.new_record()

    def forget_tensors(self):
        """All that was launched is over."""
        for work in self.flattening:
            work.kept.clear()
        self.flattening.clear()
        for in_flight in _members(self.records):
            (<InFlight>in_flight).tensors = None

    def begin_epoch(self, uint64_t epoch):
        """The ranks meet again: what was launched before is over, and numbers restart."""
        self.number = 0
        self.flight.epoch = epoch
        self.forget_tensors()

    cdef int begin(self, Lane lane, InFlight in_flight, op) except -1:
        """From here on the watchdog counts the launch as unfinished."""
        self.number += 1
        in_flight.number, in_flight.op = self.number, op
        if not in_flight.is_pending:  # else the one before has not ended, as far as is known
            in_flight.since = running_s()
        in_flight.note(self.flight, lane.index)
        lane.calling = in_flight
        return 0

    cdef int end(self, Lane lane, InFlight in_flight, bint is_captured) except -1:
        """The launch has returned. A launch that was only captured does not run, and its events
        must not be queried: its record is its own.
        """
        cdef CUcontext before
        cdef int code
        in_flight.is_pending = not is_captured
        if is_captured:  # which says nothing of what was launched before
            in_flight.entry.lane = -1
            in_flight.entry.end()
        if in_flight.is_pending and not in_flight.is_marked:
            with nogil:  # may wait for room in the device's queue
                before = self.cuda.enter()
                code = driver.record_event(in_flight.mark.handle, lane.stream.handle)
                self.cuda.leave(before)
            in_flight.is_marked = code == CUDA_SUCCESS
            in_flight.marked = in_flight.entry
        lane.calling = None
        return 0

    cdef InFlight calling(self):
        """The record of the launch that a thread is inside: at most one over all lanes."""
        for lane in self.lanes:
            if (<Lane>lane).calling is not None:
                return (<Lane>lane).calling
        return None

    def ask(self):
        """Asks the driver on another thread what is over. Returns after DRIVER_ANSWER_S at the
        latest; when the driver does not answer, only that thread stays behind, and no other is
        begun.
        """
        if self.question is None or self.question.over.is_set():
            if not self._pending():
                return
            question = ThreadCall(self.cuda, self.ask_driver)
            self.answer_by = Deadline(DRIVER_ANSWER_S)
            self.question = question  # last: another thread may ask, too
            question.start()
        question = self.question
        if self.answer_by.await_(question.over.wait):
            if question.error is not None:
                raise question.error

    def ask_driver(self):
        """Asks the driver which launches are over. Raises FastcommError for a broken device."""
        cdef InFlight in_flight
        cdef uint64_t epoch = self.flight.epoch
        cdef list pending = self._pending()
        cdef size_t i, n = len(pending)
        cdef Answer *answers = <Answer *>calloc(n + 1, sizeof(Answer))
        if answers == NULL:
            raise MemoryError("out of memory")
        try:
            for i in range(n):
                in_flight = pending[i]
                answers[i].number, answers[i].done = in_flight.number, in_flight.done.handle
                answers[i].mark = in_flight.mark.handle if in_flight.is_marked else NULL
            with nogil:  # once for all, as another thread may keep the GIL for long
                _query(answers, n)
            if epoch != self.flight.epoch:  # the ranks have met again: the numbers are others' now
                return
            for i in range(n):
                in_flight = pending[i]
                # meanwhile another thread may have launched the same bucket again
                if in_flight.number != answers[i].number or not in_flight.is_pending:
                    continue
                if answers[i].code != CUDA_ERROR_NOT_READY:
                    check_driver(answers[i].code, b"cuEventQuery")
                    in_flight.is_pending = in_flight.is_marked = False
                    in_flight.tensors = None
                    in_flight.entry.end()
                    continue
                if answers[i].has_progress:
                    in_flight.marked.end()
                    in_flight.is_marked, in_flight.since = False, running_s()
        finally:
            free(answers)

    def oldest_unfinished(self):
        """Its number, seconds without progress, and its description; as far as is known."""
        cdef InFlight in_flight, oldest = self.calling()
        for in_flight in self._pending():
            if oldest is None or in_flight.number < oldest.number:
                oldest = in_flight
        if oldest is None:
            return None
        return oldest.number, running_s() - oldest.since, oldest.describe()

    def _pending(self):
        """The records of what is not known to be over."""
        cdef InFlight calling = self.calling()
        return [
            in_flight for in_flight in _members(self.records)
            if (<InFlight>in_flight).is_pending and in_flight is not calling
        ]


# What the driver has said of one record.
cdef struct Answer:
    uint64_t number
    CUevent done
    CUevent mark  # or NULL
    int code  # of the query for `done`
    bint has_progress


cdef void _query(Answer *answers, size_t n) noexcept nogil:
    """A capture on any thread does not mind the questions."""
    cdef int mode = CU_STREAM_CAPTURE_MODE_RELAXED
    cdef size_t i
    driver.exchange_capture_mode(&mode)
    for i in range(n):
        answers[i].code = driver.query_event(answers[i].done)
        if answers[i].code == CUDA_ERROR_NOT_READY and answers[i].mark != NULL:
            answers[i].has_progress = driver.query_event(answers[i].mark) == CUDA_SUCCESS
    driver.exchange_capture_mode(&mode)


cdef bint _is_over(InFlight in_flight) noexcept:
    """Whether the record's launch is over, as far as can be told."""
    cdef Answer answer
    answer.done, answer.mark = in_flight.done.handle, NULL
    with nogil:
        _query(&answer, 1)
    return answer.code == CUDA_SUCCESS


cdef list _members(weak_set):
    """The members of a WeakSet to which other threads add."""
    while True:
        try:
            return list(weak_set)
        except RuntimeError:  # another thread has changed it
            pass
