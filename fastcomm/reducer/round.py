"""Round: what one backward, or one reduce(), reduces. Holds the state from its first gradient until
its end, and launches, finishes or drops all buckets together.

The reducer decides when a round begins, and how it ends: it is finished, or left and dropped. A
signal handler may raise between any two statements, so the order of statements that change state
matters here and in the reducer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastcomm.comm.autograd_stack import running_backward
from fastcomm.comm.collective import RECORD, SKIP, with_checksum
from fastcomm.comm.communicator import Communicator
from fastcomm.errors import AbandonedError, FastcommError, MismatchError
from fastcomm.insight.observer import RoundObserver
from fastcomm.reducer.autograd import call_at_end_of_backward
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.gradient_hook import EndOfBackward, RoundFlags
from fastcomm.reducer.skipping import Skipping
from fastcomm.reducer.weights import WeightedRound


class Round(RoundFlags):
    """An open round.

    buckets: all of the reducer's, in the order of the plan.
    number: among the finished rounds of the reducer, counted from 1.
    step: see collective.steps_made.
    observer: for a timeline or a profiler; or None.
    weighted: what this rank's gradients count; None: all ranks' count alike.
    skipping: whether the ranks drop the round.
    last_in_words: for messages, what this rank's optimizers have stepped last.
    """

    def __init__(
        self,
        comm: Communicator,
        buckets: Sequence[Bucket],
        op: str,
        number: int,
        step: int,
        observer: RoundObserver | None,
        weighted: WeightedRound | None,
        skipping: Skipping,
        last_in_words: Callable[[], str] | None = None,
    ) -> None:
        self.number = number
        self._step, self._last_in_words = step, last_in_words
        self._comm = comm
        self._buckets = buckets
        self._op = op if weighted is None else weighted.op
        self._weighted = weighted
        self._shared_weight: Any = None  # see Communicator.share_weight
        self._skipping = skipping
        self.was_dropped = False  # its backward has ended with an exception, in skip_step_on()
        self._observer = observer
        self._n_launched = 0
        self._keeps_graph = False  # the running backward is one with create_graph=True
        self._is_settled = False  # every gradient is where it belongs
        self._n_abandoned = comm.n_abandoned  # grows when another rank abandons the round
        comm.left_in_backward = None
        skipping.begin_round()
        if observer is not None:
            observer.begin(number)

    # -- during backward ---------------------------------------------------------------------------

    def await_end_of_backward(self, callback: EndOfBackward) -> None:
        """The running backward gives gradients to this round, and calls back when it is through."""
        self._keeps_graph = torch.is_grad_enabled()
        self.has_callback = True
        call_at_end_of_backward(callback)
        self._share_weight()  # before the first bucket is full, so that it need not wait

    def count_all(self) -> None:
        """Lets every gradient that exists take part: no backward tells which are ready."""
        if self._observer is not None:
            self._observer.reduce_by_hand()
        for bucket in self._buckets:
            bucket.count_all()

    @property
    def is_full(self) -> bool:
        """Whether every gradient of every bucket is ready."""
        return all(not bucket.n_pending for bucket in self._buckets)

    def launch_full_buckets(self) -> None:
        """Launches in plan order, so that all ranks launch the same buckets in the same order.

        Leaves the last bucket to the end of backward. It is full only then anyway. So no rank gets
        its gradients before all ranks have come to the end, and an exception on one rank costs the
        step on all.
        """
        while (
            self._n_launched < len(self._buckets) - 1
            and not self._buckets[self._n_launched].n_pending
            and not self._buckets[self._n_launched].waits_in_launch
        ):
            self._launch_next()
            self._buckets[self._n_launched - 1].watch_gradients()

    # -- how it ends -------------------------------------------------------------------------------

    def launch_rest(self) -> None:
        """Launches the other buckets. First raises FastcommError if a hook has changed a gradient
        of a bucket under way: the other ranks cannot finish then.
        """
        if self._observer is not None:
            self._observer.end_backward()
        for bucket in self._buckets[: self._n_launched]:
            bucket.refuse_changed_gradients()
        while self._n_launched < len(self._buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        if self._comm.n_abandoned != self._n_abandoned:
            # a hook went on after abandon(): the others would take this launch for their next round
            raise AbandonedError(
                "this round was abandoned while its backward was running: skip this step"
            )
        bucket = self._buckets[self._n_launched]
        try:
            self._launch(bucket)
        except MismatchError as error:
            raise self._explained(error) from error.__cause__

    def _launch(self, bucket: Bucket) -> None:
        if self._observer is not None:
            self._observer.begin_launch(self._n_launched)
        self._share_weight()
        step = with_checksum(self._step, bucket.stepped) if bucket.stepped else self._step
        if self._skipping.vote is None:
            bucket.launch(
                self._op,
                step,
                keeps_graph=self._keeps_graph,
                weight=self._shared_weight,
                own_weight=None if self._weighted is None else self._weighted.weight,
                inspect=self._skipping.inspect if self._skipping.inspects else None,
            )
        elif self._skipping.hears_votes:
            bucket.launch_vote(SKIP, step, None, with_nan=False)
        else:
            bucket.launch_vote(self._op, step, self._shared_weight, with_nan=True)
        if self._observer is not None:
            self._observer.end_launch(self._n_launched)
        self._n_launched += 1

    def _share_weight(self) -> None:
        if self._weighted is not None and self._shared_weight is None:
            _, weight, reducer = self._weighted
            self._shared_weight = self._comm.share_weight(weight, reducer)

    @property
    def must_finish(self) -> bool:
        """Whether all buckets are under way, so that the other ranks count on them, or settled."""
        return self._is_settled or self._buckets[-1].is_launched

    def finish(self) -> None:
        """Waits for the buckets, and brings every gradient to where it belongs, or drops all. May
        be called again after a signal handler has raised in it.
        """
        if not self._is_settled:
            for i, bucket in enumerate(self._buckets):
                self._finish_bucket(i, bucket)
            is_skipped = self._skipping.judge(self._buckets)
            for bucket in self._buckets:
                if is_skipped:
                    bucket.drop_gradients()
                else:
                    bucket.settle(self.number)
            self._is_settled = True
        if self._observer is not None:
            self._observer.end()
        self._reset_buckets()

    def _finish_bucket(self, i: int, bucket: Bucket) -> None:
        try:
            if self._observer is None:
                bucket.finish()
                return
            self._observer.begin_wait(i)
            self._observer.end_wait(i, bucket.finish())
        except MismatchError as error:
            raise self._explained(error) from error.__cause__

    def _explained(self, error: MismatchError) -> MismatchError:
        if RECORD in str(error) and self._last_in_words is not None:
            error.args = (f"{error}; {self._last_in_words()}",)
        return error

    def leave(self) -> None:
        """Abandons the round, so that the other ranks learn of it. Call drop() next."""
        self.has_callback = False
        if self._comm.n_abandoned != self._n_abandoned:
            return  # another rank or another reducer has abandoned it already
        with contextlib.suppress(FastcommError):  # what went wrong is on its way to the user
            self._comm.abandon(in_any_case=True)
        backward = running_backward()
        if backward is not None:
            self._comm.left_in_backward = self._comm.n_abandoned, backward

    def drop(self) -> None:
        """Drops all gradients, which may be half reduced: an optimizer that steps all the same must
        not make the ranks differ.
        """
        for bucket in self._buckets:
            bucket.drop_gradients()
        self._reset_buckets()
        if self._observer is not None:
            self._observer.drop()

    def _reset_buckets(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
