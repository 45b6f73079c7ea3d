"""Abandonment: how a rank that abandons what was under way, or hears of it, counts it once.

All reducers of the communicator drop the step, on every rank. One handler may call abandon() after
any exception: exceptions bear the number of the abandonment that they tell of, which is good until
a round begins.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fastcomm.comm.autograd_stack import (
    is_handled_inside_backward,
    is_inside_backward,
    running_backward,
)
from fastcomm.comm.lifetime import again
from fastcomm.errors import AbandonedError, FastcommError

if TYPE_CHECKING:
    from fastcomm.comm.transport import Transport

GONE_ON = "this step was abandoned while its backward was running: skip this step"
_NUMBER = "_abandoned_by_fastcomm_as"  # an attribute of exceptions
_numbers = itertools.count(1)  # of abandonments, on any communicator
_when_abandoned: list[Callable[[Transport], None]] = []


class Abandonment:
    """What was under way was abandoned, by this rank or another.

    number: marks the exceptions by which this rank has heard of it.
    backward: in which this rank has; None once an exception has come out of that.
    graph_task: autograd's number of that backward; -1 outside of any.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.backward = running_backward()
        self.graph_task = torch._C._current_graph_task_id()


def when_abandoned(function: Callable[[Transport], None]) -> Callable[[Transport], None]:
    """From now on, calls the function with a communicator whenever n_abandoned has grown there, on
    the thread that abandons what was under way, or hears of it.
    """
    _when_abandoned.append(function)
    return function


def tell_of_abandonment(reference: weakref.ref[Transport]) -> None:
    """Calls what was given to when_abandoned(), if the communicator is still there: all of it, also
    where a signal handler raises meanwhile.
    """
    comm = reference()
    if comm is not None:
        comm.abandonment = Abandonment()
        try:
            _call_all(comm)
        except BaseException:
            _call_all(comm)
            raise


def _call_all(comm: Transport) -> None:
    for function in _when_abandoned:
        function(comm)


def told(reference: weakref.ref[Transport], error: FastcommError) -> FastcommError:
    """A copy of the error, to be raised, which tells the caller of the newest abandonment."""
    copy: FastcommError = again(error)
    comm = reference()
    if comm is not None:
        note_abandoned(comm, copy)
    return copy


def note_abandoned(comm: Transport, error: BaseException | None) -> None:
    """The step that this exception has ended is the one that was abandoned last."""
    if comm.abandonment is not None:
        setattr(error, _NUMBER, comm.abandonment.number)


def is_abandoned_already(comm: Transport) -> bool:
    """Whether the exception that is being handled, or one that it was raised from or while handling
    it, tells of a step that is abandoned already, by another rank or by a reducer.
    """
    newest, error = comm.abandonment, sys.exc_info()[1]
    while newest is not None and error is not None:
        if newest.backward is not None and newest.backward.has_raised(error):
            newest.backward = None  # the next backward that raises is another step's
            note_abandoned(comm, error)
        if getattr(error, _NUMBER, None) == newest.number:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def leave_backward(comm: Transport) -> None:
    """The caller has called abandon(). Raises AbandonedError where a backward would go on, on this
    rank alone.
    """
    if is_inside_backward() and not is_handled_inside_backward(sys.exc_info()[1]):
        error = AbandonedError(
            f"rank {comm.rank} called abandon() inside backward(): skip this step"
        )
        note_abandoned(comm, error)
        raise error


def error_in_abandoned_backward(comm: Transport) -> AbandonedError | None:
    """Returns the error for a backward that goes on though its step was abandoned: the others would
    take what it makes for a part of their next step. None in any other.
    """
    newest = comm.abandonment
    if newest is None or not is_inside_backward():
        return None
    if newest.graph_task != torch._C._current_graph_task_id():
        return None
    error = AbandonedError(GONE_ON)
    note_abandoned(comm, error)
    return error
