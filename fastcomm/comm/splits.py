"""The parts of all_to_all_single that differ in size: what ranks send each other has to be what
they expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from fastcomm.comm.collective import real_numel
from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError


def agree_on_parts(
    comm: Transport,
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
) -> list[list[int]]:
    """How many elements, or real numbers, each rank sends to each: by sender, then by receiver.
    Collective. Splits: as in Communicator.all_to_all_single. Raises TypeError or ValueError before
    any peer is involved, MismatchError on every rank.
    """
    sent = _numels("in_splits", "inp", inp, in_splits, comm.world_size)
    expected = _numels("out_splits", "out", out, out_splits, comm.world_size)
    table = torch.empty((comm.world_size, 2, comm.world_size), dtype=torch.int64, device=out.device)
    comm.all_gather_single(table, torch.tensor([sent, expected], device=out.device))
    sent_by, expected_by = on_host(comm, table).unbind(1)
    ranks = range(comm.world_size)
    parts: list[list[int]] = sent_by.tolist()
    for src, dst in product(ranks, ranks):
        n = int(expected_by[dst, src])
        if parts[src][dst] != n:
            raise MismatchError(
                f"all_to_all_single: rank {src} sends {parts[src][dst]} elements to rank {dst}, "
                f"which expects {n}: in_splits of one must be the other's out_splits"
            )
    return parts


def _numels(
    name: str, of: str, tensor: Tensor, splits: Sequence[int] | None, world_size: int
) -> list[int]:
    """The elements of each rank's part."""
    n_rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if n_rows % world_size:
            raise ValueError(
                f"all_to_all_single: {of} has {n_rows} rows, which {world_size} ranks cannot share "
                f"equally: pass {name}"
            )
        splits = [n_rows // world_size] * world_size
    splits = [int(rows) for rows in splits]
    if len(splits) != world_size or min(splits) < 0 or sum(splits) != n_rows:
        raise ValueError(
            f"all_to_all_single: {name} must be {world_size} numbers of rows, one for each rank, "
            f"{n_rows} in all, as {of} has; got {splits}"
        )
    row = real_numel(tensor) // n_rows if n_rows else 0
    return [rows * row for rows in splits]
