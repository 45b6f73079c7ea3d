"""sync(): averages what LocalSGD and DiLoCo put into a reducer's buckets over the ranks.

A sync is a Round on the buckets' own views, which hold no gradients meanwhile. So it travels as
gradients do: in the reducer's wire dtype, over any transport, abandoned and interrupted alike. It
also compares how many steps the ranks have made. It changes no parameter: what is done with the
mean is local_sgd.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import FastcommError, MismatchError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.defer_signals import defer_signals
from fastcomm.reducer.round import Round, State

_NOTE = "fastcomm: the ranks have synced; this one takes what they agreed on, as the others do"


class Standing(NamedTuple):
    """What must be equal on all ranks that sync. n_syncs: how many are over."""

    n_steps: int
    n_syncs: int

    def __str__(self) -> str:
        return f"after {self.n_steps} steps and {self.n_syncs} syncs"


def sync(
    comm: Transport,
    buckets: Sequence[Bucket],
    fill: Callable[[Bucket], None],
    standing: Standing,
) -> BaseException | None:
    """Compares the ranks' standings, and leaves the mean of what `fill` writes into the views of
    the buckets there. Without buckets it only compares. Returns what a signal handler has raised
    meanwhile, if the other ranks have the mean, too.

    Raises what ends the sync, of which the other ranks learn: MismatchError, on every rank, for
    standings that differ.
    """
    reduction = Round(comm, buckets, "mean", 1, standing.n_steps, note=_NOTE)
    trouble = interruption = None
    try:
        trouble = _compare(comm, standing)
        if trouble is None and buckets:
            with _gradients_aside(buckets):
                for bucket in buckets:
                    fill(bucket)
                    bucket.take_views()
                reduction.count_all()
                reduction.finish()
    except BaseException as error:
        if not buckets or reduction.state is not State.SETTLED:
            with _gradients_aside(buckets):
                reduction.abort(error)
            raise
        interruption = error
    if trouble is not None:
        raise trouble
    if buckets and comm.has_streams:
        interruption = _await_device(comm, buckets) or interruption
    for bucket in buckets:
        bucket.gradient_state.forget_rounds()
    return interruption


def _compare(comm: Transport, standing: Standing) -> FastcommError | None:
    """Returns an error that every rank gets, so that none has to tell the others: how the standings
    differ, or what has ended the comparison. Waits for the device.
    """
    own = torch.tensor(standing, dtype=torch.int64, device=comm.device)
    gathered = torch.empty(comm.world_size * own.numel(), dtype=own.dtype, device=comm.device)
    try:
        comm.all_gather_single(gathered, own)
        rows = on_host(comm, gathered).view(comm.world_size, -1).tolist()
    except FastcommError as error:
        return error
    if all(row == rows[0] for row in rows):
        return None
    places = "; ".join(f"rank {rank}: {Standing(*row)}" for rank, row in enumerate(rows))
    return MismatchError(
        f"the ranks do not sync at the same step: {places}. Let all ranks make as many steps; "
        "count_step() counts one that a rank leaves out. No parameter was changed"
    )


def _await_device(comm: Transport, buckets: Sequence[Bucket]) -> BaseException | None:
    """Over NCCL a rank may abandon what the host has long finished, and parameters would take half
    of a sum for the mean. Raises and returns as sync().
    """
    is_here = False
    try:
        with defer_signals(), _gradients_aside(buckets):
            on_host(comm, buckets[-1].flat[:1])  # the copy waits for what was ordered before it
            is_here = True
    except BaseException as error:
        if not is_here:
            raise
        return error
    return None


@contextlib.contextmanager
def _gradients_aside(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Gives all parameters their gradients back at the end, whatever becomes of .grad inside the
    block. Gradients that lie in the buckets' views are moved out of them first.
    """
    kept: list[tuple[Tensor, Tensor | None]] = []
    for bucket in buckets:
        bucket.vacate()
        kept += [(parameter, parameter.grad) for _, parameter in bucket.named_parameters()]
    try:
        yield
    finally:
        for parameter, gradient in kept:
            # torch refuses one that does not fit its parameter any more
            with contextlib.suppress(RuntimeError):
                parameter.grad = gradient
