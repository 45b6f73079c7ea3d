"""The parts that ranks have for each other in gather, scatter and all_to_all_single: which ranks
pass which tensors, and how many elements go from whom to whom. Decided here for every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import index
from typing import Any, NamedTuple

from torch import Tensor

from fastcomm.comm.collective import check_apart, check_out, check_root, shard_of
from fastcomm.comm.objects import gather_numbers, naming
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError


class Parts(NamedTuple):
    """Of one rank. In elements; a complex one is two real numbers.

    sent, received: to each rank and from each, by rank.
    numel: by which the ranks name the collective; equal on all of them.
    of_all: what each rank sends, by rank, where parts differ in size.
    """

    sent: list[int]
    received: list[int]
    numel: int
    of_all: list[list[int]] | None = None


def equal_parts(kind: str, comm: Transport, numel: int, root: int) -> Parts:
    """Of a gather, a scatter or an all_to_all_single. numel: of what one rank has for another, or,
    of all_to_all_single, for all of them.
    """
    n = comm.world_size
    if kind == "all_to_all_single":
        return Parts([numel // n] * n, [numel // n] * n, numel)
    by_root = [numel if comm.rank == root else 0] * n
    by_all = [numel if rank == root else 0 for rank in range(n)]
    sent, received = (by_all, by_root) if kind == "gather" else (by_root, by_all)
    return Parts(sent, received, numel)


def check_rooted(kind: str, comm: Transport, whole: Tensor | None, part: Tensor, root: int) -> None:
    """Checks the tensors of a gather or scatter. whole: what rank `root` alone passes, and which
    holds every rank's part. Raises ValueError or TypeError, before any peer is involved.
    """
    names = ("dst", "out", "inp") if kind == "gather" else ("src", "inp", "out")
    of_root, of_whole, of_part = names
    numel = part.numel() * comm.world_size
    check_root(of_root, root, comm.world_size)
    if comm.rank != root:
        if whole is not None:
            raise ValueError(f"{of_whole} is for rank {root} alone: pass None on the others")
    elif whole is None:
        raise TypeError(f"{kind}: {of_whole} must be a tensor on rank {root}; got NoneType")
    elif whole.dtype != part.dtype:
        raise TypeError(f"{kind}: {of_whole} is {whole.dtype}, {of_part} is {part.dtype}")
    elif whole.numel() != numel:
        raise ValueError(f"{kind}: {of_whole} must have {numel} elements; it has {whole.numel()}")


def exchanged(
    comm: Transport,
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
) -> Parts | None:
    """Of all_to_all_single; None for equal parts. Raises ValueError or TypeError before any peer is
    involved. With splits the ranks compare them: collective, and raises MismatchError on every
    rank.
    """
    name, n = "all_to_all_single", comm.world_size
    are_equal = out_splits is None and in_splits is None
    check_out(name, out, inp, (inp if are_equal else out).numel())
    check_apart(name, out, inp)
    if are_equal:
        shard_of(name, inp, n)
        return None
    pair = 2 if inp.is_complex() else 1
    sent = _numels("in_splits", "inp", inp, in_splits, n)
    expected = _numels("out_splits", "out", out, out_splits, n)
    with naming(f"{name}() with splits"):
        of_all = [[numel * pair for numel in row] for row in _agreed(comm, sent, expected)]
    received = [row[comm.rank] for row in of_all]
    return Parts(of_all[comm.rank], received, n * max(map(max, of_all)), of_all)


def _agreed(comm: Transport, sent: list[int], expected: list[int]) -> list[list[int]]:
    """How many elements each rank sends to each: by sender, then by receiver."""
    n = comm.world_size
    rows = gather_numbers(comm, [*sent, *expected])
    sent_by, expected_by = [row[:n] for row in rows], [row[n:] for row in rows]
    for src, dst in product(range(n), repeat=2):
        if sent_by[src][dst] != expected_by[dst][src]:
            raise MismatchError(
                f"all_to_all_single: rank {src} sends {sent_by[src][dst]} elements to rank {dst}, "
                f"which expects {expected_by[dst][src]}: in_splits of one must be the other's "
                "out_splits"
            )
    return sent_by


def _numels(
    name: str, of: str, tensor: Tensor, splits: Sequence[Any] | None, world_size: int
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
    try:
        rows = [index(number) for number in splits]
    except TypeError:
        raise TypeError(
            f"all_to_all_single: {name} must be integers, numbers of rows; got {splits!r}"
        ) from None
    if len(rows) != world_size or min(rows) < 0 or sum(rows) != n_rows:
        raise ValueError(
            f"all_to_all_single: {name} must be {world_size} numbers of rows, one for each rank, "
            f"{n_rows} in all, as {of} has; got {rows}"
        )
    row = tensor.numel() // n_rows if n_rows else 0
    return [number * row for number in rows]
