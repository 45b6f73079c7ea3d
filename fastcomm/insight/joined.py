"""The ranks' timelines put together on one clock: which rounds all of them have, and who was last.

Ranks of one host have one CLOCK_MONOTONIC; between hosts the differences are estimated. Collective
where a communicator is an argument; the rest reads what was gathered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastcomm.comm.objects import gather_numbers, gather_objects
from fastcomm.comm.transport import Transport
from fastcomm.insight.steps import BucketPlan, Step
from fastcomm.launching.bootstrap import host_identity

_N_MEETINGS = 16


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
    told = gather_objects(comm, (host_identity(), list(steps)), call)
    offsets = offsets_to_rank_0(comm, [host for host, _ in told], call)
    ranks = (
        tuple(step.shifted(offset) for step in theirs)
        for offset, (_, theirs) in zip(offsets, told, strict=True)
    )
    return Joined(what, plan, tuple(ranks))


def offsets_to_rank_0(comm: Transport, hosts: Sequence[str], call: str) -> list[int]:
    """By rank, the ns to add to its times, for rank 0's clock. Collective. hosts: by rank."""
    if len(set(hosts)) == 1:
        return [0] * comm.world_size
    spans = gather_objects(comm, [_meet(comm) for _ in range(_N_MEETINGS)], call)
    return [
        0 if host == hosts[0] else offset_between(spans[0], own)
        for host, own in zip(hosts, spans, strict=True)
    ]


def _meet(comm: Transport) -> tuple[int, int]:
    """When this rank came to a meeting of all ranks, and when it left."""
    before = time.monotonic_ns()
    gather_numbers(comm, [0])
    return before, time.monotonic_ns()


def offset_between(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """What to add to the second rank's clock to get the first one's. Both have noted when they came
    to the same meetings and left them: nobody leaves before the other has come, which bounds the
    difference from both sides. The tightest bounds count.
    """
    least = max(a[0] - b[1] for a, b in zip(first, second, strict=True))
    most = min(a[1] - b[0] for a, b in zip(first, second, strict=True))
    return (least + most) // 2


def last_to_launch(steps: Sequence[Step], bucket: int) -> int:
    """The rank that was last to launch the bucket in a round, for which the others waited."""
    return max(range(len(steps)), key=lambda rank: steps[rank].buckets[bucket].launch)


def waited_ns(steps: Sequence[Step], rank: int) -> int:
    """For how long this rank alone was late with the last bucket, so that all others waited."""
    if len(steps) == 1 or last_to_launch(steps, -1) != rank:
        return 0
    launches = sorted(step.buckets[-1].launch for step in steps)
    return launches[-1] - launches[-2]
