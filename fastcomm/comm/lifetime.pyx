# cython: language_level=3
"""Lifetime: whether a communicator can still be used. It cannot in a forked child, nor after an
error or close() has ended it.
"""

import os

from fastcomm.comm.dump import dump_failure
from fastcomm.errors import FastcommError


cdef int n_forks = 0


def _after_fork_in_child():
    global n_forks
    n_forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


cdef int forks() noexcept:
    return n_forks


cdef class Lifetime:
    """The lifetime of one communicator, in the process that makes this object."""

    def __cinit__(self):
        self.generation, self.pid = n_forks, os.getpid()

    cpdef bint is_forked(self) noexcept:
        """Whether this process was forked from the one that made the object."""
        return self.generation != n_forks

    def end(self, failure):
        """From now on every call raises `failure`. Only the first failure counts."""
        if self.failure is None:
            self.failure = failure
            dump_failure(failure)

    cpdef object refusal(self):
        """Why the communicator cannot be used any more, as an error to raise; or None."""
        if self.generation != n_forks:
            return FastcommError(f"this communicator belongs to process {self.pid}, and this "
                                 "process was forked from it: "
                                 "call fastcomm.init here, or start workers with the spawn method")
        return None if self.failure is None else again(self.failure)


def again(error):
    """A copy of the error, to be raised again: raising one object twice extends its traceback."""
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy
