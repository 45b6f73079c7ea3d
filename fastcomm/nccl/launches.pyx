# cython: language_level=3
"""Launches: what a rank has launched over NCCL, and which of it is unfinished, by ticket.

Numbers the launches, and keeps the tensors of those that nobody may be waiting for. Only says which
unfinished launch is the oldest; the watchdog judges it.
"""

import time
import weakref

from fastcomm.cuda.driver cimport CUDA_SUCCESS, CUcontext, Device, driver


cdef class Launches:
    """The launches of one communicator. The thread that launches calls `begin` and `end` around
    each launch; the watchdog's thread calls `oldest_unfinished`.
    """

    def __cinit__(self, Device cuda, list lanes):
        self.cuda, self.lanes = cuda, lanes
        self.tickets, self.in_flight = weakref.WeakSet(), {}

    cdef Ticket new_ticket(self):
        cdef CUcontext before = self.cuda.enter()
        try:
            ticket = Ticket()
        finally:
            self.cuda.leave(before)
        self.tickets.add(ticket)
        return ticket

    cdef begin_epoch(self):
        """The ranks meet again: what was launched before is over, and numbers restart."""
        self.number = 0
        self.in_flight.clear()

    cdef int begin(self, Lane lane, Ticket ticket, op) except -1:
        """From here on the watchdog counts the launch as unfinished."""
        self.number += 1
        ticket.number, ticket.op = self.number, op
        if not ticket.is_pending:  # else the one before has not ended, as far as is known
            ticket.since = time.monotonic()
        lane.calling = ticket
        return 0

    cdef int end(self, Lane lane, Ticket ticket, bint is_captured) except -1:
        """The launch has returned. A launch that was only captured does not run, and its events
        must not be queried.
        """
        cdef int code
        ticket.is_pending = not is_captured
        if ticket.is_pending and not ticket.is_marked:
            with nogil:  # may wait for room in the device's queue
                code = driver.record_event(ticket.mark.handle, lane.stream.handle)
            ticket.is_marked = code == CUDA_SUCCESS
        lane.calling = None
        return 0

    cdef Ticket calling(self):
        """The ticket of the launch that a thread is inside: at most one over all lanes."""
        for lane in self.lanes:
            if (<Lane>lane).calling is not None:
                return (<Lane>lane).calling
        return None

    cdef oldest_unfinished(self):
        """See Watched._oldest_unfinished."""
        cdef Ticket ticket, oldest = self.calling()
        cdef uint64_t number
        for candidate in _members(self.tickets):
            ticket, number = candidate, (<Ticket>candidate).number
            if ticket.is_pending and ticket is not self.calling():
                # Both release the GIL: another thread may launch the same bucket again.
                is_over = ticket.done.is_over()
                has_progress = ticket.is_marked and ticket.mark.is_over()
                if number != ticket.number:
                    continue
                if is_over:
                    ticket.is_pending = ticket.is_marked = False
                    self.in_flight.pop(ticket, None)
                    continue
                if has_progress:
                    ticket.is_marked, ticket.since = False, time.monotonic()
                if oldest is None or ticket.number < oldest.number:
                    oldest = ticket
        if oldest is None:
            return None
        return oldest.number, time.monotonic() - oldest.since, oldest.describe()


cdef list _members(weak_set):
    """The members of a WeakSet to which other threads add."""
    while True:
        try:
            return list(weak_set)
        except RuntimeError:  # another thread has changed it
            pass
