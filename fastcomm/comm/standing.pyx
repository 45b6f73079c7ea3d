# cython: language_level=3
"""Standing: what the callers of a communicator still have to be told. That it has ended, by close()
or an error, or belongs to another process: by every call from then on. That what was under way was
abandoned, by this rank or another: once.

All reducers of the communicator drop an abandoned step, on every rank. One handler may call
abandon() after any exception: exceptions bear the number of the abandonment that they tell of,
which is good until a round begins or ends well.
"""

import os
import sys
from _thread import start_new_thread
from itertools import count

from torch._C import _current_graph_task_id

from fastcomm.comm.autograd_stack import (
    is_handled_inside_backward, is_inside_backward, running_backward,
)
from fastcomm.errors import AbandonedError, FastcommError


GONE_ON = "this step was abandoned while its backward was running: skip this step"
cdef str NUMBER = "_abandoned_by_fastcomm_as"  # an attribute of exceptions
cdef object numbers = count(1)  # of abandonments, on any communicator
cdef object on_abandonment = lambda standing: None  # see when_abandoned()
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


cdef class Standing:
    """That of one communicator, in the process that makes this object.

    failure: why the communicator cannot be used any more, or None.
    n_abandoned: how often what was under way was abandoned, as far as the caller knows.
    newest: the number of the newest abandonment; 0: none since a round began or ended well.
    """

    def __cinit__(self):
        self.generation, self.pid = n_forks, os.getpid()

    # -- the end --

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

    # -- an abandonment --

    cpdef forget_abandonment(self):
        """What comes is not of the step that was abandoned last."""
        self.newest = 0

    def note_abandonment(self):
        """n_abandoned has grown: calls what was given to when_abandoned(), and again where a signal
        handler raises meanwhile.
        """
        self.backward, self.newest = None, next(numbers)
        self.graph_task = _current_graph_task_id()
        try:
            self._call_back()
        except BaseException:
            self._call_back()
            raise

    def _call_back(self):
        self.backward = running_backward()
        on_abandonment(self)

    def to_raise(self, error, int n_abandoned=-1):
        """A copy of the error, to be raised: works and others hold the error, and its traceback
        would hold the model.

        n_abandoned: when the work was made that the error has ended. If it has grown since, the
        error tells of the newest abandonment.
        """
        copy = again(error)
        if n_abandoned != self.n_abandoned:
            self.mark(copy)
        return copy

    def mark(self, error):
        """The step that this exception has ended is the one that was abandoned last."""
        if self.newest:
            setattr(error, NUMBER, self.newest)

    def is_told(self):
        """Whether the exception that is being handled, or one that it was raised from or while
        handling it, tells of a step that is abandoned already, by another rank or by a reducer.
        """
        error = sys.exc_info()[1]
        while self.newest and error is not None:
            if self.backward is not None and self.backward.has_raised(error):
                self.backward = None  # the next backward that raises is another step's
                self.mark(error)
            if getattr(error, NUMBER, 0) == self.newest:
                return True
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return False

    def leave_backward(self, rank):
        """The caller has called abandon(). Raises AbandonedError where a backward would go on, on
        this rank alone.
        """
        if is_inside_backward() and not is_handled_inside_backward(sys.exc_info()[1]):
            raise self._abandoned(f"rank {rank} called abandon() inside backward(): skip this step")

    def error_in_backward(self):
        """Returns the error for a backward that goes on though its step was abandoned: the others
        would take what it makes for a part of their next step. None in any other.
        """
        if not self.newest or not is_inside_backward():
            return None
        return self._abandoned(GONE_ON) if self.graph_task == _current_graph_task_id() else None

    cdef object _abandoned(self, str message):
        error = AbandonedError(message)
        self.mark(error)
        return error


def when_abandoned(function):
    """From now on, calls the function with a Standing whenever n_abandoned has grown there, on the
    thread that abandons what was under way, or hears of it.
    """
    global on_abandonment
    on_abandonment = function
    return function


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
