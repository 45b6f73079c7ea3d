"""LocalSteps, the base of LocalSGD and DiLoCo: each rank of a reducer steps by itself, and syncs.
Refuses what needs reduced gradients.
"""

from __future__ import annotations

from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError
from fastcomm.reducer import validation
from fastcomm.reducer.extension import RoundExtension


class LocalSteps(RoundExtension):
    """Installed in a reducer while its ranks step by themselves."""

    instead = ", and save its state_dict()"

    @property
    def name(self) -> str:
        """For the reducer: how the ranks sync, in messages: "LocalSGD"."""
        return type(self).__name__

    @property
    def is_agreed(self) -> bool:
        """For the reducer: whether all parameters are agreed on since this rank's last step."""
        raise NotImplementedError

    def refuse(self, what: str) -> None:
        """For the reducer: raises FastcommError for a call that is of no use while ranks step by
        themselves.
        """
        raise FastcommError(
            f"{what} was called while {self.name} lets each rank step with its own gradients: "
            "call its finish() first, on every rank"
        )

    def refuse_comparison(self, comm: Transport) -> None:
        """For the reducer: raises FastcommError, on every rank, if one has made steps of its own
        since all ranks have synced. Collective.
        """
        problem = None
        if not self.is_agreed:
            problem = FastcommError(
                f"it has made steps of its own since the ranks synced: call sync() of {self.name} "
                "before you compare the ranks"
            )
        validation.compare(comm, problem, {}, validation.CHECK_IN_SYNC)
