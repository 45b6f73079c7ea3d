"""The collectives of the interface, for bodies: a call of each, and a check of what it computes, at
sizes and places that a test chooses, against the reduction, the concatenation or the copy of what
the ranks gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.communicator import Communicator
from tests.support.reference import (
    OPS,
    PLACES,
    assert_reduced,
    assert_same_bits,
    check_all_reduce,
    placed,
    shards_of,
)


def _part(comm: Communicator, whole: Tensor) -> Tensor:
    return whole[: whole.numel() // comm.world_size]


# Results come into the tensor, whose size is a multiple of the number of ranks, or into its
# beginning. What is sent and is not the result is a copy that nobody else holds.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, t, **how: comm.all_reduce(t, **how),
    "all_reduce_coalesced": lambda comm, t, **how: comm.all_reduce_coalesced(
        t.tensor_split(3), **how
    ),
    "broadcast": lambda comm, t, **how: comm.broadcast(t, **how),
    "all_gather_single": lambda comm, t, **how: comm.all_gather_single(
        t, _part(comm, t) + 0, **how
    ),
    "reduce_scatter_single": lambda comm, t, **how: comm.reduce_scatter_single(
        _part(comm, t), t + 0, **how
    ),
    "gather": lambda comm, t, **how: comm.gather(
        t if comm.rank == 0 else None, _part(comm, t) + 0, **how
    ),
    "scatter": lambda comm, t, **how: comm.scatter(
        _part(comm, t), t + 0 if comm.rank == 0 else None, **how
    ),
    "all_to_all_single": lambda comm, t, **how: comm.all_to_all_single(t, t + 0, **how),
}

Cases = Sequence[tuple[int, str]]  # numbers of elements, with operations


def with_every_op(*sizes: int) -> list[tuple[int, str]]:
    return [(numel, op) for numel in sizes for op in OPS]


def with_ops_in_turn(*sizes: int, first: int = 0) -> list[tuple[int, str]]:
    """Each size with one operation: for code through which all operations go one way, the
    arithmetic being checked elsewhere. With another `first` for each dtype, every size meets every
    operation.
    """
    return [(numel, OPS[(first + i) % len(OPS)]) for i, numel in enumerate(sizes)]


@contextlib.contextmanager
def naming(*case: object) -> Iterator[None]:
    """Says in which case of a loop a comparison fails."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def _check_all_reduces(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    for where in places:
        for numel, op in cases:
            with naming(where, dtype, numel, op):
                check_all_reduce(comm, numel, dtype, op, where, seed=numel)


def cut(tensor: Tensor) -> list[Tensor]:
    """Parts of different sizes and shapes, of which some are empty; no boundary between two is on a
    cache line, where the tensor is large enough.
    """
    half, third = tensor.numel() // 2, tensor.numel() // 3
    sizes = (third - third % 2, 0, min(half - third, 1), half - third - min(half - third, 1))
    first, *others, last = tensor.split([*sizes, 0, tensor.numel() - sum(sizes)])
    return [first.view(-1, 2), *others, last]


