from libc.stdint cimport uint64_t

from fastcomm.transports.cuda.clock cimport DeviceClock
from fastcomm.transports.cuda.driver cimport CapturedGraphs, Device, Stream
from fastcomm.comm.standing cimport Standing
from fastcomm.transports.nccl.lane cimport InFlight, Lane, Launches


cdef class Link:
    cdef readonly int rank, world_size
    cdef readonly tuple processes
    cdef readonly int epoch
    cdef Standing standing
    cdef object __weakref__
    cdef Device cuda
    cdef Stream flattener  # for gradients that lie elsewhere than in their bucket
    cdef list lanes
    cdef Launches launches
    cdef CapturedGraphs graphs  # with collectives of these ranks
    cdef object pool, bootstrap, watchdog
    cdef object buckets
    cdef list rejoining  # the buckets, while the ranks meet again
    cdef set common_labels  # of the buckets that all ranks had left when they last met
    cdef object ending  # held while the lanes are aborted
    cdef double timeout_s
    # Collectives are counted since the ranks met. How many came before the round that is open; and
    # before the abandoned one, so that all ranks have them.
    cdef uint64_t n_settled, n_kept
    cdef object interruption  # why the ranks have to meet again, until it has been raised
    cdef bint is_split_up, is_closed, is_waited_for  # by a thread that polls
    cdef DeviceClock clock  # while somebody asks for the times of buckets, else None
    cdef int n_timekeepers  # how many do

    cdef hear(self)
    cdef Lane lane(self, int number)
    cdef int check_usable(self) except -1
    cdef int check_open(self) except -1
    cdef int check_work(self, int epoch, uint64_t number) except -1
    cdef object error(self, int code, const char *call)
    cdef object reason(self, error)
    cdef int _check_alive(self) except -1
