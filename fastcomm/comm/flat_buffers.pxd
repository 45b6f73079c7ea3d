cdef struct Range:
    char *base
    size_t nbytes
    Range *next


cdef class FlatBuffer:
    cdef Range range


cdef bint is_in_a_flat_buffer(const void *address) noexcept
