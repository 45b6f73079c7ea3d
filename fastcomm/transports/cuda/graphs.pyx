# cython: language_level=3
"""CapturedGraphs: counts the living CUDA graphs that have captured collectives. Keeps none of them
alive; the driver says when one is gone.
"""

from libc.stdlib cimport calloc

from fastcomm.transports.cuda.driver cimport (
    CU_GRAPH_USER_OBJECT_MOVE, CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
    CUcontext, CUgraph, CUuserObject, Device, check, driver,
)


cdef class CapturedGraphs:
    """The graphs of one communicator."""

    def __cinit__(self, Device device):
        self.device = device
        self.n_alive = <int *>calloc(1, sizeof(int))
        if self.n_alive == NULL:
            raise MemoryError("out of memory")

    cdef int count(self) noexcept:
        """How many are alive."""
        return self.n_alive[0]

    cdef bint note_capture(self, CUstream current) except -1:
        """Returns whether the stream is being captured into a CUDA graph. Counts the graph until it
        and everything made from it are gone.
        """
        cdef CUcontext before
        cdef CUgraph graph = NULL
        cdef CUuserObject counted = NULL
        cdef unsigned long long identifier = 0
        cdef int status = 0, code
        if current == NULL:  # the legacy default stream, which cannot be captured
            return False
        with nogil:  # the stream may be locked by a launch that waits for room
            before = self.device.enter()  # a default stream is the current device's
            code = driver.capture_info(current, &status, &identifier, &graph, NULL, NULL)
            self.device.leave(before)
            check(code, b"cuStreamGetCaptureInfo")
            if status == CU_STREAM_CAPTURE_STATUS_ACTIVE and identifier != self.newest:
                check(driver.create_user_object(&counted, self.n_alive, fastcomm_count_down, 1,
                                                CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
                      b"cuUserObjectCreate")
                check(driver.retain_user_object(graph, counted, 1, CU_GRAPH_USER_OBJECT_MOVE),
                      b"cuGraphRetainUserObject")
                fastcomm_count_up(self.n_alive)
                self.newest = identifier
        return status == CU_STREAM_CAPTURE_STATUS_ACTIVE


cdef extern from *:
    """
    static void fastcomm_count_up(void *counter) {
        __atomic_add_fetch((int *)counter, 1, __ATOMIC_RELAXED);
    }
    static void fastcomm_count_down(void *counter) {
        __atomic_sub_fetch((int *)counter, 1, __ATOMIC_RELAXED);
    }
    """
    void fastcomm_count_up(void *counter) noexcept nogil
    void fastcomm_count_down(void *counter) noexcept nogil  # by the driver, on a thread of its own
