"""LocalSteps: whether each rank of a reducer steps by itself, and what the reducer knows of the
LocalSGD or DiLoCo by which the ranks meet meanwhile. Refuses what needs reduced gradients.
"""

from __future__ import annotations

from typing import Protocol

from fastcomm.comm.communicator import Communicator
from fastcomm.errors import FastcommError
from fastcomm.reducer import agreement
from fastcomm.reducer.optimizer_steps import Share


class Meetings(Protocol):
    """A LocalSGD or a DiLoCo, as the reducer sees it."""

    @property
    def is_agreed(self) -> bool:
        """Whether all parameters have been agreed on since this rank's last step."""

    def before_step(self) -> None:
        """An optimizer is about to step parameters of the reducer. May raise FastcommError."""

    def after_step(self, shares: list[Share]) -> None:
        """An optimizer has stepped these parameters of the reducer, with this rank's gradients."""

    def let_go(self) -> None:
        """The reducer was detached. Does nothing where no meeting is under way; else waits for
        it, if the communicator still works.
        """


class LocalSteps:
    """Of one reducer. meetings: None where all ranks step together."""

    def __init__(self) -> None:
        self.meetings: Meetings | None = None

    @property
    def name(self) -> str | None:
        """In messages, how the ranks meet: "LocalSGD"; None where all ranks step together."""
        return None if self.meetings is None else type(self.meetings).__name__

    def refuse(self, what: str) -> None:
        """Raises FastcommError for a call that is of no use while ranks step by themselves."""
        if self.meetings is not None:
            raise FastcommError(
                f"{what} was called while {self.name} lets each rank step with its own gradients: "
                "call its finish() first, on every rank"
            )

    def refuse_comparison(self, comm: Communicator) -> None:
        """Raises FastcommError, on every rank, if one has made steps of its own since all ranks
        have met. Collective where ranks step by themselves.
        """
        if self.meetings is None:
            return
        problem = None
        if not self.meetings.is_agreed:
            problem = FastcommError(
                f"it has made steps of its own since the ranks met: call meet() of {self.name} "
                "before you compare the ranks"
            )
        agreement.compare(comm, problem, {}, [], agreement.CHECK_IN_SYNC)

    def end(self) -> None:
        """The reducer is detached: its ranks are never to meet."""
        meetings, self.meetings = self.meetings, None
        if meetings is not None:
            meetings.let_go()
