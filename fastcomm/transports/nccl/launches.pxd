from libc.stdint cimport uint64_t

from fastcomm.postmortem.flight_recorder cimport FlightRecorder
from fastcomm.transports.cuda.driver cimport Device
from fastcomm.transports.nccl.lane cimport InFlight, Lane


cdef class Launches:
    cdef FlightRecorder flight
    cdef Device cuda
    cdef list lanes  # the link's own list
    cdef uint64_t number  # of the newest launch in this epoch
    cdef object records
    # of works that are gone, the oldest first; their launches may not be over
    cdef readonly object unused
    cdef list flattening  # works of buckets whose gradients may not have been read yet
    cdef object question, answer_by  # the newest to the driver, and its deadline
    cdef InFlight new_record(self)
    cdef InFlight take_record(self)
    cdef int begin(self, Lane lane, InFlight in_flight, op) except -1
    cdef int end(self, Lane lane, InFlight in_flight, bint is_captured) except -1
    cdef InFlight calling(self)
