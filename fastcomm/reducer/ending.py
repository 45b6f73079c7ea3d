"""How an open round ends, whatever is raised meanwhile: it is finished, in spite of what a signal
handler raises if the other ranks count on it, or left, and dropped.

A signal handler may raise between any two statements, so the order of statements that change state
matters here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from fastcomm.comm.communicator import Communicator, note_abandoned
from fastcomm.errors import FastcommError
from fastcomm.reducer.round import Round
from fastcomm.reducer.skipping import Skipping
from fastcomm.reducer.weights import Weighting

NOTE = (
    "fastcomm: all ranks have the reduced gradients of this step, and so has this one. Make the "
    "step here, too, or on no rank"
)


class Ending(Protocol):
    """A reducer, as its rounds' end sees it."""

    comm: Communicator
    n_rounds: int
    _round: Round | None
    _n_unsynced: int
    _weighting: Weighting
    _skipping: Skipping


class Skippable(Ending, Protocol):
    """A reducer whose ranks may drop a round."""

    def skip_step(self) -> None: ...
    def synchronize(self) -> None: ...


def end(reducer: Ending, ending: Round) -> None:
    """Launches what is left of the round, and finishes it. See Reducer.synchronize for what it
    raises.
    """
    try:
        reducer._weighting.refuse_earlier()
        ending.launch_rest()
        _finish(reducer, ending)
    except FastcommError as error:
        # the other ranks have heard of it, or will when this one leaves
        leave(reducer)
        note_abandoned(error)
        raise
    except BaseException as error:
        if ending.must_finish:
            _finish_in_spite_of(error, reducer, ending)
        elif reducer._skipping.n_blocks:
            ending.was_dropped = True  # skip_on() decides
        else:
            leave(reducer)
            note_abandoned(error)
        raise


def _finish(reducer: Ending, ending: Round) -> None:
    """All buckets are under way. May be called again if a signal handler has raised in it, or after
    it.
    """
    ending.finish()
    reducer.n_rounds = ending.number
    _close(reducer)


def _finish_in_spite_of(interruption: BaseException, reducer: Ending, ending: Round) -> None:
    """The last bucket is under way, so the round ends well on the other ranks; it must not end
    differently here.
    """
    try:
        _finish(reducer, ending)
    except BaseException as trouble:
        # once more: there is no way to go on in step with the others
        reducer.comm.abort()
        _drop(reducer, ending)
        raise interruption from trouble
    if hasattr(interruption, "add_note"):  # Python 3.11
        interruption.add_note(NOTE)


@contextlib.contextmanager
def skip_on(reducer: Skippable, exceptions: tuple[type[BaseException], ...]) -> Iterator[None]:
    """See Reducer.skip_step_on."""
    skipping = reducer._skipping
    skipping.n_blocks += 1
    try:
        yield
    except BaseException as error:
        skipping.n_blocks -= 1
        if not isinstance(error, exceptions) or isinstance(error, FastcommError):
            _leave_dropped(reducer, error)
            raise
        _vote(reducer, error)
    else:
        skipping.n_blocks -= 1
        _leave_dropped(reducer, None)


def _leave_dropped(reducer: Skippable, error: BaseException | None) -> None:
    """Leaves a round whose backward has ended with an exception, unless an outer block decides."""
    ending = reducer._round
    if ending is not None and ending.was_dropped and not reducer._skipping.n_blocks:
        leave(reducer)
        if error is not None:
            note_abandoned(error)


def _vote(reducer: Skippable, error: BaseException) -> None:
    try:
        reducer.skip_step()
    except FastcommError as late:
        raise late from error
    first_line = str(error).partition("\n")[0]
    reducer._skipping.vote = f"met {type(error).__name__}: {first_line}"
    ending = reducer._round
    if ending is not None and ending.was_dropped:
        reducer.synchronize()


def leave(reducer: Ending) -> None:
    """The round cannot be ended as it should, because backward has raised, or a bucket. The other
    ranks hear of it.
    """
    ending = reducer._round
    if ending is None:
        return
    try:
        ending.leave()
    finally:
        _drop(reducer, ending)


def _drop(reducer: Ending, ending: Round) -> None:
    ending.drop()
    _close(reducer)


def _close(reducer: Ending) -> None:
    reducer._weighting.forget()
    reducer._skipping.vote = None
    reducer._n_unsynced = 0
    reducer._round = None
