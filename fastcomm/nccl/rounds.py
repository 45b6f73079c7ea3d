"""How a round over NCCL begins where ranks do not count alike: a small all-reduce of what each has.

NCCL announces nothing: ranks with data tell those without, in the same all-reduce, which reducer's
buckets come next.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fastcomm.collective import BUCKETS_PER_REDUCER, WEIGHTED_OPS
from fastcomm.communicator import Weight, Work
from fastcomm.errors import FastcommError
from fastcomm.nccl.bucket import NcclBucket, NcclWeight

_POLL_S = 50e-6


class Sharing(Protocol):
    """An NcclCommunicator, as the beginning of a round sees it."""

    device: torch.device
    reduces_buckets_only: bool

    @property
    def buckets(self) -> Iterable[NcclBucket]: ...
    def is_captured(self) -> bool: ...
    def add_up(self, numbers: Tensor) -> Work: ...
    def check(self) -> None: ...


def refuse_in_join(comm: Sharing) -> None:
    """Raises FastcommError for a collective that a rank without data would not hear of."""
    if comm.reduces_buckets_only:
        raise FastcommError(
            "over NCCL ranks inside join() reduce gradients alone, as a rank without data would "
            "not hear of another collective: make it before or after the block"
        )


def share_weight(comm: Sharing, weight: Weight, reducer: int | None = None) -> NcclWeight:
    """See Communicator.share_weight. The host waits for nothing."""
    if comm.is_captured():
        raise FastcommError(
            "a CUDA graph would replay the weight of its capture: capture a step without "
            "set_weight()"
        )
    if reducer is None:
        said = torch.full((1,), weight.total, dtype=torch.float64, device=comm.device)
    else:
        said = _said(comm, weight.total, 1, reducer)
    return NcclWeight(weight.scale, said, comm.add_up(said))


def shadow(comm: Sharing) -> bool:
    """See Communicator.shadow. Of a whole round. Waits for the device, which waits for the ranks
    with data.
    """
    said = _said(comm, 0.0, 0, 0)
    adding_up = comm.add_up(said)
    while not adding_up.is_completed():
        comm.check()
        time.sleep(_POLL_S)
    adding_up.wait()  # raises what may have ended it
    _, n_ranks, sum_of_numbers = said.tolist()
    if not n_ranks:
        return True
    reducer = round(sum_of_numbers / n_ranks)
    own = [one for one in comm.buckets if one.label // BUCKETS_PER_REDUCER == reducer]
    weight = NcclWeight(0.0, said, adding_up)
    for bucket in sorted(own, key=lambda one: one.label):
        nothing = range(bucket.clear())
        bucket.launch(WEIGHTED_OPS["mean"], list(nothing), 0, weight).wait()
    return False


def _said(comm: Sharing, weight: float, n_ranks: int, reducer: int) -> torch.Tensor:
    """What a rank says in a join(): its weight, and if it has data, which reducer's round it is."""
    row = [weight, n_ranks, n_ranks * reducer]
    return torch.tensor(row, dtype=torch.float64).to(comm.device, non_blocking=True)
