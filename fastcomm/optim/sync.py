"""Sync: buckets of a reducer that are averaged over the ranks while each rank steps by itself.

A sync is a Round on the buckets' own views, which hold no gradients meanwhile, so it travels as
gradients do: in the reducer's wire dtype, over any transport, abandoned and interrupted alike. It
also compares how many steps the ranks have made. Changes no parameter: what is done with the mean
is local_sgd.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.defer_signals import defer_signals
from fastcomm.reducer.round import Round, State

ALL = -1  # in place of a fragment's number: every fragment that has not synced at this step

_NOTE = "fastcomm: the ranks have synced; this one takes what they agreed on, as the others do"


class Standing(NamedTuple):
    """What must be equal on all ranks that sync. n_syncs: how many are over. fragment: its
    number, or ALL.
    """

    n_steps: int
    n_syncs: int
    fragment: int

    def __str__(self) -> str:
        what = "all fragments" if self.fragment == ALL else f"fragment {self.fragment}"
        return f"{what} after {self.n_steps} steps and {self.n_syncs} syncs"


class Sync:
    """One sync, from its launch until the mean lies in the buckets' views.

    buckets: may be none; then ranks only compare their standings.
    """

    def __init__(self, comm: Transport, buckets: Sequence[Bucket], standing: Standing) -> None:
        self.buckets, self.standing = buckets, standing
        self._comm = comm
        self._round = Round(comm, buckets, "mean", 1, standing.n_steps, note=_NOTE)
        self._is_agreed: bool | None = None  # whether the views hold the mean; None: ask the round
        n_rows, n_columns = comm.world_size, len(standing)
        self._own = torch.tensor(standing, dtype=torch.int64, device=comm.device)
        self._all = torch.empty(n_rows * n_columns, dtype=torch.int64, device=comm.device)

    @property
    def is_over(self) -> bool:
        """Whether it was reduced, or has failed."""
        return self._is_agreed is not None or self._round.is_over

    @property
    def is_reduced(self) -> bool:
        """Whether the views hold the mean."""
        if self._is_agreed is not None:
            return self._is_agreed
        return self._round.state is State.SETTLED

    def launch(self, fill: Callable[[Bucket], None]) -> None:
        """Compares the ranks' standings, writes what is averaged into the views of all buckets, by
        `fill`, and launches them.

        Raises what ends the sync; the other ranks hear of it. What a signal handler raises does
        not end it once the other ranks count on this one.
        """
        self._compare()
        if self.is_over:
            return
        try:
            with _gradients_aside(self.buckets):
                for bucket in self.buckets:
                    fill(bucket)
                    bucket.take_views()
                self._round.count_all()
                self._round.commit()
        except BaseException as error:
            if isinstance(error, FastcommError) or not self._round.is_committed:
                self._leave(error)
            raise

    def _compare(self) -> None:
        """Raises MismatchError on all ranks alike, so that none has to tell the others."""
        try:
            self._comm.all_gather_single(self._all, self._own)
            found = self._difference()
        except FastcommError:
            self._is_agreed = False
            raise
        except BaseException as error:
            self._leave(error)
            raise
        if found is not None or not self.buckets:
            self._is_agreed = found is None
        if found is not None:
            raise found

    def _leave(self, error: BaseException) -> None:
        with _gradients_aside(self.buckets):
            self._round.abort(error)

    def finish(self) -> BaseException | None:
        """Waits until the views hold the mean. Returns what a signal handler has raised meanwhile,
        since the other ranks have the mean, too. May be called again.

        Raises what ends the sync: FastcommError.
        """
        if self.is_over:
            return None
        interruption = None
        try:
            with _gradients_aside(self.buckets):
                self._round.finish()
        except BaseException as error:
            if not self.is_reduced:
                raise
            interruption = error
        if self._comm.has_streams:
            late = self._await_device()
            interruption = interruption or late
        for bucket in self.buckets:
            bucket.gradient_state.forget_rounds()
        return interruption

    def _await_device(self) -> BaseException | None:
        """Over NCCL, where a rank may abandon what the host has long finished. Parameters would
        take half of a sum for the mean. Raises and returns as finish().
        """
        interruption = None
        while self._is_agreed is None:
            try:
                with defer_signals(), _gradients_aside(self.buckets):
                    self._is_agreed = False
                    on_host(self._comm, self._own)  # the copy waits for what was ordered before it
                    self._is_agreed = True
            except BaseException as error:
                if self._is_agreed is False:
                    raise
                interruption = error
        return interruption

    def _difference(self) -> MismatchError | None:
        """How the ranks' standings differ; None if they do not. Waits for the device."""
        rows = on_host(self._comm, self._all).view(self._comm.world_size, -1).tolist()
        if all(row == rows[0] for row in rows):
            return None
        places = "; ".join(f"rank {rank}: {Standing(*row)}" for rank, row in enumerate(rows))
        return MismatchError(
            f"the ranks do not sync at the same step: {places}. Let all ranks make as many steps; "
            "count_step() counts one that a rank leaves out. No parameter was changed"
        )


@contextlib.contextmanager
def _gradients_aside(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Gives all parameters their gradients back at the end, whatever becomes of .grad inside the
    block. Gradients that lie in the buckets' views are moved out of them first.
    """
    kept: list[tuple[Tensor, Tensor | None]] = []
    for bucket in buckets:
        bucket.vacate()
        kept += [(parameter, parameter.grad) for _, parameter in bucket.named_parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            # torch refuses one that does not fit its parameter any more
            with contextlib.suppress(RuntimeError):
                parameter.grad = gradient
