"""How a round over NCCL begins where ranks do not count alike: a small all-reduce of their weights.

NCCL announces nothing. So in a join() the same all-reduce tells the ranks without data which
reducer's buckets come next.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastcomm.comm.collective import BUCKETS_PER_REDUCER, WEIGHTED_OPS
from fastcomm.comm.transport import Part
from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from fastcomm.transports.nccl.communicator import NcclCommunicator

_POLL_S = 50e-6  # little beside a round; the rank has nothing else to do


def refuse_in_join(comm: NcclCommunicator) -> None:
    if comm.open_join is not None:
        raise FastcommError(
            "over NCCL ranks inside join() reduce gradients alone, as a rank without data would "
            "not hear of another collective: make it before or after the block"
        )


def refuse_vote(comm: NcclCommunicator, op: str, looks_for_nan: bool) -> None:
    if not looks_for_nan:
        raise FastcommError(
            "over nccl a vote to skip travels as a NaN, which nobody looks for: make the reducer "
            "with skip_nonfinite=True, on every rank"
        )
    if op not in ("sum", "mean"):
        raise FastcommError(
            f"over nccl a vote to skip travels as a NaN, which op {op} may lose: use op sum or mean"
        )


def begin_round(comm: NcclCommunicator, op: str, part: Part, reducer: int) -> Part:
    """Adds up the weights where the ranks have some, or may have no data."""
    is_joining = comm.open_join is not None
    if is_joining and comm.begun_after == comm.n_abandoned:
        raise FastcommError(
            "over NCCL one backward inside join() reduces for one reducer: freeze the "
            "parameters of the other by requires_grad_(False), or detach() what goes into it"
        )
    comm.end_round()
    if not is_joining and op not in WEIGHTED_OPS.values():
        return part
    if comm.is_captured():
        raise FastcommError(
            "a CUDA graph would replay the weight of its capture: capture a step without "
            "set_weight()"
        )
    if is_joining:
        comm.begun_after = comm.n_abandoned
        totals = _part_of_totals(comm, part.weight, 1, reducer)
    else:
        totals = torch.full((1,), part.weight, dtype=torch.float64, device=comm.device)
    return part._replace(total=(totals, comm.add_up(totals)))


def follow(comm: NcclCommunicator) -> bool:
    """Takes part in a whole round without gradients. Waits for the device, which waits for the
    ranks with data.
    """
    totals = _part_of_totals(comm, 0.0, 0, 0)
    adding_up = comm.add_up(totals)
    while not adding_up.is_completed():
        comm.check()
        time.sleep(_POLL_S)
    adding_up.wait()  # raises what may have ended it
    _, n_ranks, sum_of_numbers = totals.tolist()
    if not n_ranks:
        return True
    reducer = round(sum_of_numbers / n_ranks)
    own = [one for one in comm.buckets if one.label // BUCKETS_PER_REDUCER == reducer]
    part = Part(0.0, 0.0, total=(totals, adding_up))
    for bucket in sorted(own, key=lambda one: one.label):
        missing = list(range(bucket.clear()))
        bucket.launch(WEIGHTED_OPS["mean"], missing, 0, part).wait()
    return False


def _part_of_totals(comm: NcclCommunicator, weight: float, n_ranks: int, reducer: int) -> Tensor:
    """What a rank adds to the totals of a round in a join(): its weight and, if it has data, 1 and
    the reducer's number. float64, of shape (3,).
    """
    row = [weight, n_ranks, n_ranks * reducer]
    on_host = torch.tensor(row, dtype=torch.float64, device="cpu")
    return on_host.to(comm.device, non_blocking=True)
