"""A rank that comes late to what Gloo carries out is waited for until the group's time-out.

A wait looks for lost ranks in between; tests let it look often, so that a short lateness is long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from fastcomm.torch_backend import gloo_engine
from fastcomm.torch_backend.peers import Peers
from tests.support import process_groups
from tests.support.process_groups import start, world
from tests.support.ranks import fresh_ranks, on_ranks

ranks = process_groups.ranks  # a pool of this module's own

LOOKS = 3  # of the rank that waits, before the other one comes
_numbers = count()


def _bytes(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


def _wait(work: dist.Work) -> None:
    assert work.wait() and work.is_completed()


# Rank 0 waits for rank 1 in all of them: it is their root, or gets what their root has.


def _all_reduce() -> Tensor:
    dist.all_reduce(tensor := _bytes(1, 2))
    return tensor


def _async_all_reduce() -> Tensor:
    _wait(dist.all_reduce(tensor := _bytes(1, 2), async_op=True))
    return tensor


def _all_reduce_of_several() -> Tensor:
    tensors = [_bytes(1), _bytes(2)]
    dist.all_reduce_coalesced(tensors)
    return torch.cat(tensors)


def _functional_all_reduce() -> Tensor:
    return functional.all_reduce(_bytes(1, 2), "sum", world()).wait()


def _reduce() -> Tensor:
    dist.reduce(tensor := torch.tensor([1, 2]), 0)
    return tensor if dist.get_rank() == 0 else torch.tensor([2, 4])


def _reduce_scatter() -> Tensor:
    dist.reduce_scatter_tensor(output := _bytes(0, 0), _bytes(1, 2, 1, 2))
    return output


def _broadcast() -> Tensor:
    dist.broadcast(tensor := _bytes(2, 4) * dist.get_rank(), 1)
    return tensor


def _scatter() -> Tensor:
    parts = [torch.tensor([2, 4])] * 2 if dist.get_rank() == 1 else None
    dist.scatter(output := torch.tensor([0, 0]), parts, 1)
    return output


def _gather() -> Tensor:
    outputs = [torch.zeros(1), torch.zeros(1)] if dist.get_rank() == 0 else None
    dist.gather(torch.tensor([2.0 + 2 * dist.get_rank()]), outputs, 0)
    return torch.cat(outputs or [torch.tensor([2, 4])])


def _all_gather() -> Tensor:
    outputs = [_bytes(0), _bytes(0)]
    dist.all_gather(outputs, _bytes(2 + 2 * dist.get_rank()))
    return torch.cat(outputs)


def _all_gather_single() -> Tensor:
    output = _bytes(0, 0)
    dist.all_gather_into_tensor(output, _bytes(2 + 2 * dist.get_rank()))
    return output


def _all_to_all() -> Tensor:
    outputs = [torch.zeros(1), torch.zeros(1)]
    dist.all_to_all(outputs, [torch.tensor([2.0 + 2 * dist.get_rank()])] * 2)
    return torch.cat(outputs)


def _all_to_all_single() -> Tensor:
    output = torch.zeros(2)
    dist.all_to_all_single(output, torch.full((2,), 2.0 + 2 * dist.get_rank()))
    return output


CALLS: dict[str, Callable[[], Tensor]] = {
    call.__name__.lstrip("_").replace("_", " "): call
    for call in (
        _all_reduce,
        _async_all_reduce,
        _all_reduce_of_several,
        _functional_all_reduce,
        _reduce,
        _reduce_scatter,
        _broadcast,
        _scatter,
        _gather,
        _all_gather,
        _all_gather_single,
        _all_to_all,
        _all_to_all_single,
    )
}


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


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_a_rank_that_comes_late_is_waited_for(comm, name):
    world()
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert _call_late(monkeypatch, CALLS[name]).tolist() == [2, 4]


def _come_late_from_another_host(place):
    start(place)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, call in CALLS.items():
            assert _call_late(monkeypatch, call).tolist() == [2, 4], name
    dist.destroy_process_group()


def test_a_rank_that_comes_late_from_another_host_is_waited_for():
    hosts = [{"FASTCOMM_HOST_ID": host, "GLOO_SOCKET_IFNAME": "lo"} for host in "ab"]
    outcomes = fresh_ranks(2, _come_late_from_another_host, env=hosts)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes


def _clients_are_late(place):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    start(place)
    gloo_engine.LONG_SLICE_S = 1.9e-3

    def late(rank: int) -> None:
        if place.rank == rank:
            time.sleep(0.05)

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    for rank in range(2):
        late(rank)
        loss = model(torch.ones(2, 4)).sum()
        late(1 - rank)
        loss.backward()
        whole = torch.arange(8).view(4, 2).to(torch.int8)
        late(rank)
        shards = distribute_tensor(whole, mesh, [Shard(0)])
        late(rank)
        assert torch.equal(shards.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        objects: list[object] = [None, None]
        late(rank)
        dist.all_gather_object(objects, place.rank)
        assert objects == [0, 1]
        box = [place.rank]
        late(rank)
        dist.broadcast_object_list(box, src=1)
        assert box == [1]
    dist.destroy_process_group()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_fsdp_distributed_tensors_and_objects_wait_for_a_late_rank(hosts):
    env = [{"FASTCOMM_HOST_ID": host, "GLOO_SOCKET_IFNAME": "lo"} for host in hosts]
    outcomes = fresh_ranks(2, _clients_are_late, env=env)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes


@pytest.mark.parametrize("name", ["all reduce", "async all reduce", "functional all reduce"])
@on_ranks(2)
def test_a_rank_that_does_not_come_ends_the_wait_at_the_group_s_timeout(comm, name):
    world()
    group = dist.new_group(timeout=timedelta(milliseconds=2345), backend="fastcomm")
    if comm.rank == 0:
        tensor = _bytes(1)
        with pytest.raises(RuntimeError, match="2345 ?ms"):
            if name == "functional all reduce":
                functional.all_reduce(tensor, "sum", group).wait()
            else:
                work = dist.all_reduce(tensor, group=group, async_op=name.startswith("async"))
                work.wait()
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
    engine = gloo_engine.GlooEngine(gloo, Peers({}), [0])
    assert engine.collective("all_reduce", [_bytes(1)]).wait(timedelta(seconds=9))
