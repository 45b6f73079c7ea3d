"""Checks of what collectives compute, for bodies: at sizes and places that a test chooses, against
the reduction, the concatenation or the copy of what the ranks gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from fastcomm.comm.communicator import Communicator
from tests.support.reference import (
    OPS,
    assert_reduced,
    assert_same_bits,
    check_all_reduce,
    placed,
    shards_of,
)

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


CHECKS = {
    "all_reduce": _check_all_reduces,
    "reduce_scatter_single": _check_reduce_scatters,
    "all_gather_single": _check_all_gathers,
    "broadcast": _check_broadcasts,
}
