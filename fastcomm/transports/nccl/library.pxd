# NCCL's types and calls, declared by hand: no NCCL header is needed to build.

ctypedef void *ncclComm_t
ctypedef void *ncclWindow_t

cdef enum:
    ncclSuccess = 0
    ncclRemoteError = 6
    ncclInProgress = 7
    NCCL_WIN_COLL_SYMMETRIC = 1

cdef struct ncclUniqueId:
    char internal[128]

# Every NCCL call that fastcomm makes. Calls newer than 2.18 are NULL if the library lacks them.
cdef struct Nccl:
    int (*get_version)(int *version) noexcept nogil
    int (*get_unique_id)(ncclUniqueId *identifier) noexcept nogil
    const char *(*error_string)(int code) noexcept nogil
    const char *(*last_error)(ncclComm_t comm) noexcept nogil
    int (*init_rank)(ncclComm_t *comm, int world_size, ncclUniqueId identifier, int rank,
                     void *config) noexcept nogil
    int (*split)(ncclComm_t comm, int color, int key, ncclComm_t *part,
                 void *config) noexcept nogil
    int (*finalize)(ncclComm_t comm) noexcept nogil
    int (*destroy)(ncclComm_t comm) noexcept nogil
    int (*abort)(ncclComm_t comm) noexcept nogil
    int (*async_error)(ncclComm_t comm, int *code) noexcept nogil
    int (*all_reduce)(const void *inp, void *out, size_t numel, int dtype, int op,
                      ncclComm_t comm, void *stream) noexcept nogil
    int (*broadcast)(const void *inp, void *out, size_t numel, int dtype, int root,
                     ncclComm_t comm, void *stream) noexcept nogil
    int (*reduce)(const void *inp, void *out, size_t numel, int dtype, int op, int root,
                  ncclComm_t comm, void *stream) noexcept nogil
    int (*all_gather)(const void *inp, void *out, size_t numel, int dtype, ncclComm_t comm,
                      void *stream) noexcept nogil
    int (*reduce_scatter)(const void *inp, void *out, size_t numel, int dtype, int op,
                          ncclComm_t comm, void *stream) noexcept nogil
    int (*send)(const void *inp, size_t numel, int dtype, int peer, ncclComm_t comm,
                void *stream) noexcept nogil
    int (*recv)(void *out, size_t numel, int dtype, int peer, ncclComm_t comm,
                void *stream) noexcept nogil
    int (*group_start)() noexcept nogil
    int (*group_end)() noexcept nogil
    int (*mem_alloc)(void **memory, size_t nbytes) noexcept nogil  # 2.19
    int (*mem_free)(void *memory) noexcept nogil
    int (*revoke)(ncclComm_t comm, int flags) noexcept nogil  # 2.28.7
    # 2.27
    int (*register_window)(ncclComm_t comm, void *memory, size_t nbytes, ncclWindow_t *window,
                           int flags) noexcept nogil
    int (*deregister_window)(ncclComm_t comm, ncclWindow_t window) noexcept nogil


cdef Nccl nccl
cdef int version  # 22907 is 2.29.7

# Turns a status code into NcclError, naming the call.
cdef int check(int code, const char *call) except -1 nogil
cdef object error_of(int code, const char *call)
cdef int dtype_number(dtype) except -1
cdef int op_number(str op) except -1
