"""ReducedGradients: what a reducer makes of gradients that are reduced: optimizers' steps, norms,
clipping and counts; and what it does for the model beside its gradients. Base class of Reducer.

Decides in one place whether gradients are reduced. How rounds begin and end is reducer.py.
"""

from __future__ import annotations

import abc
import math
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fastcomm.comm.collective import buffers_label
from fastcomm.comm.communicator import Communicator
from fastcomm.errors import FastcommError
from fastcomm.reducer import agreement, norms
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.gradient_hook import ReducerFlags
from fastcomm.reducer.local_steps import LocalSteps
from fastcomm.reducer.model import Model
from fastcomm.reducer.optimizer_steps import Share, shares_in
from fastcomm.reducer.round import Round
from fastcomm.reducer.shares import ShardedBy
from fastcomm.reducer.skipping import Skipping
from fastcomm.reducer.tripwires import Tripwires


class ReducedGradients(ReducerFlags):
    """The part of a reducer that comes after its rounds."""

    comm: Communicator
    number: int
    n_rounds: int
    sharded_by: ShardedBy
    local_steps: LocalSteps
    _buckets: list[Bucket]
    _n_steps: int
    record: int
    _compares_steps: bool
    _last_stepped: list[Share]
    _round: Round | None
    _skipping: Skipping
    _tripwires: Tripwires

    @abc.abstractmethod
    def synchronize(self) -> None:
        """See Reducer."""

    @abc.abstractmethod
    def _attached_model(self) -> Model:
        """Raises ValueError if there is none."""

    def shares_of(self, parameters: Sequence[Tensor]) -> list[Share]:
        """See optimizer_steps.Steppable."""
        return shares_in(self._buckets, parameters)

    def before_step(
        self, optimizer: torch.optim.Optimizer, shares: list[Share], since: int | None
    ) -> None:
        """See optimizer_steps.Steppable."""
        self.sharded_by.before_step(optimizer)
        self.synchronize()
        if self.local_steps.meetings is not None:
            self.local_steps.meetings.before_step()
        if not self.skipped:
            chosen = ((self._buckets[number], slots) for number, slots in shares)
            self._require_reduced(chosen, since)
        if self.recorder is not None:
            self.recorder.begin_optimizer()

    def after_step(self, shares: list[Share] | None) -> None:
        """See optimizer_steps.Steppable."""
        if self.recorder is not None:
            self.recorder.end_optimizer()
        if shares is None or self.skipped:
            return  # nor does a rank count it that leaves out its optimizer's step
        if self.local_steps.meetings is not None:
            self.local_steps.meetings.after_step(shares)
            return
        self._n_steps += 1
        self._note_stepped(shares)
        compares = self._compares_steps and self.sharded_by.sharding() is None
        for number, slots in shares:
            self._buckets[number].provenance.note_stepped(slots, self.n_rounds)
            if compares and slots:
                self._buckets[number].note_step(self.n_rounds)

    def _note_stepped(self, shares: list[Share]) -> None:
        """Adds to the record which parameters were stepped, unless all were: in any order."""
        self._last_stepped = shares
        n_all = sum(len(bucket.names) for bucket in self._buckets)
        if sum(len(slots) for _, slots in shares) != n_all:
            self.record += zlib.crc32(str([tuple(share) for share in shares]).encode())

    def _last_in_words(self) -> str:
        """For messages: what this rank has stepped last."""
        slots = [(self._buckets[number], i) for number, held in self._last_stepped for i in held]
        names = [bucket.names[i] for bucket, i in slots]
        return (
            f"rank {self.comm.rank} has last stepped "
            f"{f'{len(names)} parameters, {names[0]} ... {names[-1]}' if names else 'none'}. Where "
            "records differ, the ranks have stepped different parameters (two optimizers, of which "
            "each rank chooses its own), have not called clip_grad_norm_() alike (on every rank, "
            "with the same max_norm), or their parameters differ: a rank has stepped gradients "
            "that no round has reduced (of no_sync()), has another learning rate, has changed "
            "gradients after backward or parameters by itself. check_in_sync() names the first "
            "that differs; refresh() copies rank 0's"
        )

    def _require_reduced(
        self, chosen: Iterable[tuple[Bucket, list[int] | None]], since: int | None = None
    ) -> None:
        """The gradients in these slots, all of a bucket's if None, are reduced when this returns:
        the one place that decides it. Raises FastcommError naming one that is not.
        """
        self.synchronize()
        if self.steps_alone:
            return  # each rank uses its own
        for bucket, slots in chosen:
            bucket.refuse_unreduced(slots, since)

    @property
    def skipped(self) -> bool:
        """Whether all ranks drop the last step: see skip_step() and skip_nonfinite. For schedulers.
        True from the verdict, or from this rank's vote, until the next reduction begins.
        """
        is_dropped = self._skipping.is_skipped or self._skipping.vote is not None
        return is_dropped and self.local_steps.meetings is None

    @property
    def n_skipped(self) -> int:
        """How many steps all ranks have dropped so far."""
        return self._skipping.n_skipped

    @property
    def skipped_nonfinite(self) -> bool:
        """See optimizer_steps.Steppable."""
        return self._skipping.found_nonfinite

    def _refuse_late_vote(self) -> None:
        """Raises FastcommError if other ranks may step already."""
        if self._round is None:
            # once there are steps, a parameter without any has no optimizer
            is_late = any(bucket.has_unstepped(not self._n_steps) for bucket in self._buckets)
        else:
            is_late = self._round.must_finish
        if is_late:
            raise FastcommError(
                f"skip_step() came too late on rank {self.comm.rank}: the gradients are reduced, "
                "and other ranks may step with them. Call it before backward() ends; to drop what "
                "is reduced, by a number that is equal on all ranks (grad_norm()), leave out the "
                "optimizer's step on every rank, and call zero_grad(). If they are left from the "
                "backward of another model's loss (a GAN's generator), call zero_grad() first, and "
                "skip_step() then"
            )

    def grad_norm(self) -> Tensor:
        """The 2-norm of all reduced gradients together, as they are now: a scalar tensor, equal on
        all ranks. Of 16-bit gradients it is taken in float32, or wider. Raises FastcommError for
        gradients that nothing has reduced.

        Does not synchronise with the device: over NCCL it is one pass over each bucket, as
        GradScaler and others change gradients unseen. Over shared memory, from the round after the
        first call on, it comes out of the reduction, unless gradients were written since; writes
        past torch (.data, NumPy) are noticed if they change all of a gradient.
        """
        self._require_all_reduced()
        return norms.norm(self._buckets, self.comm)

    def _require_all_reduced(self) -> None:
        self._attached_model()
        self._tripwires.raise_refusal()
        self._require_reduced((bucket, None) for bucket in self._buckets)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`. Returns the norm before,
        as torch.nn.utils.clip_grad_norm_. Raises as grad_norm().

        Every rank calls it, with the same number, or none: where ranks differ, the next reduction
        raises MismatchError, but for NCCL's.
        """
        if max_norm <= 0:
            raise ValueError(f"max_norm must be positive; got {max_norm}")
        self._require_all_reduced()
        if math.isfinite(max_norm) and not self.skipped and not self.steps_alone:
            self.record += zlib.crc32(f"clip {float(max_norm)}".encode())
        return norms.clip_(self._buckets, max_norm, self.comm)

    def nonfinite_count(self) -> Tensor:
        """How many elements of the reduced gradients are infinite or NaN: an int64 scalar tensor,
        equal on all ranks. Of a complex element, each part counts. Raises as grad_norm().
        """
        self._require_all_reduced()
        return norms.nonfinite_count(self._buckets, self.comm)

    def sync_buffers(self, src: int = 0) -> None:
        """Copies rank `src`'s buffers (batch-norm statistics) to the others. Collective."""
        model = self._attached_model()
        if isinstance(model, nn.Module):
            agreement.broadcast(self.comm, list(model.buffers()), src, buffers_label(self.number))

    def check_in_sync(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Compares the bits of all parameters and buffers over the ranks, and of an optimizer's
        state and options if it is given. Collective. Raises MismatchError, on every rank, naming
        the first that differs and the ranks. Waits for the device.
        """
        self.local_steps.refuse_comparison(self.comm)
        kind = self.sharded_by.described(optimizer)
        agreement.check_model_in_sync(self.comm, self._attached_model(), optimizer, kind)
        self.sharded_by.compare_state(optimizer)
