from libc.stdint cimport uint64_t

from fastcomm.transports.cuda.driver cimport Device
from fastcomm.transports.nccl.lane cimport Lane, Ticket


cdef class Launches:
    cdef Device cuda
    cdef list lanes  # the link's own list
    cdef uint64_t number  # of the newest launch in this epoch
    cdef object tickets
    # of works that are gone, the oldest first; their launches may not be over
    cdef readonly object unused
    cdef Ticket new_ticket(self)
    cdef Ticket take_ticket(self)
    cdef forget_tensors(self)
    cdef begin_epoch(self)
    cdef int begin(self, Lane lane, Ticket ticket, op) except -1
    cdef int end(self, Lane lane, Ticket ticket, bint is_captured) except -1
    cdef Ticket calling(self)
    cdef oldest_unfinished(self)
    cdef list _pending(self)
