"""The ranks' timelines put together: which rounds all of them have, and who was last.

Collective where a communicator is an argument; the rest reads what was gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcomm.comm.objects import gather_objects
from fastcomm.comm.transport import Transport
from fastcomm.insight.clock import offsets_to_rank_0
from fastcomm.insight.steps import BucketPlan, Step


@dataclass(frozen=True)
class Joined:
    """All ranks' steps, on rank 0's clock.

    what: the reducer, in words. plan: what each bucket holds. ranks: by rank, the oldest step
    first.
    """

    what: str
    plan: tuple[BucketPlan, ...]
    ranks: tuple[tuple[Step, ...], ...]

    def rounds(self) -> list[tuple[Step, ...]]:
        """The steps of each round that all ranks have recorded, by rank; the oldest first."""
        by_number = [
            {step.number: step for step in steps if step.has_round} for steps in self.ranks
        ]
        common = set(by_number[0]).intersection(*by_number)
        return [tuple(steps[number] for steps in by_number) for number in sorted(common)]


def join(
    comm: Transport, what: str, plan: tuple[BucketPlan, ...], steps: Sequence[Step], call: str
) -> Joined:
    """Gathers what the ranks have recorded. Collective. call: the user's, for messages."""
    offsets = offsets_to_rank_0(comm, call)
    gathered = gather_objects(comm, [one.shifted(offsets[comm.rank]) for one in steps], call)
    return Joined(what, plan, tuple(map(tuple, gathered)))


def last_to_launch(steps: Sequence[Step], bucket: int) -> int:
    """The rank that was last to launch the bucket in a round, for which the others waited."""
    return max(range(len(steps)), key=lambda rank: steps[rank].buckets[bucket].launch)


def waited_ns(steps: Sequence[Step], rank: int) -> int:
    """How long all other ranks have waited for the last bucket because of this one: since the next
    to last of them has launched it.
    """
    if len(steps) == 1 or last_to_launch(steps, -1) != rank:
        return 0
    launches = sorted(step.buckets[-1].launch for step in steps)
    return launches[-1] - launches[-2]
