from fastcomm.transports.cuda.driver cimport Device
from fastcomm.transports.nccl.lane cimport Lane
from fastcomm.transports.nccl.library cimport ncclComm_t, ncclWindow_t


# One ncclMemAlloc. Any thread that drops the tensor sets `is_freed`; the other fields belong to the
# pool.
cdef struct Allocation:
    void *memory
    size_t nbytes
    int is_freed
    ncclComm_t comm  # with which it was registered, or NULL
    ncclWindow_t window  # or NULL, where NCCL has given none
    Allocation *next


cdef class Pool:
    cdef Device device
    cdef int n_ending  # communicators that are being aborted
    cdef object lock  # held while allocations come or go
    cdef Allocation *first
    cdef object allocate(self, size_t nbytes)
    cdef int give_back(self) except -1
    cdef list _freed(self)
    cdef int collect(self) except -1
    cdef Allocation *_allocation_at(self, const void *data)
    cdef bint can_register(self, const void *data)
    cdef int register(self, const void *data, Lane lane) except -1
    cdef int deregister_all(self, ncclComm_t comm) except -1


cdef Pool pool_of(Device device)
