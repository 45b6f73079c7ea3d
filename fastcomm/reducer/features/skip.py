"""Skipping: rounds that all ranks drop together, because a rank votes for it, or because reduced
gradients are not finite. Holds this rank's vote, the verdict on the last round, and whose gradients
were to blame.

All ranks come to the same verdict without a message of its own: a vote travels with the buckets of
the round, and reduced gradients are equal on all ranks. Over NCCL, where no host looks at what
travels, a vote is a NaN in the gradients. Only when a round is dropped do the ranks tell each other
why, and rank 0 logs it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastcomm.comm.flat_buffers import inside
from fastcomm.comm.objects import gather_objects, tellable
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.reducer import statistics
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.options import Options
from fastcomm.reducer.round import Round, State

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

_log = logging.getLogger("fastcomm")
_NAMED = 3  # parameters of one rank in a log entry


@tellable
class Cause(NamedTuple):
    """What one rank has to say about a round that was dropped.

    vote: why it has voted; None: it has not.
    found: by parameter, how many elements of the rank's own gradient were not finite; 0: some, but
        nobody has counted them.
    """

    vote: str | None
    found: dict[str, int]


class Skipping(RoundExtension):
    """Keeps what one reducer's rank votes, and the verdict on the last round. Installed with the
    first vote of this rank, or of another.

    vote: why this rank wants to skip the current round, or the next if none is open; or None.
    is_skipped: all ranks have dropped the last round.
    n_skipped: rounds that were dropped.
    """

    def __init__(self, comm: Transport, options: Options) -> None:
        self._comm, self._options = comm, options
        self.n_skipped = 0
        self._n_blocks = 0  # of skip_on() around what runs now
        self._failed: Round | None = None  # its backward has ended with an exception in a block
        self.forget()

    def use(self, comm: Transport) -> None:
        self._comm = comm

    def forget(self) -> None:
        self.vote: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._is_talking = False
        self._n_nonfinite: int | None = None  # in the reduced gradients; None: not counted yet
        # Of this rank's own gradients in this round, by name:
        self._kept: list[tuple[str, Tensor]] = []  # as autograd has made them
        self._largest: list[tuple[Sequence[str], Tensor]] = []  # their largest absolute values
        self._found: dict[str, int] = {}  # see Cause
        self.is_skipped = False

    @property
    def votes(self) -> bool:
        return self.vote is not None

    @property
    def skips_step(self) -> bool:
        return self.is_skipped or self.votes

    def refuse_vote(self) -> None:
        """Raises FastcommError where no vote would reach the other ranks."""
        self._comm.refuse_vote(self._options.op, self._options.skip_nonfinite)

    def skip_step(self, core: Core) -> None:
        """See Reducer.skip_step."""
        self.refuse_vote()
        if core.round is None:
            # once there are steps, a parameter without any has no optimizer
            is_late = any(bucket.has_unstepped(not core.steps.n) for bucket in core.buckets)
        else:
            is_late = core.round.is_committed
        if is_late:
            raise FastcommError(
                f"skip_step() came too late on rank {self._comm.rank}: the gradients are reduced, "
                "and other ranks may step with them. Call it before backward() ends; to drop what "
                "is reduced, by a number that is equal on all ranks (grad_norm()), leave out the "
                "optimizer's step on every rank, and call zero_grad(). If they are left from the "
                "backward of another model's loss (a GAN's generator), call zero_grad() first, and "
                "skip_step() then"
            )
        self.vote = self.vote or "called skip_step()"
        if core.round is not None:
            core.round.vote()

    # -- a round -----------------------------------------------------------------------------------

    def before_round(self, round: Round) -> None:
        """Begin a round, or go on after a signal handler has raised at its beginning."""
        self._clear()
        if self.vote is not None:
            round.vote()
        if self._options.skip_nonfinite:
            if self._comm.has_streams:
                self._comm.refuse_capture("skip_nonfinite=True")
            round.inspect = self.inspect

    def inspect(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Keeps of these gradients, which are about to be reduced, what will tell whether they were
        finite.
        """
        if self._comm.has_streams:  # a device's memory is scarce, and nothing here waits for it
            some = [pair for pair in zip(names, gradients, strict=True) if pair[1].numel()]
            if some:
                largest = torch._foreach_norm([gradient for _, gradient in some], float("inf"))
                stacked = torch.stack([one.double() for one in largest])
                self._largest.append(([name for name, _ in some], stacked))
            return
        in_flat = set(inside(list(gradients)))  # in flat buffers, which the reduction overwrites
        for i, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            if i not in in_flat:
                self._kept.append((name, gradient))
            elif not statistics.screened(gradient).isfinite():
                self._found |= _counted(name, gradient)

    def skips_round(self, round: Round) -> bool:
        """Whether reduced gradients are not finite. Collective where ranks have their shards."""
        if not self._options.skip_nonfinite or round.was_voted_down:
            return False
        if self._n_nonfinite is None:
            with self._talking():
                self._n_nonfinite = statistics.n_nonfinite_in_result(round.buckets, self._comm)
        return self._n_nonfinite > 0

    def after_round(self, round: Round) -> None:
        """Let the ranks tell each other why they have dropped it, if they have together."""
        if round.state is State.SKIPPED and not self.is_skipped:
            with self._talking():
                self._conclude(self._n_nonfinite or 0)
            self.is_skipped = True
        self._kept, self._largest = [], []
        self.vote = self._failed = None

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Raises RuntimeError where a signal handler has raised while the ranks talked."""
        if self._is_talking:
            raise RuntimeError("the ranks cannot tell each other why a round is dropped")
        self._is_talking = True
        yield
        self._is_talking = False

    def _conclude(self, n_nonfinite: int) -> None:
        self.n_skipped += 1
        if self._comm.open_join:  # where a rank without data cannot gather objects: each logs
            causes = {self._comm.rank: self._cause()}
        else:
            told = gather_objects(self._comm, self._cause(), "backward() or synchronize()")
            causes = dict(enumerate(told))
            if self._comm.rank != 0:
                return
        _log.warning("all ranks skip a step: %s", _in_words(causes, n_nonfinite))

    def _cause(self) -> Cause:
        for name, gradient in self._kept:
            self._found |= _counted(name, gradient)
        for names, largest in self._largest:
            is_finite = largest.isfinite().tolist()
            self._found |= {
                name: 0 for name, good in zip(names, is_finite, strict=True) if not good
            }
        return Cause(self.vote, self._found)

    # -- a block that votes on exceptions ----------------------------------------------------------

    def keeps_open(self, round: Round) -> bool:
        """Whether a block of skip_on() decides about the round."""
        if self._n_blocks:
            self._failed = round
        return self._n_blocks > 0

    @contextlib.contextmanager
    def skip_on(
        self,
        exceptions: tuple[type[BaseException], ...],
        skip_step: Callable[[], None],
        synchronize: Callable[[], None],
    ) -> Iterator[None]:
        """Makes these exceptions a vote to drop the step. skip_step, synchronize: the reducer's."""
        self._n_blocks += 1
        try:
            yield
        except BaseException as error:
            self._n_blocks -= 1
            if not isinstance(error, exceptions) or isinstance(error, FastcommError):
                self._abandon_failed(error)
                raise
            try:
                skip_step()
            except FastcommError as late:
                raise late from error
            first_line = str(error).partition("\n")[0]
            self.vote = f"met {type(error).__name__}: {first_line}"
            if self._failed is not None:
                synchronize()
        else:
            self._n_blocks -= 1
            self._abandon_failed(None)

    def _abandon_failed(self, error: BaseException | None) -> None:
        """Abort a round whose backward has failed, unless an outer block decides."""
        if self._failed is not None and not self._n_blocks:
            self._failed.abandon(error)


def _counted(name: str, gradient: Tensor) -> dict[str, int]:
    n = int((~gradient.isfinite()).sum())
    return {name: n} if n else {}


def _in_words(causes: Mapping[int, Cause], n_nonfinite: int) -> str:
    votes = [f"rank {r} {cause.vote}" for r, cause in causes.items() if cause.vote is not None]
    found = [f"rank {r}: {_named(cause.found)}" for r, cause in causes.items() if cause.found]
    if votes or found:
        return "; ".join(votes + [f"gradients not finite on {one}" for one in found])
    if not n_nonfinite:
        return "another rank votes for it"
    if len(causes) == 1:
        return "gradients not finite on another rank, or in the sum"
    return (
        f"{n_nonfinite} elements of the reduced gradients are not finite, though no rank's own are"
    )


def _named(found: dict[str, int]) -> str:
    named = [f"{name} ({n} elements)" if n else name for name, n in list(found.items())[:_NAMED]]
    rest = len(found) - len(named)
    return ", ".join(named) + (f" and {rest} more parameters" if rest else "")
