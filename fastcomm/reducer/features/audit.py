"""Audit: every so many rounds, whether parameters have the same bits on all ranks.

Ranks that have the same parameters and reduce the same gradients keep the same parameters. A rank
whose memory, processor or link has flipped a bit has others from then on, and so does one whose
script has changed a parameter by itself. Nothing else notices all of it: what each bucket carries
are a few elements (collective.fingerprint_of), and over NCCL nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError
from fastcomm.reducer.defer_signals import all_or_none

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Audit:
    """Compares the parameters of a reducer after every round whose number is a multiple of `every`,
    before anybody uses its gradients.
    """

    def __init__(self, comm: Transport, every: int) -> None:
        self._comm, self._every = comm, every
        self._compared = 0  # the round that was compared last
        self._trouble: str | None = None  # what it has found, until that is raised

    def compare(self, core: Core) -> None:
        """A round has ended. Collective if it is one of those. Where something differs, drops its
        gradients on every rank. May be called again after a signal handler has raised in it.
        """
        if self._comm.has_streams:
            self._comm.refuse_capture("audit")
        is_done = self._compared == core.n_rounds
        if not (is_done or core.n_rounds % self._every or self._comm.open_join):
            with all_or_none(self._comm):
                self._trouble = self._compare(core)
                self._compared = core.n_rounds
                if self._trouble is not None:  # here, as a signal may raise where the block ends
                    core.drop_step()

    def raise_trouble(self) -> None:
        """Raises MismatchError for what the comparison has found, once: after all that the ranks do
        together.
        """
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise MismatchError(trouble)

    def _compare(self, core: Core) -> str | None:
        """What is wrong, in words, the same on all ranks."""
        named = [pair for bucket in core.buckets for pair in bucket.named_parameters()]
        own = torch.stack([checksum(parameter) for _, parameter in named])
        told = own.new_empty(self._comm.world_size * own.numel())
        self._comm.all_gather_single(told, own)
        ranks = on_host(self._comm, told).view(-1, own.numel())
        differing = (ranks != ranks[0]).any(0).nonzero().flatten().tolist()
        if not differing:
            return None
        names = [named[i][0] for i in differing]
        return _in_words(names, ranks[:, differing], core.n_rounds)


def checksum(tensor: Tensor) -> Tensor:
    """The wrapping sum of a tensor's words, of its elements' size: any single flipped bit changes
    it. One pass over memory.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().contiguous().view(_WORDS[real.element_size()]).sum(dtype=torch.int64)


def _in_words(names: Sequence[str], ranks: Tensor, number: int) -> str:
    """names: of what differs. ranks: its checksums, one row a rank."""
    rows = [tuple(row) for row in ranks.tolist()]
    ((most, n_most),) = Counter(rows).most_common(1)
    others = [rank for rank, row in enumerate(rows) if row != most]
    who = (
        f"and {n_most} of {len(rows)} ranks agree, all but {', '.join(map(str, others))}"
        if n_most > len(rows) / 2
        else "and no majority of ranks agrees"
    )
    more = f" (nor are {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"audit in round {number}: parameter {names[0]} is not the same on all ranks{more}, {who}. "
        "A bit flipped (in memory, on a processor or on a link), the script changed it on some "
        "ranks only, or the ranks round differently (other processors, threads or torch). All "
        "ranks drop this round's gradients. Load an earlier checkpoint, or call refresh() on every "
        "rank if rank 0's values are right"
    )
