"""A rank that comes late to what Gloo carries out is waited for until the group's time-out.

A wait looks for lost ranks in between; tests let it look often, so that a short lateness is long.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from fastcomm.torch_backend import gloo_engine
from tests.support import process_groups
from tests.support.process_groups import world
from tests.support.ranks import on_ranks

ranks = process_groups.ranks  # a pool of this module's own

LOOKS = 3  # of the rank that waits, before the other one comes
_numbers = count()


def _bytes(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


# Those that wait inside of the call, and one for which torch waits.


def _all_reduce() -> Tensor:
    dist.all_reduce(tensor := _bytes(1, 2))
    return tensor


def _functional_all_reduce() -> Tensor:
    return functional.all_reduce(_bytes(1, 2), "sum", world()).wait()


def _all_to_all() -> Tensor:
    outputs = [torch.zeros(1), torch.zeros(1)]
    dist.all_to_all(outputs, [torch.tensor([2.0 + 2 * dist.get_rank()])] * 2)
    return torch.cat(outputs)


def _call_late(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Tensor]) -> Tensor:
    """Rank 1 calls once rank 0, which waits for it, has looked for lost ranks a few times."""
    store = dist.distributed_c10d._get_default_store()
    key = f"rank 0 has waited/{next(_numbers)}"
    if dist.get_rank() == 1:
        store.wait([key])
        return call()
    looks, look = count(1), gloo_engine.GlooEngine.raise_if_lost

    def tell(engine: gloo_engine.GlooEngine, name: str, error: RuntimeError | None = None) -> None:
        look(engine, name, error)
        if next(looks) == LOOKS:
            store.set(key, "")

    with monkeypatch.context() as patch:
        patch.setattr(gloo_engine, "LONG_SLICE_S", 1.9e-3)
        patch.setattr(gloo_engine.GlooEngine, "raise_if_lost", tell)
        return call()


@pytest.mark.parametrize("call", [_all_reduce, _functional_all_reduce, _all_to_all])
@on_ranks(2)
def test_a_rank_that_comes_late_is_waited_for(comm, call):
    world()
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert _call_late(monkeypatch, call).tolist() == [2, 4]


@on_ranks(2)
def test_a_rank_that_does_not_come_ends_the_wait_at_the_group_s_timeout(comm):
    world()
    group = dist.new_group(timeout=timedelta(milliseconds=2345), backend="fastcomm")
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match="2345 ?ms"):
            dist.all_reduce(_bytes(1), group=group)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


class _CompletedAtTheLastMoment:
    """A Work of Gloo's whose collective is completed after a wait for it has timed out."""

    n_waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.n_waits += 1
        if self.n_waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.n_waits > 0


def test_a_collective_that_is_completed_as_a_wait_times_out_has_not_failed():
    gloo = SimpleNamespace(rank=lambda: 0, all_reduce=lambda *_: _CompletedAtTheLastMoment())
    engine = gloo_engine.GlooEngine(gloo, [], [0])
    assert engine.call("all_reduce", [_bytes(1)]).wait(timedelta(seconds=9))
