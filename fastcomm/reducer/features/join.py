"""Join: a block that ranks with different numbers of batches leave together.

A rank whose data has ended takes part in what the others reduce, with nothing of its own
(Transport.follow), until no rank has data any more. Then all ranks are made equal: they get the
parameters, the buffers and what was given as state of a rank that went furthest. A block belongs to
a communicator, and so to all reducers on it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastcomm.comm.communicator import ProcessBound
from fastcomm.comm.objects import gather_objects
from fastcomm.errors import AbandonedError, FastcommError, MismatchError
from fastcomm.reducer import validation
from fastcomm.reducer.autograd import free_failed_backwards
from fastcomm.reducer.features.compatibility import Feature, why_not
from fastcomm.reducer.features.progress import (
    Progress,
    Stateful,
    compare,
    holds,
    load_states,
    refuse_stateless,
    why_apart,
)
from fastcomm.reducer.features.weights import Weighting
from fastcomm.reducer.optimizer_hooks import refuse_step
from fastcomm.reducer.owners import reducers_on
from fastcomm.reducer.validation import named_parameters

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

T = TypeVar("T")
_NO_BATCH: Any = object()
_APART = (
    "join() could not copy the model that went furthest to all ranks. Make the models alike, call "
    "refresh() on every rank, and make new optimizers"
)


class Join(ProcessBound, Generic[T]):
    """The block of Reducer.join(). Made for each, or used again."""

    def __init__(self, core: Core, batches: Iterable[T] | None, state: Iterable[Stateful]) -> None:
        core.model()
        self._comm, self._core, self._batches = core.comm, core, batches
        self._state = list(state)
        for joined in self._reducers():
            refusal = why_not(Feature.JOIN, joined.features())
            if refusal is not None:
                raise ValueError(_about(joined, core) + refusal)
        refuse_stateless(self._state)
        self._states: list[Stateful] = []
        self._is_inner = False
        self._is_open = False
        self._difference: MismatchError | None = None  # of the ranks' models, in the end

    def _reducers(self) -> list[Core]:
        reducers = reducers_on(self._comm.standing)
        if len(reducers) > 1:  # a model in a reference cycle may be collected on some ranks only
            free_failed_backwards()
            gc.collect()
            reducers = reducers_on(self._comm.standing)
        return reducers

    # -- the block, and the loop in it -------------------------------------------------------------

    def __enter__(self) -> Any:
        batches = None if self._batches is None else iter(self._batches)
        self._begin()
        return None if batches is None else self._loop(batches)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        if self._is_inner:
            return
        if error is None or isinstance(error, GeneratorExit):
            self._end()
        else:
            self._fail(error)

    def __iter__(self) -> Iterator[T]:
        raise TypeError(
            "join() is a block, with the loop in it: with reducer.join(loader) as batches"
        )

    def _loop(self, batches: Iterator[T]) -> Iterator[T]:
        while True:
            if not self._is_open:
                raise FastcommError(
                    "a batch of join(batches) was asked for after its block: loop inside the block"
                )
            batch = next(batches, _NO_BATCH)
            self._core.data_exhausted = batch is _NO_BATCH
            if batch is _NO_BATCH:
                return
            yield batch

    # -- how it begins and ends --------------------------------------------------------------------

    def _begin(self) -> None:
        outer = self._comm.open_join  # of which this one is a part
        self._is_inner = outer is not None
        self._core.data_exhausted = False
        self._states = list(self._state)
        self._is_open = True
        if outer is not None:
            outer._states += [one for one in self._state if not holds(outer._states, one)]
            return
        self._comm.open_join = self

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Aborts the communicator where the end fails: no rank is to wait for this one."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        self._comm.open_join = None

    def _fail(self, error: BaseException | None) -> None:
        """An exception leaves the block: the ranks that count on this one must learn of it."""
        self._close()
        if not (isinstance(error, SystemExit) and not error.code):
            with contextlib.suppress(FastcommError):
                self._comm.abort()

    def _end(self) -> None:
        """This rank has no data any more."""
        with self._closing():
            if self._batches is None:
                self._core.data_exhausted = True
            for reducer in self._reducers():
                with contextlib.suppress(AbandonedError):  # of a step that is over
                    reducer.synchronize()
                _refuse_pending(reducer)
                weighting = reducer.find(Weighting)
                if weighting is not None:
                    weighting.forget()  # what was set for a batch that has not come
            self._follow()
            self._meet()
        self._raise_difference()

    def _raise_difference(self) -> None:
        """All ranks raise it, so the communicator goes on."""
        difference, self._difference = self._difference, None
        if difference is not None:
            raise difference

    def _follow(self) -> None:
        """Takes part in what the others reduce, until all ranks are done."""
        while True:
            try:
                if self._comm.follow():
                    return
            except AbandonedError:  # a step of the others, which go on
                continue

    # -- where the ranks meet ----------------------------------------------------------------------

    def _meet(self) -> None:
        """All ranks are done: makes them equal to one that went furthest."""
        self._comm.open_join = None
        reducers = self._reducers()
        ours = Progress.of(reducers, self._states)
        ranks = gather_objects(self._comm, ours, "join()")
        compare(ranks, "join()")
        rounds = [progress.rounds for progress in ranks]
        src = rounds.index(max(rounds))
        is_uneven = any(one != rounds[src] for one in rounds)
        for reducer, furthest in zip(reducers, rounds[src], strict=True):
            reducer.n_rounds, reducer.steps.n, reducer.steps.record = furthest
            reducer.stragglers.begin(reducer.n_rounds)
            if is_uneven:
                reducer.drop_step()  # the ranks have gradients of different steps
                for bucket in reducer.buckets:
                    bucket.step_checksum = 0  # some ranks have stepped less often
        named = [validation.named_tensors(reducer.model()) for reducer in reducers]
        try:
            validation.copy_from(self._comm, src, [pair for one in named for pair in one], "join()")
        except MismatchError as difference:
            for reducer in reducers:
                reducer.refuse_until_refresh(reducer.model(), f"{_APART}: {difference}")
            self._difference = difference
            return
        if not is_uneven:
            return
        reason = why_apart(ranks, is_loaded=not self._states)
        if reason is None and self._states:
            is_behind = ours.rounds != rounds[src]
            load_states(self._comm, self._states, src, "join()", is_behind=is_behind)
            ours = Progress.of(reducers, self._states)
            now = gather_objects(self._comm, ours.optimizers, "join()")
            loaded = [one._replace(optimizers=new) for one, new in zip(ranks, now, strict=True)]
            reason = why_apart(loaded, is_loaded=True)  # a scheduler's is not its optimizer's
        if reason is not None:
            for reducer in reducers:
                for _, parameter in named_parameters(reducer.model()):
                    refuse_step(parameter, reason)


def _about(joined: Core, asked: Core) -> str:
    """What a refusal of join() on one reducer begins with, if it is for what another one does."""
    if joined is asked:
        return ""
    return (
        "join() takes in every reducer of the communicator that has a model, and the one of "
        f"parameter {joined.buckets[0].names[0]} makes it impossible (detach() it if it is not "
        "used): "
    )


def _refuse_pending(core: Core) -> None:
    for bucket in core.buckets if core.n_unsynced else ():
        for slot in bucket.gradients.unsynced_slots():
            raise FastcommError(
                f"rank {core.comm.rank}: the data has ended inside no_sync(), and the gradient "
                f"of parameter {bucket.names[slot]} that was accumulated there would be lost: "
                "reduce with the last batch, too, or call zero_grad() to drop it"
            )
