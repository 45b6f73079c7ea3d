from libc.stdint cimport uint32_t, uint64_t

from fastcomm.comm.gathering cimport UsedMask
from fastcomm.comm.standing cimport Standing
from fastcomm.postmortem.flight_recorder cimport Entry, FlightRecorder
from fastcomm.control.announcement cimport announcement
from fastcomm.transports.shm.core cimport *
from fastcomm.transports.shm.memory cimport Segment, Segments


cdef class ShmWork:
    cdef Ring ring
    cdef uint32_t seq
    cdef int n_abandoned  # of the ring when it was posted
    cdef object tensors  # kept alive while they are needed
    cdef tuple written  # those of the user's that it writes to, or None
    # of a bucket that is reduced in another dtype: what is cast back, and from where; else None
    cdef object wide, narrow
    cdef uint64_t *bounds  # of a collective of shards, else NULL
    cdef shm_piece *pieces
    cdef size_t n_pieces
    cdef str op
    cdef UsedMask used_mask
    cdef bint finished
    cdef shm_counting counting
    cdef shm_outcome outcome
    cdef object error
    cdef Entry entry  # once it is to be posted

    cdef int take_bounds(self, tuple bounds) except -1
    cdef int take_pieces(self, size_t n) except -1
    cdef int resolve(self, object error) except -1
    cdef void release(self)


cdef struct Patience:  # of one wait
    double deadline
    uint64_t progress


cdef class Ring:
    cdef readonly int rank, world_size
    cdef readonly Standing standing
    cdef FlightRecorder flight
    cdef object __weakref__
    cdef Segments segments
    cdef Segment arena  # this rank's own
    cdef shm_comm *handle
    cdef list works  # the unfinished ShmWork of each slot of the ring, or None
    # why another rank's abandonment ended the works here, until the caller has been told
    cdef object interruption
    # what a signal handler raised while this rank waited; it is raised once the wait is over
    cdef object from_handler
    cdef double raised_since
    cdef double timeout_s
    cdef uint32_t last  # number of the newest collective
    cdef bint busy
    cdef bint is_realigning  # the ranks end what was abandoned

    cdef close(self, int state, str message)
    cdef char *take(self, tensor, announcement *d) except NULL
    cdef char *_place(self, char *data, announcement *d) noexcept
    cdef int check_usable(self) except -1
    cdef object call(
        self, announcement *d, inp, char *input, out, char *output, bint async_op
    )
    cdef bint follow(self) except -1
    cdef int post(self, announcement *d, char *input, char *output, ShmWork work) except -1
    cdef int finish(self, ShmWork work) except -1
    cdef bint advance(self, ShmWork work, uint64_t slice_ns) except -1
    cdef int hear(self) except -1
    cdef int raise_what_ended(self, ShmWork work) except -1
    cdef abandon(self)
    cdef keep_times(self, bint is_on)

    # on the way of every collective; the others of its own are plain functions
    cdef int _come_out(self) except -1
    cdef int _raise_from_handler(self, cause) except -1
    cdef int _between_slices(self, Patience *patience) except -1
