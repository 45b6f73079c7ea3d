"""RoundExtension: what a feature of a reducer may do beside its rounds and its optimizers' steps.

A reducer asks the extensions that are installed, in the order in which they came, and nothing of
features that nobody uses. Every method here does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from fastcomm.comm.communicator import ProcessBound
from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from fastcomm.reducer.optimizer_hooks import SteppedSlots
    from fastcomm.reducer.round import Round


class RoundExtension(ProcessBound):
    """Base class of features. What a method raises drops the round on all ranks, if one is open."""

    def before_round(self, round: Round) -> None:
        """For the reducer: a round is about to open. May set how it is reduced. No rank knows of it
        yet.
        """

    def end_of_backward(self, round: Round) -> None:
        """For the reducer: all gradients are there, and the buckets that are left are about to be
        launched.
        """

    def verdict(self, round: Round) -> bool:
        """For the reducer: decide, when all buckets are reduced, whether all ranks drop the round.
        The answer must be the same on all ranks, and at each call.
        """
        return False

    def keeps_open(self, round: Round) -> bool:
        """For the reducer: decide, when an exception has ended the backward, whether the extension
        ends the round later. Else the round is aborted now.
        """
        return False

    def outlives(self, error: FastcommError) -> bool:
        """For the reducer: decide whether the training goes on in spite of an error. Then it is not
        raised, and the round is dropped, if one is open.
        """
        return False

    def after_round(self, round: Round) -> None:
        """For the reducer: the round is over; round.state tells how. Called again after an
        interruption.
        """

    def before_step(self, optimizer: Optimizer) -> None:
        """For the reducer: an optimizer is about to step parameters of the reducer. No gradient is
        reduced yet.
        """

    def after_step(self, stepped: list[SteppedSlots]) -> None:
        """For the reducer: an optimizer has stepped these parameters of the reducer."""

    def dropped(self) -> None:
        """For the reducer: what was to come into the next round is dropped: the step was abandoned
        between rounds, a join() has ended, or the reducer has let go of its model and its buckets.
        """


class LocalSteps(RoundExtension):
    """Base class of LocalSGD and DiLoCo: installed while each rank steps by itself."""

    instead = ", and save its state_dict()"

    @property
    def is_agreed(self) -> bool:
        """For the reducer: whether all parameters are agreed on since this rank's last step."""
        raise NotImplementedError
