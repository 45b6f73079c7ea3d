"""Stragglers: which rank the others wait for, in which phase of a step, and what it costs.

Every rank sums up how long its phases take. From time to time the ranks tell each other, after a
round. A rank that is late does not wait for the reduction, and the others do: so the time that a
rank spends on all but waiting tells the culprit from its victims, without a common clock. Over NCCL
it is the device that waits: there the phases of some rounds are measured on its stream.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fastcomm.comm.objects import gather_numbers, on_host
from fastcomm.comm.transport import Transport
from fastcomm.insight.forward import watch_forward
from fastcomm.insight.recorder import (
    BACKWARD,
    FORWARD,
    NAMES,
    OPTIMIZER,
    OTHER,
    UNWATCHED,
    WAITING,
    Phases,
)

FIRST_ROUNDS = 16  # after which the ranks tell each other for the first time
LEAST_ROUNDS, MOST_ROUNDS = 8, 1000  # between two tellings
WINDOW_S = 2.0  # that lie about so far apart
LEAST_SHARE = 0.05  # of a step, that a straggler is late by
# Rank 0 warns from this share of a step and this many ms on, after so many windows in a row.
WARNING_SHARE, WARNING_WINDOWS, WARNING_MS = 0.1, 3, 1.0
_log = logging.getLogger("fastcomm")


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    phase: where it is late most: "data and other", "forward", "backward" or "optimizer"; "data,
        forward and other" if no forward is seen.
    late_ms: how much longer its step takes, without waiting, than the median of the other ranks.
    step_ms: the time of a step.
    share: how much shorter every step would be, as a fraction, if this rank were as fast as the
        next slowest one.
    """

    rank: int
    phase: str
    late_ms: float
    step_ms: float
    share: float

    @property
    def is_worth_a_warning(self) -> bool:
        return self.share >= WARNING_SHARE and self.share * self.step_ms >= WARNING_MS

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is late by {self.late_ms:.1f} ms in a step of {self.step_ms:.1f} "
            f"ms, most of it in {self.phase}; it costs all ranks {self.share:.0%} of their time"
        )


class Stragglers:
    """Of one reducer.

    due_at: the number of rounds at whose end the ranks tell each other next; equal on all ranks.
    newest: the stragglers of the steps that were told of last; equal on all ranks.
    """

    def __init__(self) -> None:
        self.phases = Phases()
        self.newest: list[Straggler] = []
        self._handles: list[RemovableHandle] = []
        self._watches = False  # the forward, of any model that is attached
        self._n_windows = 0  # in a row, in which the same rank has cost so much
        self._warned_of: int | None = None

    def use(self, comm: Transport) -> None:
        """Tell the ranks of this communicator, from begin() on."""
        self._comm, self.newest, self.due_at = comm, [], sys.maxsize
        self._n_windows, self._warned_of = 0, None  # ranks have other numbers

    def begin(self, n_rounds: int) -> None:
        """Sum up anew, when so many rounds have ended, on all ranks."""
        self.due_at = n_rounds + FIRST_ROUNDS if self._comm.world_size > 1 else sys.maxsize
        self._began_at = n_rounds
        self.phases.take()
        self.phases.measure(None)

    def follow(self, model: object) -> None:
        """This model is hooked up."""
        if self._watches and not self._handles and isinstance(model, nn.Module):
            self._handles = watch_forward(model, self.phases)

    def release(self) -> None:
        """The model is not hooked up any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def watch(self, model: object) -> None:
        """Watches the forward from now on: of this model, which is hooked up, and of later ones."""
        self._watches = True
        self.follow(model)

    def tell(self, n_rounds: int, *beside: float) -> list[list[float]]:
        """Called when due: tells the other ranks what this one's steps took. Collective; but over
        NCCL each second call only begins to measure, and returns nothing. beside: what else to
        tell. Returns that of every rank, by rank.
        """
        comm = self._comm
        if comm.has_streams and not self._has_measured(n_rounds):
            return []
        n = n_rounds - self._began_at
        sees_forward = self.phases.sees_forward
        spent: Sequence[float]
        if comm.has_streams:
            on_host(comm, torch.zeros(1, dtype=torch.int8, device=comm.device))
            spent = self.phases.take_measured()  # all marks are reached by now
        else:
            spent = self.phases.take()
        own = [*(ns / n for ns in spent), sees_forward, *beside]
        told = gather_numbers(comm, own, torch.float64)
        ranks = [one[: len(spent) + 1] for one in told]
        step_s = sum(ranks[0][:-1]) / 1e9
        wanted = int(WINDOW_S / step_s) if step_s > 0 else MOST_ROUNDS
        self._began_at = n_rounds
        self.due_at = n_rounds + min(max(wanted, LEAST_ROUNDS), MOST_ROUNDS)
        last = self.newest
        self.newest = find([one[:-1] for one in ranks], all(one[-1] for one in ranks))
        if not self.newest or not self.newest[0].is_worth_a_warning:
            self._n_windows, self._warned_of = 0, None
        elif last and last[0].rank == self.newest[0].rank:
            self._n_windows += 1
        else:
            self._n_windows = 1
        return [one[len(spent) + 1 :] for one in told]

    def _has_measured(self, n_rounds: int) -> bool:
        """Whether the rounds since the last call were measured on the device. If not, begins to.
        Once a CUDA graph was captured, nothing is told any more: its replays count no rounds, and
        other ranks may run theirs without one.
        """
        if self._comm.has_captured:
            self.due_at = sys.maxsize
            self.phases.measure(None)
            return False
        if not self.phases.is_measured:
            self.phases.take()
            self.phases.measure(self._comm.mark)
            self._began_at, self.due_at = n_rounds, n_rounds + FIRST_ROUNDS
            return False
        return True

    def warn(self) -> None:
        """Logs on rank 0, once, who stays late. A handler that fails costs no step."""
        if self._n_windows >= WARNING_WINDOWS and self._warned_of != self.newest[0].rank:
            self._warned_of = self.newest[0].rank
            if self._comm.rank == 0:
                with contextlib.suppress(Exception):
                    _log.warning("%s (see reducer.stragglers())", self.newest[0])


def find(ranks: Sequence[Sequence[float]], sees_forward: bool) -> list[Straggler]:
    """ranks: by rank, the ns of a step in each phase, NaN where it is unknown. Those that are late,
    what costs most first. sees_forward: all ranks have watched it.
    """
    if any(map(math.isnan, itertools.chain(*ranks))):
        return []
    working = [sum(one) - one[WAITING] for one in ranks]
    step = statistics.median(map(sum, ranks))
    found = []
    for rank, own in enumerate(working):
        others = working[:rank] + working[rank + 1 :]
        late = own - statistics.median(others)
        if late >= LEAST_SHARE * step > 0:
            share = max(0.0, own - max(others)) / step
            phase = _latest_phase(ranks, rank, sees_forward)
            found.append(Straggler(rank, phase, late / 1e6, step / 1e6, share))
    return sorted(found, key=lambda one: (-one.share, -one.late_ms))


def _latest_phase(ranks: Sequence[Sequence[float]], rank: int, sees_forward: bool) -> str:
    """In words: the one that exceeds the median of the other ranks' most."""

    def late_in(phases: tuple[int, ...]) -> float:
        spent = [sum(one[phase] for phase in phases) for one in ranks]
        return spent.pop(rank) - statistics.median(spent)

    before = [(OTHER,), (FORWARD,)] if sees_forward else [(OTHER, FORWARD)]
    latest = max([(BACKWARD,), (OPTIMIZER,), *before], key=late_in)
    return NAMES[latest[0]] if len(latest) == 1 else UNWATCHED
