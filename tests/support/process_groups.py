"""For bodies of tests: the backend "fastcomm" of torch.distributed among a test's ranks, and Gloo
beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcomm  # noqa: F401 (registers the backend)
from tests.support.bodies import Place, my_place
from tests.support.ranks import Ranks

TIMEOUT = timedelta(seconds=30)
_gloo: list[dist.ProcessGroup] = []


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Processes of this module's own: their default group is one of the backend."""
    pool = Ranks()
    yield pool
    pool.close()


def world() -> dist.ProcessGroup:
    """For bodies: the default group, over the backend."""
    if not dist.is_initialized():
        start(my_place())
    return dist.group.WORLD


def start(place: Place, timeout: timedelta = TIMEOUT, file: str = "backend") -> None:
    """file: where the ranks meet. torch removes it with the last rank's group, not before another
    rank may come again: who starts again names another.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"file://{place.directory}/{file}"
    dist.init_process_group(
        "fastcomm",
        init_method=address,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


def gloo() -> dist.ProcessGroup:
    """For bodies: the same ranks over Gloo."""
    world()
    if not _gloo:
        _gloo.append(dist.new_group(backend="gloo"))
    return _gloo[0]


def values(comm, numel: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers that differ from rank to rank: every dtype holds their sums and
    products.
    """
    return ((torch.arange(numel) * (comm.rank + 2)) % 5 + 1).to(dtype)


@contextlib.contextmanager
def noted_all_reduces() -> Iterator[list[tuple[torch.dtype, dict[str, Any]]]]:
    """For bodies: the dtype and the options of each all-reduce that the default group leaves to its
    communicator meanwhile.
    """
    shared = world()._cpu  # type: ignore[attr-defined]
    comm, noted = shared.comm, []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(comm, name)

        def all_reduce(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            noted.append((tensor.dtype, options))
            return comm.all_reduce(tensor, *arguments, **options)

    shared.comm = Noting()
    try:
        yield noted
    finally:
        shared.comm = comm
