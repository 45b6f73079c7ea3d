# cython: language_level=3
"""Lifetime: whether a communicator can still be used. It cannot in a forked child, nor after an
error or close() has ended it.
"""

import os
from _thread import start_new_thread

from fastcomm.errors import FastcommError


cdef int n_forks = 0
cdef object on_failure = None
cdef object snapshot = None
cdef int n_calls = 0  # of on_failure


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
            if on_failure is not None:
                _start_thread(failure)

    cpdef object refusal(self):
        """Why the communicator cannot be used any more, as an error to raise; or None."""
        if self.generation != n_forks:
            return FastcommError(f"this communicator belongs to process {self.pid}, and this "
                                 "process was forked from it: "
                                 "call fastcomm.init here, or start workers with the spawn method")
        return None if self.failure is None else again(self.failure)


def n_failure_calls():
    """How many threads have been started for what call_on_failure() was given."""
    return n_calls


def call_on_failure(function, taken):
    """From now on a communicator that fails calls function(failure, taken()): function on a thread
    of its own, and taken, which is compiled, on the thread that ends the communicator.
    """
    global on_failure, snapshot
    on_failure, snapshot = function, taken


cdef void _start_thread(failure) noexcept:
    """Runs no Python code here: a signal handler might raise in it, and the peers would not hear
    of the failure.
    """
    global n_calls
    try:
        start_new_thread(on_failure, (failure, snapshot()))
        n_calls += 1
    except RuntimeError:  # there is no room for a thread
        pass


def again(error):
    """A copy of the error, to be raised again: raising one object twice extends its traceback."""
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy
