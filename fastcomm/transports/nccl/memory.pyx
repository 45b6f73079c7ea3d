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

import contextlib
import threading

from torch.utils.dlpack import from_dlpack

from fastcomm.errors import NcclError

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport calloc, free

from fastcomm.transports.cuda.driver cimport CUcontext, Device
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

cdef struct DLTensor:
    void *data
    int32_t device_type, device_id
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept nogil

# What a tensor holds: its shape and its allocation.
cdef struct Handed:
    DLManagedTensor managed
    int64_t numel
    Allocation *allocation


cdef void _dropped(DLManagedTensor *managed) noexcept nogil:
    """The tensor is gone. Called on any thread, with or without the GIL, also while the process
    ends; so it only sets a flag.
    """
    cdef Handed *handed = <Handed *>managed.manager_ctx
    handed.allocation.is_freed = 1
    free(handed)


cdef int IDLE = 2  # Allocation.is_freed: dropped, and the device was synchronised since

cdef dict _pools = {}  # by device index; they outlive every communicator, as tensors may


cdef Pool pool_of(Device device):
    pool = _pools.get(device.index)
    if pool is None:
        pool = _pools[device.index] = Pool(device)
    return pool


cdef class Pool:
    """The memory NCCL has allocated on one device."""

    def __cinit__(self, Device device):
        self.device, self.lock = device, threading.Lock()

    cdef object allocate(self, size_t nbytes):
        """A new tensor of uint8. Synchronises the device if there is memory of dropped tensors to
        free.
        """
        cdef Allocation *allocation
        cdef Handed *handed
        cdef CUcontext before
        cdef int code
        self.give_back()
        allocation = <Allocation *>calloc(1, sizeof(Allocation))
        handed = <Handed *>calloc(1, sizeof(Handed))
        if allocation == NULL or handed == NULL:
            free(allocation)
            free(handed)
            raise MemoryError("out of memory")
        try:
            with nogil:
                before = self.device.enter()
                code = nccl.mem_alloc(&allocation.memory, nbytes)
                self.device.leave(before)
                check(code, b"ncclMemAlloc")
        except BaseException:
            free(allocation)
            free(handed)
            raise
        allocation.nbytes = nbytes
        with self.lock:
            allocation.next, self.first = self.first, allocation
        handed.numel, handed.allocation = nbytes, allocation
        handed.managed.dl_tensor = DLTensor(
            data=allocation.memory,
            device_type=kDLCUDA if self.device.device.type == "cuda" else kDLCPU,
            device_id=self.device.index,
            ndim=1, code=kDLUInt, bits=8, lanes=1, shape=&handed.numel, strides=NULL, byte_offset=0,
        )
        handed.managed.manager_ctx, handed.managed.deleter = handed, _dropped
        return from_dlpack(PyCapsule_New(&handed.managed, "dltensor", NULL))

    cdef int give_back(self) except -1:
        """Frees the memory of dropped tensors, once all that was launched on it is done."""
        if self.n_ending:  # a communicator that is being aborted still has memory registered
            return 0
        freed = self._freed()
        if freed:
            self.device.synchronize()
            with self.lock:
                if self.n_ending:  # an abort began while we waited
                    return 0
                for address in self._freed():
                    if address in freed:
                        (<Allocation *><size_t>address).is_freed = IDLE
                self.collect()
        return 0

    cdef list _freed(self):
        cdef Allocation *allocation = self.first
        freed = []
        while allocation != NULL:
            if allocation.is_freed:
                freed.append(<size_t>allocation)
            allocation = allocation.next
        return freed

    cdef int collect(self) except -1:
        """Frees what is idle."""
        cdef Allocation **link = &self.first
        cdef Allocation *allocation
        cdef CUcontext before
        cdef int code
        while link[0] != NULL:
            allocation = link[0]
            if allocation.is_freed != IDLE:
                link = &allocation.next
                continue
            link[0] = allocation.next
            _deregister(allocation)
            with nogil:  # waits for the device
                before = self.device.enter()
                code = nccl.mem_free(allocation.memory)
                self.device.leave(before)
                free(allocation)
                check(code, b"ncclMemFree")
        return 0

    cdef Allocation *_allocation_at(self, const void *data):
        cdef Allocation *allocation = self.first
        while allocation != NULL and allocation.memory != data:
            allocation = allocation.next
        return allocation

    cdef bint can_register(self, const void *data):
        """Whether this is memory of NCCL's that was not registered, and this NCCL has windows."""
        cdef Allocation *allocation = self._allocation_at(data)
        return nccl.register_window != NULL and allocation != NULL and allocation.comm == NULL

    cdef int register(self, const void *data, Lane lane) except -1:
        """Makes an allocation a window of a lane's communicator, if can_register() is true; NCCL
        may give none. Collective: all ranks register theirs in the same order.
        """
        cdef Allocation *allocation = self._allocation_at(data)
        cdef ncclComm_t comm = lane.comm
        cdef ncclWindow_t window = NULL
        if comm == NULL or not self.can_register(data):
            return 0
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
        return 0

    # -- called by the thread that aborts a lane, which knows the pool by these alone --

    def begin_ending(self):
        """A communicator is about to be aborted: nothing is freed until `end_ending`."""
        self.n_ending += 1

    def end_ending(self):
        self.n_ending -= 1

    def forget(self, size_t ending, bint is_idle):
        """Forgets the windows of a communicator that is about to be aborted.

        is_idle: whether they can be deregistered first. Else the memory of windows is lost when it
        is freed: an abort unmaps it without releasing it.
        """
        cdef ncclComm_t comm = <ncclComm_t>ending
        cdef Allocation *allocation
        cdef Allocation found
        cdef list windows = []
        if self.lock.acquire(timeout=FREEING_S):  # nobody is freeing, and deregistering, any more
            self.lock.release()
        allocation = self.first
        while allocation != NULL:
            if allocation.comm == comm:
                windows.append(<size_t>allocation.window)
                allocation.comm = allocation.window = NULL
            allocation = allocation.next
        for window in windows if is_idle else ():
            found.comm, found.window = comm, <ncclWindow_t><size_t>window
            with contextlib.suppress(NcclError):  # the abort ends it in any case
                _deregister(&found)

    cdef int deregister_all(self, ncclComm_t comm) except -1:
        """Deregisters all windows of a communicator that is about to be destroyed and is idle."""
        cdef Allocation *allocation
        with self.lock:
            allocation = self.first
            while allocation != NULL:
                if allocation.comm == comm:
                    _deregister(allocation)
                allocation = allocation.next
        return 0


cdef int _deregister(Allocation *allocation) except -1:
    if allocation.window != NULL:
        with nogil:
            check(nccl.deregister_window(allocation.comm, allocation.window),
                  b"ncclCommWindowDeregister")
    allocation.comm = allocation.window = NULL
    return 0
