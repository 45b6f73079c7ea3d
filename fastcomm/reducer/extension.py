"""RoundExtension: what a feature of a reducer may do beside its rounds and its optimizers' steps.

A reducer asks the extensions that are installed, in the order in which they came, and nothing of
features that nobody uses. Every method here does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from fastcomm.comm.communicator import ProcessBound
from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from fastcomm.comm.transport import Transport
    from fastcomm.reducer.features.compatibility import Feature
    from fastcomm.reducer.optimizer_hooks import SteppedSlots
    from fastcomm.reducer.round import Round


class RoundExtension(ProcessBound):
    """Base class of features. What a method raises drops the round on all ranks, if one is open."""

    n_skipped = 0  # steps that all ranks have dropped
    shards = False  # it is that of a ShardedOptimizer (optim/sharded.py)
    steps_alone = False  # it is that of LocalSGD or DiLoCo (optim/local_sgd.py)

    @property
    def votes(self) -> bool:
        """Whether this rank votes to drop the round that is open, or comes next."""
        return False

    @property
    def awaits_round(self) -> bool:
        """Whether something was said for a round that has not come."""
        return self.votes

    @property
    def skips_step(self) -> bool:
        """Whether all ranks drop the last step, as far as the extension knows."""
        return False

    def features(self) -> Mapping[Feature, str]:
        """What the reducer is used with because of the extension, and a word for it in messages."""
        return {}

    def use(self, comm: Transport) -> None:
        """The ranks have met again, as this communicator."""

    def before_round(self, round: Round) -> None:
        """A round is about to open. May set how it is reduced. No rank knows of it yet."""

    def skips_round(self, round: Round) -> bool:
        """Decide, when all buckets are reduced, whether all ranks drop the round. The answer must
        be the same on all ranks, and at each call.
        """
        return False

    def keeps_open(self, round: Round) -> bool:
        """Decide, when an exception has ended the backward, whether the extension ends the round
        later. Else the round is aborted now.
        """
        return False

    def survives(self, error: FastcommError) -> bool:
        """Decide whether the training goes on in spite of an error. Then it is not raised, and the
        round is dropped, if one is open.
        """
        return False

    def after_round(self, round: Round) -> None:
        """The round is over; round.state tells how. Called again after an interruption."""

    def before_norm(self) -> None:
        """A norm of the reduced gradients is about to be taken."""

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step parameters of the reducer. No gradient is reduced yet."""

    def after_step(self, stepped: list[SteppedSlots]) -> None:
        """An optimizer has stepped these parameters of the reducer."""

    def forget(self) -> None:
        """What was to come into the next round is dropped: the step was abandoned between rounds,
        a join() has ended, or the reducer has let go of its model and its buckets.
        """