def _check_coalesced(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    for where in places:
        for numel, op in cases:
            shards = shards_of(dtype, comm.world_size, numel, seed=numel)
            parts = cut(shards[comm.rank])
            tensors = [placed(comm, where, part.view(-1)).view(part.shape) for part in parts]
            tensors.reverse()  # so that they do not lie in memory as in the list
            comm.all_reduce_coalesced(tensors, op)
            with naming(where, dtype, numel, op):
                for i, tensor in enumerate(reversed(tensors)):
                    assert_reduced(comm, tensor, [cut(shard)[i] for shard in shards], op)


def _check_reduce_scatters(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    n = comm.world_size
    for where in places:
        for part, op in cases:
            shards = shards_of(dtype, n, part * n, seed=part)
            inp = placed(comm, where, shards[comm.rank])
            out = placed(comm, where, torch.zeros(part, dtype=dtype))
            comm.reduce_scatter_single(out, inp, op)
            with naming(where, dtype, part, op):
                own_parts = [shard.view(n, part)[comm.rank] for shard in shards]
                assert_reduced(comm, out, own_parts, op)
                assert_same_bits(inp.cpu(), shards[comm.rank])


def _check_all_gathers(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    for where in places:
        for numel in dict(cases):
            shards = shards_of(dtype, comm.world_size, numel, seed=numel)
            inp = placed(comm, where, shards[comm.rank])
            out = placed(comm, where, torch.zeros(numel * comm.world_size, dtype=dtype))
            comm.all_gather_single(out, inp)
            with naming(where, dtype, numel):
                assert_same_bits(out.cpu(), torch.cat(shards))
                assert_same_bits(inp.cpu(), shards[comm.rank])


def _check_broadcasts(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    for where in places:
        for numel in dict(cases):
            for src in range(comm.world_size):
                shards = shards_of(dtype, comm.world_size, numel, seed=numel + src)
                tensor = placed(comm, where, shards[comm.rank])
                comm.broadcast(tensor, src)
                with naming(where, dtype, numel, src):
                    assert_same_bits(tensor.cpu(), shards[src])


def _check_gathers(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    for where in places:
        for numel in dict(cases):
            for dst in range(comm.world_size):
                shards = shards_of(dtype, comm.world_size, numel, seed=numel + dst)
                inp = placed(comm, where, shards[comm.rank])
                out = None
                if comm.rank == dst:
                    out = placed(comm, where, torch.zeros(numel * comm.world_size, dtype=dtype))
                comm.gather(out, inp, dst)
                with naming(where, dtype, numel, dst):
                    if out is not None:
                        assert_same_bits(out.cpu(), torch.cat(shards))
                    assert_same_bits(inp.cpu(), shards[comm.rank])


def _check_scatters(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    for where in places:
        for numel in dict(cases):
            for src in range(comm.world_size):
                parts = shards_of(dtype, comm.world_size, numel, seed=numel + src)
                inp = placed(comm, where, torch.cat(parts)) if comm.rank == src else None
                out = placed(comm, where, torch.zeros(numel, dtype=dtype))
                comm.scatter(out, inp, src)
                with naming(where, dtype, numel, src):
                    assert_same_bits(out.cpu(), parts[comm.rank])


def _check_all_to_alls(
    comm: Communicator, dtype: torch.dtype, cases: Cases, places: Sequence[str]
) -> None:
    n = comm.world_size
    for where in places:
        for numel in dict(cases):
            shards = shards_of(dtype, n, numel * n, seed=numel)
            inp = placed(comm, where, shards[comm.rank])
            out = placed(comm, where, torch.zeros(numel * n, dtype=dtype))
            comm.all_to_all_single(out, inp)
            with naming(where, dtype, numel):
                own = [shard.view(n, numel)[comm.rank] for shard in shards]
                assert_same_bits(out.cpu(), torch.cat(own))
                assert_same_bits(inp.cpu(), shards[comm.rank])


def check_unequal_parts(comm: Communicator, numel_of: Callable[[int, int], int]) -> None:
    """all_to_all_single with splits. numel_of(src, dst): how many rows of three go from src to
    dst.
    """
    ranks = range(comm.world_size)
    sent = [[numel_of(src, dst) for dst in ranks] for src in ranks]
    shards = [torch.arange(3.0 * sum(row)).view(-1, 3) + 1000 * src for src, row in enumerate(sent)]
    own = [shards[src].split(sent[src])[comm.rank] for src in ranks]
    out_splits = [row[comm.rank] for row in sent]
    for where in PLACES:
        inp = placed(comm, where, shards[comm.rank].flatten()).view(-1, 3)
        out = torch.zeros(sum(out_splits), 3, device=comm.device)
        comm.all_to_all_single(out, inp, out_splits, sent[comm.rank])
        with naming(where):
            assert_same_bits(out.cpu(), torch.cat(own))


CHECKS = {
    "all_reduce": _check_all_reduces,
    "all_reduce_coalesced": _check_coalesced,
    "reduce_scatter_single": _check_reduce_scatters,
    "all_gather_single": _check_all_gathers,
    "broadcast": _check_broadcasts,
    "gather": _check_gathers,
    "scatter": _check_scatters,
    "all_to_all_single": _check_all_to_alls,
}
