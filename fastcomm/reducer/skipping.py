"""Skipping: rounds that all ranks drop together, because a rank votes for it, or because reduced
gradients are not finite. Holds this rank's vote, the verdict on the last round, and whose gradients
were to blame.

All ranks come to the same verdict without a message of its own: a vote travels with the buckets of
the round (collective.SKIP), and reduced gradients are equal on all ranks. Over NCCL, where no host
looks at what travels, a vote is a NaN in the gradients. Only when a round is dropped do the ranks
tell each other why, and rank 0 logs it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastcomm.comm.communicator import Communicator
from fastcomm.comm.flat_buffers import inside
from fastcomm.comm.objects import gather_objects
from fastcomm.errors import FastcommError
from fastcomm.reducer import norms
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.join import is_joining
from fastcomm.reducer.options import Options
from fastcomm.reducer.torch_helpers import watch_scalers

_log = logging.getLogger("fastcomm")
_NAMED = 3  # parameters of one rank in a log entry


class Cause(NamedTuple):
    """What one rank has to say about a round that was dropped.

    vote: why it has voted; None: it has not.
    found: by parameter, how many elements of the rank's own gradient were not finite; 0: some, but
        nobody has counted them.
    """

    vote: str | None
    found: dict[str, int]


class Skipping:
    """Of one reducer.

    hears_votes: a vote travels with the buckets.
    """

    def __init__(self, comm: Communicator, options: Options | None = None) -> None:
        """options: None where no rank votes, and nobody looks."""
        self._on_nonfinite = options is not None and options.skip_nonfinite
        # With hooks votes travel over NCCL, too, but hearing them waits for the device: that is
        # done only where skip_nonfinite waits anyway.
        has_hooks = options is not None and bool(options.hooks)
        self.hears_votes = comm.carries_votes or (has_hooks and self._on_nonfinite)
        self._comm, self._op = comm, "mean" if options is None else options.op
        self.n_skipped = 0  # rounds that were dropped
        self.n_blocks = 0  # of skip_on() around what runs now
        self.forget()

    def forget(self) -> None:
        """The reducer has no model any more, and no round."""
        # why this rank wants the round dropped that is open, or comes
        self.vote: str | None = None
        self._clear()

    def begin_round(self) -> None:
        """A round begins, or goes on after a signal handler has raised at its beginning."""
        if self._on_nonfinite and self._comm.has_streams:
            self._comm.refuse_capture("skip_nonfinite=True")
        self._clear()

    def _clear(self) -> None:
        self._is_judged, self._is_asking = False, False
        # Of this rank's own gradients in this round, by name:
        self._kept: list[tuple[str, Tensor]] = []  # as autograd has made them
        self._largest: list[tuple[Sequence[str], Tensor]] = []  # their largest absolute values
        self._found: dict[str, int] = {}  # see Cause
        self.is_skipped = False  # the last round was dropped,
        self.found_nonfinite = False  # because gradients were not finite

    def refuse_vote(self) -> None:
        """Raises FastcommError where a vote could not reach the other ranks."""
        if self.hears_votes:
            return
        if not self._on_nonfinite:
            raise FastcommError(
                f"over {self._comm.backend} a vote to skip travels as a NaN, which nobody looks "
                "for: make the reducer with skip_nonfinite=True, on every rank"
            )
        if self._op not in ("sum", "mean"):
            raise FastcommError(
                f"over {self._comm.backend} a vote to skip travels as a NaN, which op {self._op} "
                "may lose: use op sum or mean"
            )

    def cast_vote(self, why: str) -> None:
        """This rank wants the round dropped that is open, or else the next one."""
        watch_scalers()
        if self.vote is None:
            self.vote = why

    # -- what a round asks -------------------------------------------------------------------------

    @property
    def inspects(self) -> bool:
        """Whether this rank's own gradients are to be seen before they are reduced."""
        return self._on_nonfinite

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
        at_home = set(inside(list(gradients)))  # in flat buffers, which the reduction overwrites
        for i, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            if i not in at_home:
                self._kept.append((name, gradient))
            elif not norms.screened(gradient).isfinite():
                self._found |= _counted(name, gradient)

    def judge(self, buckets: Sequence[Bucket]) -> bool:
        """Whether the round, whose buckets are reduced, is to be dropped: the same on all ranks. A
        second call gives the same answer. Collective if the round is dropped.
        """
        if not self._is_judged:
            if self._is_asking:  # a signal handler has raised while the ranks talked
                raise RuntimeError("the ranks cannot tell each other why a round is dropped")
            voted = self.hears_votes and any(bucket.is_skipped() for bucket in buckets)
            self._is_asking = True
            n_nonfinite = 0
            if self._on_nonfinite and not voted:
                n_nonfinite = norms.n_left_nonfinite(buckets, self._comm)
            if voted or n_nonfinite:
                self._conclude(n_nonfinite)
            self.is_skipped, self._is_judged = voted or n_nonfinite > 0, True
            self._kept, self._largest = [], []
        return self.is_skipped

    def _conclude(self, n_nonfinite: int) -> None:
        """The round is dropped: lets the ranks tell each other why."""
        watch_scalers()
        self.n_skipped += 1
        if is_joining(self._comm):  # where a rank without data cannot gather objects: each logs
            self.found_nonfinite = n_nonfinite > 0
            causes = {self._comm.rank: self._cause()}
        else:
            told = gather_objects(self._comm, self._cause(), "backward() or synchronize()")
            causes = dict(enumerate(told))
            self.found_nonfinite = all(cause.vote is None for cause in causes.values())
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
