from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef inline int64_t now() noexcept nogil:
    """The time of CLOCK_MONOTONIC, in ns."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <int64_t>time.tv_sec * 1_000_000_000 + time.tv_nsec


cdef class Recorder:
    cdef readonly Py_ssize_t n_steps, n_gradients, n_buckets
    cdef readonly Py_ssize_t n_begun  # steps, since recording began
    cdef Py_ssize_t width  # of a row, in numbers
    cdef int64_t *rows
    cdef int64_t *open  # the row of the step whose backward runs, or NULL
    cdef int64_t *latest  # the row of the newest step whose backward is over, or NULL
    cdef int64_t *stepping  # `latest` when the optimizer began
    cdef int64_t step_began
    # of the step to come
    cdef int64_t forward_began, forward_began_first, forward_ended, forward_ns, backward_began
    cdef list unread  # works whose times the transport did not know yet

    cdef void note_ready(self, Py_ssize_t i) noexcept
    cdef void note_unsynced(self, Py_ssize_t i) noexcept
    cdef int64_t *_begin_row(self, int64_t kind, int64_t number) noexcept
    cdef int64_t *_events_of(self, int64_t *row, Py_ssize_t bucket) except NULL
