"""Elastic: a loop that goes on with the ranks that are left when some are lost, and takes in those
that come to take their place.

While it runs, a round that ends with a lost rank is dropped without an error, as a for loop could
not go on after one. At the next batch the ranks meet anew (Communicator.rebuild), every reducer
follows (Reducer.refresh), and the ranks that are behind get what one of those has that have made
most steps (catch_up). All that was communicated is known to all ranks then: which batches come
again follows from the number of rounds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from fastcomm.comm.objects import gather_objects, on_host, tellable
from fastcomm.errors import AbandonedError, FastcommError, PeerLostError, TimeoutError
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.features.progress import (
    Progress,
    Stateful,
    compare,
    load_states,
    refuse_stateless,
)
from fastcomm.reducer.features.torch_helpers import watch_scalers
from fastcomm.reducer.optimizer_hooks import allow_steps, watch_steps
from fastcomm.reducer.owners import reducers_on
from fastcomm.reducer.round import Round, State

if TYPE_CHECKING:
    from fastcomm.reducer.reducer import Reducer

T = TypeVar("T")
NOT_CAUGHT_UP = (
    "the ranks have met anew, and have made different numbers of steps: call fastcomm.catch_up("
    "reducer, optimizer) on every rank, with all that keeps something from step to step, or loop "
    "by reducer.elastic()"
)
_OUTLIVED = (PeerLostError, TimeoutError, AbandonedError)
_LOOK_S = 1.0  # how often one rank looks for those that wait to be taken in
_NO_BATCH: Any = object()


# ---- how far the ranks have come -----------------------------------------------------------------


@tellable
class Standing(NamedTuple):
    """How far a rank had come with a reducer when the ranks met anew. The furthest is the largest.

    stayed: whether it was one of the ranks before.
    """

    stayed: bool
    n_rounds: int
    n_steps: int


class Standings(NamedTuple):
    """Of all ranks, of which some are behind."""

    ranks: list[Standing]

    @property
    def src(self) -> int:
        return self.ranks.index(max(self.ranks))

    @property
    def n_rounds(self) -> int:
        return max(self.ranks).n_rounds


def standings(reducer: Reducer) -> Standings | None:
    """How far the ranks have come, if they have met anew and some are behind. Collective then."""
    membership = reducer.comm.membership
    if membership is None or membership.came_anew is None:
        return None
    own = Standing(not membership.came_anew, reducer.n_rounds, reducer.steps.n)
    ranks = gather_objects(reducer.comm, own, "attach() or refresh()")
    return None if all(one == ranks[0] for one in ranks) else Standings(ranks)


def catch_up(reducer: Reducer, *state: Stateful) -> None:
    """After comm.rebuild(), and refresh() or attach(): ranks that are behind load the state of one
    that has made most steps. Parameters and buffers they have already. Collective.

    state: optimizers, schedulers and the like, the same on every rank: all that keeps something
        from step to step.

    Does nothing where all ranks have made the same steps. Raises TypeError for a state without
    state_dict() and load_state_dict(); on every rank MismatchError where ranks give different
    states, and FastcommError where an optimizer keeps state that was not given.
    """
    refuse_stateless(state)
    reducer.attached_model()
    _catch_up([reducer], state)


def _catch_up(reducers: Sequence[Reducer], states: Sequence[Stateful]) -> None:
    comm = reducers[0].comm
    known = [one.standings.ranks for one in reducers if one.standings is not None]
    if not known:
        return
    # Who has come further with one reducer is not behind with another: rounds follow each other.
    by_rank = list(zip(*known, strict=True))
    src = by_rank.index(max(by_rank))
    ranks = gather_objects(comm, Progress.of(reducers, states), "catch_up()")
    compare(ranks, "catch_up()")
    left_behind = [name for one in ranks for name in one.left_behind()]
    if left_behind:
        raise FastcommError(
            f"catch_up() was not given {left_behind[0]}, which keeps state from step to step: give "
            "it all optimizers, schedulers and scalers, or give them to elastic(state=[...])"
        )
    load_states(comm, states, src, "catch_up()", is_behind=by_rank[comm.rank] != by_rank[src])
    for reducer in reducers:
        reducer.standings = None
        allow_steps(parameter for _, parameter in reducer.named_parameters())
    watch_steps()  # what optimizers know of their parameters is out of date
    comm.membership.came_anew = False


# ---- the loop ------------------------------------------------------------------------------------


def elastic(reducer: Reducer, batches: Iterator[T], state: Sequence[Stateful]) -> Iterator[T]:
    """See Reducer.elastic."""
    reducer.attached_model()
    refuse_stateless(state)
    reducers = reducers_on(reducer.comm)
    for one in reducers:
        check(Feature.REBUILD, one.features())
    if reducer.comm.membership is None:
        raise FastcommError(
            "elastic() takes ranks that fastcomm.init() has brought together by init_method, "
            "where they can meet anew"
        )
    return Elastic(reducers, state).loop(batches)


class Elastic(RoundExtension):
    """The loop of Reducer.elastic(), and what it does beside the rounds in it."""

    def __init__(self, reducers: list[Reducer], state: Sequence[Stateful]) -> None:
        self._reducers, self._state = reducers, state
        self._was_dropped = False  # a round, since the last batch
        self._last_look = 0.0

    @property
    def _n_rounds(self) -> int:
        return sum(one.n_rounds for one in self._reducers)

    def loop(self, batches: Iterator[T]) -> Iterator[T]:
        watch_scalers()
        for one in self._reducers:
            one.install(self)
        try:
            if any(one.standings is not None for one in self._reducers):
                self._go_on(is_first=True)
            yield from self._batches(batches)
        finally:
            for one in self._reducers:
                one.remove(self)
                one.outlived = None

    def _batches(self, batches: Iterator[T]) -> Iterator[T]:
        coming: deque[T] = deque()
        taken: list[T] = []  # since a round has ended
        while True:
            if not coming:
                coming.append(next(batches, _NO_BATCH))
            if not self._all_go_on(coming[0] is not _NO_BATCH):
                return
            taken.append(coming.popleft())
            n_rounds, self._was_dropped = self._n_rounds, False
            yield taken[-1]
            if self._outlived is not None:
                self._end_of_step()
            if self._n_rounds > n_rounds:
                taken = []
            elif self._was_dropped:
                coming.extendleft(reversed(taken))
                taken = []

    def _all_go_on(self, has_batch: bool) -> bool:
        """Whether all ranks have a batch. Takes in those that wait."""
        while True:
            comm = self._reducers[0].comm
            flags = [has_batch, not self._is_awaited()]
            vote = torch.tensor(flags, dtype=torch.uint8, device=comm.device)
            try:
                comm.all_reduce(vote, "min")
                have_batches, is_complete = on_host(comm, vote).tolist()
            except AbandonedError:  # of the step before
                continue
            except _OUTLIVED:
                self._go_on()
                continue
            if not have_batches or is_complete:
                return bool(have_batches)
            self._go_on()

    def _is_awaited(self) -> bool:
        comm, now = self._reducers[0].comm, time.monotonic()
        if comm.rank > 0 or now - self._last_look < _LOOK_S:
            return False
        self._last_look = now
        is_awaited: bool = comm.membership.is_awaited()
        return is_awaited

    # -- when a rank is lost -----------------------------------------------------------------------

    @property
    def _outlived(self) -> FastcommError | None:
        return self._reducers[0].outlived

    def before_round(self, round: Round) -> None:
        """Drops what comes after a round that was dropped: no other rank may be there."""
        if self._outlived is not None:
            round.outlive(self._outlived)

    def verdict(self, round: Round) -> bool:
        """Over NCCL, waits for the device: an optimizer's step could not be taken back, if a rank
        turns out to be lost.
        """
        comm = self._reducers[0].comm
        if comm.has_streams:
            comm.refuse_capture("elastic()")
            on_host(comm, round.buckets[-1].flat[:1])
        return False

    def outlives(self, error: FastcommError) -> bool:
        """Where a rank is lost after a round, those that have its gradients step with them all the
        same. Where one has abandoned the step, none does.
        """
        is_outlived = isinstance(error, _OUTLIVED)
        if is_outlived and self._reducers[0].comm.failure is None:
            self._drop(error)
        return is_outlived

    def after_round(self, round: Round) -> None:
        if round.state is State.DROPPED:
            self._was_dropped = True
            if round.outlived is not None:
                self._drop(round.outlived)

    def _drop(self, error: FastcommError) -> None:
        """Lets no optimizer make the step."""
        for one in self._reducers:
            one.outlived = one.outlived or error

    def _end_of_step(self) -> None:
        """A step has ended with an error that the loop outlives."""
        if self._reducers[0].comm.failure is not None:
            self._go_on()
        for one in self._reducers:
            one.outlived = None

    def _go_on(self, *, is_first: bool = False) -> None:
        """Brings the ranks together anew, and makes them equal. is_first: they have met, and those
        that were lost in between are found out by what fails.
        """
        while True:
            if not is_first:
                self._reducers[0].comm.rebuild()
            try:
                for one in self._reducers if not is_first else ():
                    one.refresh()
                _catch_up(self._reducers, self._state)
                return
            except _OUTLIVED:  # another was lost meanwhile
                is_first = False
