# cython: language_level=3
"""Tensors in memory that NCCL has allocated, so that buckets can be windows, which it reduces in
place, without copies to NCCL's buffers.

Nothing is registered but windows. Where memory is registered otherwise (ncclCommRegister), each
launch over NVLink SHARP meets the host's other ranks in a loop that no abort ends.

Owns the allocations. Each takes at least 2 MiB of the device, NCCL's granule, also for a small
tensor: tensors do not share one, as memory is registered, made a window and freed by the whole
allocation, and a window must lie alike on all ranks, of which empty() asks none. The memory of a
dropped tensor is freed at the next allocation. Freeing waits for the device: the garbage collector
must not do that, and it is forbidden while a CUDA graph is being captured.
"""

import threading

from torch.utils.dlpack import from_dlpack

from fastcomm.errors import NcclError

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t

from fastcomm.comm.gradient_slot cimport DLDataType, DLTensor
from fastcomm.transports.cuda.driver cimport Device
from fastcomm.transports.nccl.lane cimport Lane
from fastcomm.transports.nccl.library cimport (
    NCCL_WIN_COLL_SYMMETRIC, check, nccl, ncclComm_t, ncclWindow_t,
)


cdef double FREEING_S = 1  # how long an abort waits for another thread that frees memory

# DLPack, the agreed way to hand memory to torch: https://dmlc.github.io/dlpack
cdef enum:
    kDLCPU = 1
    kDLCUDA = 2
    kDLUInt = 1

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept nogil


@cython.final
cdef class Allocation:
    """One ncclMemAlloc. Any thread that drops the tensor sets `is_freed`; until then the pool holds
    this. The other fields belong to the pool.
    """

    cdef void *memory
    cdef int64_t nbytes
    cdef int is_freed
    cdef ncclComm_t comm  # with which it was registered, or NULL
    cdef ncclWindow_t window  # or NULL, where NCCL has given none
    cdef DLManagedTensor managed

    cdef object tensor(self, device):
        """The tensor in this memory: to be asked for once."""
        self.managed.dl_tensor = DLTensor(
            data=self.memory,
            device_type=kDLCUDA if device.type == "cuda" else kDLCPU, device_id=device.index or 0,
            ndim=1, dtype=DLDataType(code=kDLUInt, bits=8, lanes=1), shape=&self.nbytes,
            strides=NULL, byte_offset=0,
        )
        self.managed.manager_ctx, self.managed.deleter = &self.is_freed, _dropped
        return from_dlpack(PyCapsule_New(&self.managed, "dltensor", NULL))


cdef void _dropped(DLManagedTensor *managed) noexcept nogil:
    """The tensor is gone. Called on any thread, with or without the GIL, also while the process
    ends; so it only sets a flag.
    """
    (<int *>managed.manager_ctx)[0] = 1


cdef dict _pools = {}  # by device index; they outlive every communicator, as tensors may


def pool_of(Device device):
    pool = _pools.get(device.index)
    if pool is None:
        pool = _pools[device.index] = Pool(device)
    return pool


cdef class Pool:
    """The memory NCCL has allocated on one device."""

    cdef Device device
    cdef int n_ending  # communicators that are being aborted
    cdef object lock  # held while allocations go
    cdef list allocations

    def __cinit__(self, Device device):
        self.device, self.lock, self.allocations = device, threading.Lock(), []

    def allocate(self, size_t nbytes):
        """A new tensor of uint8. Synchronises the device if there is memory of dropped tensors to
        free.
        """
        cdef Allocation allocation = Allocation()
        self._give_back()
        allocation.nbytes = nbytes
        with self.device.selected():
            with nogil:
                check(nccl.mem_alloc(&allocation.memory, nbytes), b"ncclMemAlloc")
        self.allocations.append(allocation)
        return allocation.tensor(self.device.device)

    def _give_back(self):
        """Frees the memory of dropped tensors, once all that was launched on it is done."""
        freed = [one for one in self.allocations if (<Allocation>one).is_freed]
        if self.n_ending or not freed:  # what is being aborted still has memory registered
            return
        self.device.synchronize()
        with self.lock:
            for allocation in freed:
                # else an abort began while we waited, or another thread was here
                if not self.n_ending and allocation in self.allocations:
                    self.allocations.remove(allocation)
                    self._free(allocation)

    def _free(self, Allocation allocation):
        if allocation.window != NULL:
            _deregister(allocation.comm, allocation.window)
        with self.device.selected():
            with nogil:  # waits for the device
                check(nccl.mem_free(allocation.memory), b"ncclMemFree")

    def unregistered(self, size_t data):
        """The allocation there, if it is no window yet and this NCCL has windows; else None."""
        cdef Allocation allocation
        for allocation in self.allocations if nccl.register_window != NULL else ():
            if <size_t>allocation.memory == data and allocation.comm == NULL:
                return allocation
        return None

    def register(self, size_t data, Lane lane):
        """Makes what `unregistered` returns a window of a lane's communicator; NCCL may give none.
        Collective: all ranks register theirs in the same order.
        """
        cdef Allocation allocation = self.unregistered(data)
        cdef ncclComm_t comm = lane.comm
        cdef ncclWindow_t window = NULL
        if comm == NULL or allocation is None:
            return
        lane.n_inside += 1
        try:
            with nogil:  # waits for the peers
                check(nccl.register_window(comm, allocation.memory, allocation.nbytes, &window,
                                           NCCL_WIN_COLL_SYMMETRIC),
                      b"ncclCommWindowRegister")
            if lane.comm == comm:  # else the watchdog has ended it meanwhile
                allocation.comm, allocation.window = comm, window
        finally:
            lane.n_inside -= 1

    # -- called by the thread that ends a lane, which knows the pool by these alone --

    def begin_ending(self):
        """A communicator is about to be aborted: nothing is freed until `end_ending`."""
        self.n_ending += 1

    def end_ending(self):
        self.n_ending -= 1

    def forget(self, size_t ending, bint is_idle):
        """Forgets the windows of a communicator that is about to end.

        is_idle: whether they can be deregistered first. Else the memory of windows is lost when it
        is freed: an abort unmaps it without releasing it.
        """
        cdef ncclComm_t comm = <ncclComm_t>ending
        cdef Allocation allocation
        windows = []
        if self.lock.acquire(timeout=FREEING_S):  # nobody is freeing, and deregistering, any more
            self.lock.release()
        for allocation in self.allocations:
            if allocation.comm == comm:
                if allocation.window != NULL:
                    windows.append(<size_t>allocation.window)
                allocation.comm = allocation.window = NULL
        trouble = None
        for window in windows if is_idle else ():
            try:
                _deregister(comm, <ncclWindow_t><size_t>window)
            except NcclError as error:  # the others can be deregistered all the same
                trouble = trouble or error
        if trouble is not None:
            raise trouble


cdef int _deregister(ncclComm_t comm, ncclWindow_t window) except -1:
    with nogil:
        check(nccl.deregister_window(comm, window), b"ncclCommWindowDeregister")
    return 0
