# The CUDA driver's types and calls, declared by hand: no CUDA header is needed to build.
# Enumerators as in the driver API's reference.

ctypedef void *CUcontext
ctypedef void *CUstream
ctypedef void *CUevent
ctypedef void *CUmodule
ctypedef void *CUfunction
ctypedef void *CUgraph
ctypedef void *CUuserObject

cdef enum:
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600
    CU_EVENT_DISABLE_TIMING = 2
    CU_STREAM_NON_BLOCKING = 1
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1
    CU_GRAPH_USER_OBJECT_MOVE = 1

# Every driver call that fastcomm makes.
cdef struct Driver:
    int (*init)(unsigned int flags) noexcept nogil
    int (*version)(int *version) noexcept nogil
    int (*error_name)(int code, const char **name) noexcept nogil
    int (*error_string)(int code, const char **text) noexcept nogil
    int (*device_count)(int *count) noexcept nogil
    int (*device_get)(int *device, int ordinal) noexcept nogil
    int (*device_attribute)(int *value, int attribute, int device) noexcept nogil
    int (*retain_primary_context)(CUcontext *context, int device) noexcept nogil
    int (*get_context)(CUcontext *context) noexcept nogil
    int (*set_context)(CUcontext context) noexcept nogil
    int (*synchronize)() noexcept nogil
    int (*load_module)(CUmodule *module, const void *image) noexcept nogil
    int (*get_function)(CUfunction *function, CUmodule module, const char *name) noexcept nogil
    int (*launch)(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                  unsigned int grid_z, unsigned int block_x,
                  unsigned int block_y, unsigned int block_z, unsigned int shared_nbytes,
                  CUstream stream, void **parameters,
                  void **extra) noexcept nogil
    int (*resident_blocks)(int *count, CUfunction function, int block_size,
                           size_t shared_nbytes) noexcept nogil
    int (*priority_range)(int *least, int *greatest) noexcept nogil
    int (*create_stream)(CUstream *stream, unsigned int flags, int priority) noexcept nogil
    int (*destroy_stream)(CUstream stream) noexcept nogil
    int (*synchronize_stream)(CUstream stream) noexcept nogil
    int (*wait_event)(CUstream stream, CUevent event, unsigned int flags) noexcept nogil
    int (*capture_info)(CUstream stream, int *status, unsigned long long *identifier,
                        CUgraph *graph, void *dependencies,
                        size_t *n_dependencies) noexcept nogil
    int (*exchange_capture_mode)(int *mode) noexcept nogil
    int (*create_event)(CUevent *event, unsigned int flags) noexcept nogil
    int (*record_event)(CUevent event, CUstream stream) noexcept nogil
    int (*query_event)(CUevent event) noexcept nogil
    int (*destroy_event)(CUevent event) noexcept nogil
    int (*create_user_object)(CUuserObject *user_object, void *pointer,
                              void (*destroy)(void *) noexcept nogil, unsigned int references,
                              unsigned int flags) noexcept nogil
    int (*retain_user_object)(CUgraph graph, CUuserObject user_object, unsigned int count,
                              unsigned int flags) noexcept nogil
    int (*elapsed_time)(float *milliseconds, CUevent begin, CUevent end) noexcept nogil


cdef Driver driver

# Turns a status code into FastcommError, naming the call.
cdef int check(int code, const char *call) except -1 nogil

# Makes a stream wait for what the other one has been given so far.
cdef int order_streams(CUstream stream, CUevent event, CUstream other) except -1 nogil


cdef class Event:
    cdef CUevent handle
    cdef CUcontext context
    cdef long pid
    cdef bint is_over(self) except -1


cdef class Stream:
    cdef CUstream handle
    cdef CUcontext context
    cdef long pid


cdef class Device:
    cdef readonly object device
    cdef readonly int index, n_multiprocessors
    cdef CUcontext context
    cdef public object raw_stream
    cdef public object record_stream  # notes that the current stream reads a tensor; or None
    cdef CUstream current_stream(self) except? NULL
    cdef CUstream order_current_after(self, Event event) except? NULL
    cdef int order_after(self, CUstream stream, Event event) except -1 nogil
    cdef int record(self, Event event, CUstream stream) except -1 nogil
    cdef CUcontext enter(self) except? NULL nogil
    cdef void leave(self, CUcontext before) noexcept nogil


cdef class CapturedGraphs:
    cdef Device device
    cdef int *n_alive  # outlives this object, as the graphs may
    cdef unsigned long long newest
    cdef bint note_capture(self, CUstream current) except -1
    cdef int count(self) noexcept


cdef class Producers:
    cdef Device device
    cdef set streams
    cdef Event side
    cpdef note(self)
    cpdef clear(self)
    cdef bint are_others(self, CUstream current) except -1
    cdef int order_before(self, CUstream current) except -1
    cpdef keep(self, tensor)
