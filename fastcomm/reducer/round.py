"""Round: what one backward, or one reduce(), reduces, from its first gradient to its end.

Launches, settles or drops all buckets together. The reducer opens a round and hands it what
autograd tells. Features take part as extensions; see extension.py.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fastcomm.comm.collective import with_checksum
from fastcomm.comm.standing import GONE_ON
from fastcomm.comm.transport import ALIKE, Transport
from fastcomm.comm.words import RECORDS
from fastcomm.errors import AbandonedError, FastcommError, MismatchError
from fastcomm.insight.recorder import BACKWARD, WAITING, Phases
from fastcomm.reducer.autograd import call_at_end_of_backward
from fastcomm.reducer.bucket import Bucket, Inspection
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.hooks import EndOfBackward, RoundFlags

_NOTE = (
    "fastcomm: all ranks have the reduced gradients of this step, and so has this one. Make the "
    "step here, too, or on no rank"
)


class State(enum.Enum):
    """How far a round has come."""

    OPEN = "open"
    COMMITTED = "committed"
    SETTLED = "settled"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"


class Round(RoundFlags):
    """An open round of a reducer.

    What one backward does, in order:

    1. The first gradient that is ready opens a round (Core.begin_backward): extensions tell what
       this rank brings, and autograd is asked to call at the end of the backward.
    2. The hook on a parameter that fills a bucket calls advance(). It launches the full buckets in
       the order of the plan, so that all ranks launch the same ones in the same order.
    3. The end of the backward calls advance(is_end=True). It launches the buckets that are left.
       The last bucket is always left to the end, so that no rank gets its gradients before all
       ranks have come to the end, and an exception on one rank costs the step on all. From that
       launch on the other ranks count on this one: the round is COMMITTED.
    4. It waits for the buckets. Where a rank votes to skip, or an extension says so,
       it drops the gradients of all buckets: SKIPPED. Else it brings every gradient to where it
       belongs: SETTLED.
    5. It tells when_over, which tells the extensions.

    reduce() counts the gradients that stand in .grad, and begins with step 3. What is raised before
    COMMITTED aborts the round, on all ranks: ABANDONED. After it only an error that all ranks get
    does. What a signal handler raises then is raised when the round has settled. A handler may
    raise between any two statements, so the order of those that change state matters. An error
    that an extension survives is not raised: the backward goes on, and the round is dropped at its
    end.

    buckets: all of the reducer's, in the order of the plan.
    op: of the communicator, or one of collective.WEIGHTED_OPS; see weigh().
    part: what this rank brings into it; see Transport.begin_round.
    number: among the rounds of the reducer that were not abandoned, counted from 1.
    fingerprint: of this rank's steps; see collective.fingerprint_of.
    reducer: the number of the one that has opened the round; 0 where none has.
    phases: of the reducer, where a launch in the backward may wait for other ranks.
    when_over: called with the round when it is over, and again if that was interrupted.
    last_in_words: for messages, what this rank's optimizers have stepped last.
    note: added to what a signal handler has raised, when the round has settled all the same.
    survived: the error that an extension survives; or None.
    """

    def __init__(
        self,
        comm: Transport,
        buckets: Sequence[Bucket],
        op: str,
        number: int,
        fingerprint: int,
        *,
        reducer: int = 0,
        phases: Phases | None = None,
        extensions: Iterable[RoundExtension] = (),
        when_over: Callable[[Round], None] = lambda _: None,
        last_in_words: Callable[[], str] | None = None,
        note: str = _NOTE,
    ) -> None:
        self.buckets, self.op, self.number = buckets, op, number
        self.part = ALIKE  # a vote in it holds from the next launch on
        self.extensions = list(extensions)
        self.observer: Any = None  # a RoundObserver, where somebody looks
        self.inspect: Inspection | None = None  # sees this rank's gradients before their reduction
        # Called with the number of a bucket that is about to take the gradients in .grad.
        self.before_launch: Callable[[int], None] | None = None
        self.was_voted_down = False  # some rank votes to skip; known when the buckets are reduced
        self.is_by_hand = False  # it reduces what stands in .grad, without a backward
        self._comm, self._fingerprint, self._reducer = comm, fingerprint, reducer
        self._phases = phases or Phases()
        self._when_over, self._last_in_words, self._note = when_over, last_in_words, note
        self.survived: FastcommError | None = None  # an error that an extension survives
        self._has_begun = False  # the transport knows of it
        self._n_launched = 0
        self._keeps_graph = False  # the running backward is one with create_graph=True
        self._result: State | None = None  # the last state, once it is reached
        self.is_over = False  # it has ended, and everybody who asked to know of it does
        self._n_abandoned = comm.n_abandoned  # grows when another rank abandons the round

    @property
    def state(self) -> State:
        """Derived, as only the transport knows whether an interrupted launch was posted."""
        if self._result is not None:
            return self._result
        if self.buckets[-1].is_launched:
            return State.COMMITTED
        return State.OPEN

    @property
    def is_committed(self) -> bool:
        """Whether the other ranks count on this one's part, or have had it."""
        return self.state is not State.OPEN

    def weigh(self, op: str, weight: float, scale: float) -> None:
        """Let this rank's gradients count so much: see transport.Part."""
        self.op, self.part = op, self.part._replace(weight=weight, scale=scale)

    def vote(self) -> None:
        """Let no gradient of this rank take part from the next launch on, and drop the round."""
        self.part = self.part._replace(votes=True)

    def begin(self) -> None:
        """Let the transport know, before the first bucket is full, which then need not wait."""
        if not self._has_begun:
            self.part = self._comm.begin_round(self.op, self.part, self._reducer)
            self._has_begun = True

    # -- during backward ---------------------------------------------------------------------------

    def await_end_of_backward(self, callback: EndOfBackward) -> None:
        """Take gradients of the running backward, which calls back when it is through."""
        self._keeps_graph = torch.is_grad_enabled()
        self.has_callback = True
        call_at_end_of_backward(callback)  # first: it finds what is raised from here on
        if self.survived is None:
            try:
                self.begin()
            except FastcommError as error:
                if not self._has_survived(error):
                    raise

    def survive(self, error: FastcommError) -> None:
        """Launch no more, and drop the round at its end. The other ranks know the error. Its stack
        would keep the buckets alive.
        """
        self.survived = error.with_traceback(None)

    def _has_survived(self, error: FastcommError) -> bool:
        """Whether an extension survives the error, which then need not be raised."""
        is_survived = any(extension.survives(error) for extension in self.extensions)
        if is_survived:
            self.survive(error)
        return is_survived

    def count_all(self) -> None:
        """Let every gradient that exists take part: no backward tells which are ready."""
        self.is_by_hand = True
        for bucket in self.buckets:
            bucket.count_all()

    @property
    def is_full(self) -> bool:
        """Whether every gradient of every bucket is ready."""
        return all(not bucket.n_pending for bucket in self.buckets)

    def advance(self, *, is_end: bool = False) -> None:
        """Go as far as the gradients that are ready allow: steps 2 to 5 of what one backward does.
        is_end: all of them are. Raises as Reducer.synchronize.
        """
        if is_end:
            self._finish()
            return
        self._phases.enter(WAITING)
        try:
            while (
                self._n_launched < len(self.buckets) - 1
                and not self.buckets[self._n_launched].n_pending
                and not self.buckets[self._n_launched].waits_in_launch
                and self.survived is None
            ):
                if self._launch_next():
                    self.buckets[self._n_launched - 1].watch_gradients()
        except FastcommError as error:
            if not self._has_survived(error):
                raise
        self._phases.enter(BACKWARD)

    def _launch_next(self) -> bool:
        """Returns whether the bucket brings gradients, and no vote."""
        if self._comm.n_abandoned != self._n_abandoned:
            # a hook went on after abandon(): the others would take this launch for their next round
            raise AbandonedError(GONE_ON)
        if self.observer is not None:
            self.observer.before_launch(self, self._n_launched)
        if self.before_launch is not None:
            self.before_launch(self._n_launched)
        bucket = self.buckets[self._n_launched]
        part, fingerprint = self.part, self._fingerprint  # a signal handler may vote meanwhile
        if bucket.step_checksum:
            fingerprint = with_checksum(fingerprint, bucket.step_checksum)
        try:
            if part.votes:
                bucket.launch_vote(self.op, fingerprint, part)
            else:
                bucket.launch(
                    self.op, fingerprint, part, keeps_graph=self._keeps_graph, inspect=self.inspect
                )
        except MismatchError as error:
            raise self._explained(error) from error.__cause__
        if self.observer is not None:
            self.observer.after_launch(self, self._n_launched)
        self._n_launched += 1
        return not part.votes

    # -- how it ends -------------------------------------------------------------------------------

    def commit(self) -> None:
        """Launch the other buckets. First raise FastcommError if a hook has changed a gradient of
        a bucket under way: the other ranks cannot finish then.
        """
        self.begin()
        if self.observer is not None:
            self.observer.end_of_backward(self)
        for bucket in self.buckets[: self._n_launched]:
            bucket.refuse_changed_gradients()
        while self._n_launched < len(self.buckets):
            self._launch_next()

    def _finish(self) -> None:
        if self.survived is not None:
            self._drop()
            return
        try:
            self.commit()
            self._settle()
        except FastcommError as error:
            # the other ranks have heard of it, or will when this one leaves
            is_survived = self._has_survived(error)
            self.abandon(error)
            if not is_survived:
                raise
        except BaseException as error:
            if self.is_committed:
                self._settle_in_spite_of(error)
            else:
                self.backward_failed(error)
            raise

    def _settle(self) -> None:
        """May be called again after a signal handler has raised in it."""
        if self._result is None:
            for i in range(len(self.buckets)):
                self._wait_for(i)
            self._result = self._settle_or_drop()
        self._close()

    def _wait_for(self, i: int) -> None:
        if self.observer is not None:
            self.observer.before_wait(self, i)
        try:
            work = self.buckets[i].finish()
        except MismatchError as error:
            raise self._explained(error) from error.__cause__
        if self.observer is not None:
            self.observer.after_wait(self, i, work)

    def _settle_or_drop(self) -> State:
        """Settle or drop the gradients of all buckets."""
        self.was_voted_down = any(bucket.is_skipped() for bucket in self.buckets)
        skips = [extension.skips_round(self) for extension in self.extensions]
        is_skipped = self.was_voted_down or any(skips)
        for bucket in self.buckets:
            if is_skipped:
                bucket.drop_gradients()
            else:
                bucket.settle()
        self._comm.end_round()
        return State.SKIPPED if is_skipped else State.SETTLED

    def _settle_in_spite_of(self, interruption: BaseException) -> None:
        """The round ends well on the other ranks; it must not end differently here."""
        try:
            self._settle()
        except FastcommError as trouble:  # it has ended alike on all ranks, or they are lost
            self.abandon(interruption)
            raise interruption from trouble
        except BaseException as trouble:
            # once more: there is no way to go on in step with the others
            self._comm.abort()
            self._drop()
            raise interruption from trouble
        if hasattr(interruption, "add_note"):  # Python 3.11
            interruption.add_note(self._note)

    def backward_failed(self, error: BaseException | None = None) -> None:
        """The backward has ended with an exception: abort, unless an extension ends the round
        later. error: None where it is not known.
        """
        self.has_callback = False
        if not any(extension.keeps_open(self) for extension in self.extensions):
            self.abandon(error)

    def abandon(self, error: BaseException | None = None) -> None:
        """Drop the round on all ranks, which hear that this one cannot go on. Does nothing once
        the round is over. error: the reason.
        """
        if not self.is_over:
            try:
                self._tell_ranks()
            finally:
                self._drop()
        if error is not None:
            self._comm.standing.mark(error)

    def _tell_ranks(self) -> None:
        """Let the other ranks know."""
        self.has_callback = False
        if self._comm.n_abandoned != self._n_abandoned:
            return  # another rank or another reducer has abandoned it already
        with contextlib.suppress(FastcommError):  # what went wrong is on its way to the user
            self._comm.abandon(in_any_case=True)

    def _drop(self) -> None:
        """Drop all gradients, which may be half reduced: an optimizer that steps all the same must
        not make the ranks differ.
        """
        for bucket in self.buckets:
            bucket.drop_gradients()
        self._result = State.ABANDONED
        self._close()

    def _close(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._when_over(self)
        self.is_over = True

    def _explained(self, error: MismatchError) -> MismatchError:
        if error.differs == RECORDS and self._last_in_words is not None:
            error.args = (f"{error}; {self._last_in_words()}",)
        return error
