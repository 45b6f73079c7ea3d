from fastcomm.transports.shm.core cimport SHM_MAX_RANKS


cdef class Segment:
    cdef object __weakref__
    cdef int fd  # owner only, else -1
    cdef int generation
    cdef char *base
    cdef size_t nbytes
    cdef list holes  # (offset, nbytes) that are free, by offset; owner only
    cdef size_t allocate(self, size_t nbytes, size_t alignment) except 0
    cdef void release(self, size_t offset, size_t nbytes)
    cdef int make_private(self) except -1


cdef class Block:
    cdef Segment segment
    cdef size_t offset, nbytes
    cdef int generation


cdef class Segments:
    cdef int world_size
    cdef readonly tuple processes  # by rank, each a who.Process
    cdef bint is_crowded  # there are more ranks than cores for them
    cdef size_t n_reserved
    cdef list segments
    cdef char *bases[SHM_MAX_RANKS]
    cdef size_t nbytes[SHM_MAX_RANKS]
    cdef int pidfds[SHM_MAX_RANKS]
    cdef int n_pidfds  # how many of them are initialised

    cdef Segment of(self, int rank)
