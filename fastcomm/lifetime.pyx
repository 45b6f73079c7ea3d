# cython: language_level=3
"""How to tell a forked child from the process that made a communicator."""

import os


cdef int n_forks = 0


def _after_fork_in_child():
    global n_forks
    n_forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


cdef int forks() noexcept:
    return n_forks
