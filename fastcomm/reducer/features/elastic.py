"""Elastic: a loop that goes on with the remaining ranks when some are lost, and takes in processes
that come in their place.

While it runs, a round that ends with a lost rank is dropped without an error, as a for loop could
not go on after one. At the next batch the ranks meet again (Communicator.rebuild), every reducer
follows (Reducer.refresh), and ranks that are behind load the state of one that has made most steps
(catch_up). Which batches come again follows from the number of rounds, which is then equal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer

from fastcomm.comm.objects import gather_objects, on_host
from fastcomm.comm.transport import Transport
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
from fastcomm.reducer.owners import reducers_on
from fastcomm.reducer.round import Round, State

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core
    from fastcomm.reducer.reducer import Reducer

T = TypeVar("T")
NOT_CAUGHT_UP = (
    "the ranks have met again, and have made different numbers of steps: call fastcomm.catch_up("
    "reducer, optimizer) on every rank, with all that keeps something from step to step, or loop "
    "by reducer.elastic()"
)
_SURVIVED = (PeerLostError, TimeoutError, AbandonedError)
_LOOK_S = 1.0  # how often one rank looks for those that wait to be taken in
_NO_BATCH: Any = object()


# ---- how far the ranks have come -----------------------------------------------------------------

# How far a rank has come with a reducer: whether it has what the others have, the number of rounds,
# and of steps. The furthest is the largest.
Reached = tuple[bool, int, int]


class Behind(RoundExtension):
    """Ranks that have met again have come differently far with a reducer. Installed by attach() and
    refresh(), until catch_up(). No optimizer steps meanwhile.
    """

    def __init__(self, ranks: list[Reached], rank: int) -> None:
        """ranks: how far each has come. rank: this one."""
        self.ranks, self.is_behind = ranks, ranks[rank] != max(ranks)

    def features(self) -> Mapping[Feature, str]:
        return {Feature.REBUILD: "elastic()"}

    def before_step(self, optimizer: Optimizer) -> None:
        raise FastcommError(NOT_CAUGHT_UP)


def compare_ranks(core: Core) -> int:
    """Finds out how far the ranks have come that have met again, and installs Behind where they are
    not equally far. Returns one that has come furthest. Collective. Raises FastcommError, on every
    rank, where none has all that the lost ones had.
    """
    membership, before = core.comm.membership, core.find(Behind)
    has_all = not membership.is_new and (before is None or not before.is_behind)
    own = has_all, core.n_rounds, core.steps.n
    ranks = gather_objects(core.comm, own, "attach() or refresh()")
    if not any(has_all for has_all, *_ in ranks):
        raise FastcommError(
            "the ranks that had made most steps were lost before the others had the optimizer's "
            "state: load a checkpoint on every rank"
        )
    core.remove(before)
    furthest = max(ranks)
    if min(ranks) != furthest:
        core.install(Behind(ranks, core.comm.rank))
    core.n_rounds = furthest[1]
    return ranks.index(furthest)


def catch_up(reducer: Reducer, *state: Stateful) -> None:
    """Call it after comm.rebuild(), and refresh() or attach(): ranks that are behind load the state
    of a rank that made the most steps. They have its parameters and buffers already. Collective.

    state: everything that changes from step to step, such as optimizers and schedulers; the same
        on every rank.

    Does nothing if all ranks made the same steps. Raises TypeError for a state without state_dict()
    and load_state_dict(). Raises, on every rank, MismatchError if ranks pass different states, and
    FastcommError if an optimizer has state that was not passed.
    """
    refuse_stateless(state)
    reducer.core.model()
    _catch_up([reducer.core], state)


def _catch_up(reducers: Sequence[Core], states: Sequence[Stateful]) -> None:
    comm = reducers[0].comm
    found = [(one, one.find(Behind)) for one in reducers]
    apart = [(one, behind) for one, behind in found if behind is not None]
    if not apart:
        return
    # Who has come further with one reducer is not behind with another: rounds follow each other.
    by_rank = list(zip(*(behind.ranks for _, behind in apart), strict=True))
    src = by_rank.index(max(by_rank))
    ranks = gather_objects(comm, Progress.of(reducers, states), "catch_up()")
    compare(ranks, "catch_up()")
    left_behind = [name for one in ranks for name in one.left_behind()]
    if left_behind:
        raise FastcommError(
            f"catch_up() was not given {left_behind[0]}, which keeps state from step to step: give "
            "it all optimizers, schedulers and scalers, or give them to elastic(state=[...])"
        )
    is_behind = by_rank[comm.rank] != by_rank[src]
    load_states(comm, states, src, "catch_up()", is_behind=is_behind)
    for reducer, behind in apart:
        reducer.remove(behind)
    comm.membership.is_new = False


# ---- the loop ------------------------------------------------------------------------------------


def elastic(core: Core, state: Sequence[Stateful]) -> Elastic:
    """See Reducer.elastic."""
    core.model()
    refuse_stateless(state)
    reducers = reducers_on(core.comm.standing)
    for one in reducers:
        check(Feature.REBUILD, one.features())
    if not core.comm.membership.can_meet_anew:
        raise FastcommError(
            "elastic() takes ranks that fastcomm.init() has brought together by init_method, "
            "where they can meet again"
        )
    return Elastic(reducers, state)


class Elastic(RoundExtension):
    """The loop of Reducer.elastic(), and what it does beside the rounds in it."""

    def __init__(self, reducers: list[Core], state: Sequence[Stateful]) -> None:
        self._reducers, self._state = reducers, state
        self._taken: list[Any] = []  # the batches of the step under way
        self._again: list[Any] = []  # those of a step that was dropped
        self.survived: FastcommError | None = None  # why the step under way is dropped
        self._last_look = 0.0

    @property
    def skips_step(self) -> bool:
        return self.survived is not None

    def features(self) -> Mapping[Feature, str]:
        return {Feature.REBUILD: "elastic()"}

    @property
    def _comm(self) -> Transport:
        return self._reducers[0].comm

    @property
    def _n_rounds(self) -> int:
        return sum(one.n_rounds for one in self._reducers)

    def loop(self, batches: Iterator[T]) -> Iterator[T]:
        with self.installed():
            yield from self._batches(batches)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In the block losses are survived. Ranks that have met again before it become equal."""
        if any(one.find(Elastic) for one in self._reducers):
            raise FastcommError(
                f"elastic() is under way already on rank {self._comm.rank}: leave that loop first, "
                "or call close() of what elastic() has returned"
            )
        for one in self._reducers:
            one.install(self)
        try:
            self._begin()
            yield
        finally:
            for one in self._reducers:
                one.remove(self)

    def _batches(self, batches: Iterator[T]) -> Iterator[T]:
        fresh: list[T] = []
        n_rounds = self._n_rounds  # when the step under way began
        while True:
            if self._n_rounds > n_rounds:  # this rank has made the step, or one that it caught up
                n_rounds, self._again, self._taken = self._n_rounds, [], []
            if not self._again and not fresh:
                fresh.append(next(batches, _NO_BATCH))
            coming = self._again or fresh
            have_all = self.vote(coming[0] is not _NO_BATCH)
            if have_all is None:
                continue
            if not have_all:
                return
            self._taken.append(coming.pop(0))
            yield self._taken[-1]
            self.end_step()

    def end_step(self) -> None:
        if self.survived is not None and self._comm.failure is not None:
            self.go_on()
        self.survived = None

    def vote(self, has_batch: bool) -> bool | None:
        """Whether all ranks have a batch; None: the ranks have met again, as one is lost, or as
        processes waited, which are taken in between two steps. Ask again then.
        """
        comm = self._comm
        while True:
            flags = [has_batch, bool(self._taken) or not self._is_awaited()]
            vote = torch.tensor(flags, dtype=torch.uint8, device=comm.device)
            try:
                comm.all_reduce(vote, "min")
                have_batches, is_complete = on_host(comm, vote).tolist()
            except AbandonedError:  # of the step before
                continue
            except _SURVIVED:
                is_complete = False
            if is_complete:
                return bool(have_batches)
            self.go_on()
            return None

    def _is_awaited(self) -> bool:
        comm, now = self._comm, time.monotonic()
        if comm.rank > 0 or now - self._last_look < _LOOK_S:
            return False
        self._last_look = now
        is_awaited: bool = comm.membership.is_awaited()
        return is_awaited

    # -- when a rank is lost -----------------------------------------------------------------------

    def before_round(self, round: Round) -> None:
        """Drops what comes after a round that was dropped: no other rank may be there."""
        if self.survived is not None:
            round.survive(self.survived)

    def skips_round(self, round: Round) -> bool:
        """Over NCCL, waits for the device: an optimizer's step could not be taken back, if a rank
        turns out to be lost.
        """
        if self._comm.has_streams:
            self._comm.refuse_capture("elastic()")
            on_host(self._comm, round.buckets[-1].flat[:1])
        return False

    def survives(self, error: FastcommError) -> bool:
        return isinstance(error, _SURVIVED)

    def after_round(self, round: Round) -> None:
        if round.state is State.ABANDONED:
            self._take_again()
            self.survived = self.survived or round.survived

    def _take_again(self) -> None:
        """The step under way is dropped: its batches come again."""
        self._again, self._taken = self._taken + self._again, []

    def _begin(self) -> None:
        try:
            _catch_up(self._reducers, self._state)
        except _SURVIVED:  # another was lost meanwhile
            self.go_on()

    def go_on(self) -> None:
        """Brings the ranks together again, and makes them equal. What was accumulated is gone."""
        self._take_again()
        while True:
            self._comm.rebuild()
            try:
                for one in self._reducers:
                    one.refresh()
                _catch_up(self._reducers, self._state)
                return
            except _SURVIVED:  # another was lost meanwhile
                continue
