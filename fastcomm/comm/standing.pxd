# The number of forks between this process and the first that imported the module. What was made
# before a fork is of no use in the child: the peers watch the parent's pid.
cdef int forks() noexcept


cdef class Standing:
    cdef readonly object failure
    cdef public int n_abandoned
    cdef readonly long newest
    cdef object backward  # in which this rank has heard of the newest; None once that has raised
    cdef long graph_task  # autograd's number of that backward; -1: of none
    cdef int generation, pid

    cpdef bint is_forked(self) noexcept
    cpdef object refusal(self)
    cpdef forget_abandonment(self)
    cdef object _abandoned(self, str message)
