# The number of forks between this process and the first that imported the module. What was made
# before a fork is of no use in the child: the peers watch the parent's pid.
cdef int forks() noexcept


cdef class Lifetime:
    cdef readonly object failure  # why the communicator cannot be used any more, or None
    cdef int generation, pid

    cpdef bint is_forked(self) noexcept
    cpdef object refusal(self)
