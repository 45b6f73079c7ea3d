from libc.stdint cimport uint32_t, uint64_t

from fastcomm.postmortem.flight_recorder cimport Entry, FlightRecorder
from fastcomm.transports.cuda.driver cimport CapturedGraphs, Device, Event, Stream
from fastcomm.transports.nccl.library cimport ncclComm_t


cdef class InFlight:
    cdef Event done
    cdef Event mark  # recorded after an older launch: once it is over, there was progress
    cdef uint64_t number
    cdef double since  # time of the last known progress
    cdef bint is_pending, is_marked
    cdef int root
    cdef str kind  # as in control/announcement.pyx, or what else ranks do together
    cdef object dtype, op  # None: there is none
    cdef size_t numel
    cdef uint32_t label
    cdef uint64_t fingerprint
    cdef Entry entry  # of the newest launch
    cdef Entry marked  # of the launch after which `mark` was recorded
    cdef tuple tensors  # that the launch uses, where nothing else may keep them until it is over
    cdef object __weakref__

    cdef int note(self, FlightRecorder flight, int lane) except -1


cdef class Lane:
    cdef ncclComm_t comm
    cdef int index  # among those of the communicator
    cdef Device device
    cdef CapturedGraphs graphs
    cdef Stream stream
    cdef Event ready  # recorded on the caller's stream; the lane's stream waits for it
    cdef InFlight in_flight
    cdef InFlight calling  # of the launch that a thread is inside, else None
    cdef int n_inside  # other calls into NCCL with this communicator, by any thread
    cdef object ending  # the call that aborts it, until that is over, else None
    cdef bint is_given_up  # by close(): the communicator is being aborted, and may be gone


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
