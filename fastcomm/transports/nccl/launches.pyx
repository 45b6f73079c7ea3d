# cython: language_level=3
"""Launches: what a rank has launched over NCCL, and which of it is unfinished.

Numbers the launches, and keeps the tensors of those that nobody may be waiting for. Only says which
unfinished launch is the oldest; the watchdog judges it.

The driver may keep whoever asks for an event waiting, while a launch of this process waits for room
in the device's queue. So the watchdog asks on another thread, and goes on without an answer.
"""

import weakref
from collections import deque

from fastcomm.comm.deadline import Deadline, running_s
from fastcomm.comm.times import DRIVER_ANSWER_S
from fastcomm.transports.nccl.lane import ThreadCall

cimport cython
from libc.stdlib cimport calloc, free

from fastcomm.transports.cuda.driver cimport (
    CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUcontext, CUevent, Device,
    check, driver,
)


@cython.no_gc_clear  # a work that is collected hands its record on
cdef class Launches:
    """The launches of one communicator. The thread that launches calls `begin` and `end` around
    each launch; the watchdog's thread calls `ask` and `oldest_unfinished`.
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
                    check(answers[i].code, b"cuEventQuery")
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
