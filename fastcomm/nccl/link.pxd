from libc.stdint cimport uint32_t, uint64_t

from fastcomm.cuda.driver cimport CUcontext, CUstream, Device, Event
from fastcomm.lifetime cimport Lifetime
from fastcomm.nccl.lane cimport Lane, Ticket
from fastcomm.nccl.memory cimport Pool


cdef class Link:
    cdef readonly int rank, world_size, local_rank
    cdef readonly int n_abandoned, epoch
    cdef public int left_in_backward
    cdef readonly uint64_t number
    cdef readonly object device, timeout
    cdef readonly tuple pids
    cdef readonly Device cuda
    cdef object __weakref__
    cdef object bootstrap, watchdog, tickets
    cdef list lanes
    cdef Pool pool
    cdef Ticket calling  # the collective whose launch has not returned
    cdef double timeout_s
    cdef dict in_flight  # by ticket: the tensors of collectives that have not ended
    cdef object buckets
    cdef object ending  # held while the lanes are aborted
    cdef bint busy, is_split_up, is_closed
    # CUDA graphs alive that have captured collectives; outlives the communicator, as they may
    cdef int *n_graphs
    cdef uint64_t last_graph
    cdef Lifetime life
    cdef object interruption  # why the ranks have to meet anew, until somebody has been told

    cdef _add_lane(self, look)
    cdef _connect(self, Lane lane, int place, look, look_for_all)
    cdef Lane _lane(self, int place)
    cdef Ticket _new_ticket(self)
    cdef _wait_for(self, Ticket ticket)
    cdef _give_up_graphs(self, str why)
    cdef _leave_note(self, key, value)
    cdef _abort_lanes(self)
    cdef _meet_again(self)
    cdef _register(self, Lane lane, memory, uint32_t label)
    cdef int _check_usable(self) except -1
    cdef int _check_open(self) except -1
    cdef int _check_alive(self) except -1
    cdef int _check_work(self, int epoch) except -1
    cdef object _error(self, int code, const char *call)
    cdef object _reason(self, error)
    cdef int _begin(self, Lane lane, Ticket ticket, op) except -1
    cdef int _end(self, Lane lane, Ticket ticket, bint is_captured) except -1
    cdef CUstream _order_current_after(self, Event done) except? NULL
    cdef bint _is_over(self, Event done) except -1
    cdef bint _note_capture(self, CUstream current) except -1
