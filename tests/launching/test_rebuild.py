"""Ranks that are left of a communicator meet anew, and take in those that come in place of lost
ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import pytest
import torch
from torch.distributed import HashStore

import fastcomm
from fastcomm.comm.objects import on_host
from fastcomm.launching import bootstrap, membership
from tests.support.bodies import Place, communicator, leave, note, raised, wait_for_note
from tests.support.outcomes import Outcome, values_of
from tests.support.ranks import fresh_ranks, torchrun_env
from tests.support.transports import EVERY_TRANSPORT, environment_of


def _ranks(backend: str, n: int, body: Any, *args: Any) -> list[Outcome]:
    env = [environment_of(backend, rank) for rank in range(n)]
    return fresh_ranks(n, body, *args, transport=backend, env=env)


def _sum(comm: Any) -> float:
    tensor = torch.full((1000,), comm.rank + 1.0, device=comm.device)
    comm.all_reduce(tensor)
    return float(on_host(comm, tensor)[-1])


def _lose_a_peer(comm: Any) -> None:
    with pytest.raises(fastcomm.PeerLostError):
        while True:
            _sum(comm)


def _outlive(place: Place, victims: list[int]) -> list[tuple[int, int, float]]:
    """victims: the rank that dies, each time of those that are left."""
    comm, seen = communicator(place), []
    for victim in victims:
        if comm.rank == victim:
            leave(place, comm, "killed")
        _lose_a_peer(comm)
        lost, comm = comm, comm.rebuild()
        assert lost.rebuild() is comm
        assert lost.failure is not None
        seen.append((comm.rank, comm.world_size, _sum(comm)))
    return seen


@pytest.mark.parametrize(
    "backend, victims",
    [("shm", [0]), ("shm", [2, 1]), *((backend, [1, 0]) for backend in EVERY_TRANSPORT)],
)
def test_the_ranks_that_are_left_meet_anew(backend, victims):
    left = list(range(3))
    for victim in victims:
        del left[victim]
    outcomes = _ranks(backend, 3, _outlive, victims)
    seen = values_of(outcomes, *({0, 1, 2} - set(left)))
    total = {1: 1.0, 2: 3.0}
    assert [one[-1] for one in seen] == [
        (rank, len(left), total[len(left)]) for rank in range(len(left))
    ]


# ---- those that come in place of lost ones -------------------------------------------------------


def _take_the_place_of(place: Place, rank: int, world_size: int) -> Any:
    """The last rank plays a process that is started in place of a lost one."""
    return communicator(dataclasses.replace(place, rank=rank, world_size=world_size))


def _take_in(place: Place, victim: int) -> tuple[int, int, float, Any]:
    n_ranks = place.world_size - 1
    if place.rank == n_ranks:
        wait_for_note(place, "left_at")
        comm = _take_the_place_of(place, victim, n_ranks)
        assert comm.membership.is_new
    else:
        comm = communicator(dataclasses.replace(place, world_size=n_ranks))
        if comm.rank == victim:
            leave(place, comm, "exits at once")
        _lose_a_peer(comm)
        comm = _completed(comm.rebuild(), n_ranks)  # it may come before they meet, or after
    return comm.rank, comm.world_size, _sum(comm), comm.membership.is_awaited()


def _completed(comm: Any, n_ranks: int) -> Any:
    """They meet anew as soon as one sees somebody wait, until there are so many ranks."""
    while comm.world_size < n_ranks:
        time.sleep(0.1)
        awaited = torch.tensor([float(comm.membership.is_awaited())], device=comm.device)
        comm.all_reduce(awaited, "max")
        if on_host(comm, awaited).item():
            comm = comm.rebuild()
    return comm


@pytest.mark.parametrize(
    "backend, victim", [("shm", 2), *((backend, 0) for backend in EVERY_TRANSPORT)]
)
def test_a_process_is_taken_in_and_has_the_rank_of_the_lost_one(backend, victim):
    seen = values_of(_ranks(backend, 4, _take_in, victim), victim)
    ranks = [*(rank for rank in range(3) if rank != victim), victim]
    assert seen == [(rank, 3, 6.0, False) for rank in ranks]


# ---- while they meet -----------------------------------------------------------------------------


def _die_while_meeting(place: Place, where: str) -> tuple[int, int, float]:
    comm = communicator(place)
    if comm.rank == 0:
        leave(place, comm, "killed")
    _lose_a_peer(comm)
    if comm.rank == 1:  # it leads, as the others wait until it does
        kind = membership.Membership if where == "_decide" else membership
        setattr(kind, where, lambda *_, **__: leave(place, comm, "exits at once"))
        look = membership._Others.look
        membership._Others.look = lambda *args: (note(place, leads=""), look(*args))
    else:
        wait_for_note(place, "leads")
    comm = comm.rebuild()
    return comm.rank, comm.world_size, _sum(comm)


@pytest.mark.parametrize(
    "backend, where",
    [("shm", "_decide"), *((backend, "connect_members") for backend in EVERY_TRANSPORT)],
)
def test_a_rank_may_be_lost_while_they_meet(backend, where):
    """Before it has written down who takes part, or after."""
    seen = values_of(_ranks(backend, 4, _die_while_meeting, where), 0, 1)
    assert seen == [(0, 2, 3.0), (1, 2, 3.0)]


def _come_too_late(place: Place) -> tuple[int, int, float]:
    comm = communicator(place)
    if comm.rank == 0:
        leave(place, comm, "killed")
    _lose_a_peer(comm)
    if comm.rank == 1:
        wait_for_note(place, "met")
        comm = comm.rebuild()
    else:
        comm = comm.rebuild(timeout=timedelta(seconds=1))
        assert (comm.rank, comm.world_size, _sum(comm)) == (place.rank - 2, 2, 3.0)
        assert comm.membership.is_rebuilt and not comm.membership.is_new
        if comm.rank == 0:
            note(place, met="")
        comm = _completed(comm, 3)
    return comm.rank, comm.world_size, _sum(comm)


def test_a_rank_that_comes_too_late_joins_the_next_meeting():
    seen = values_of(fresh_ranks(4, _come_too_late), 0)
    assert seen == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]


# ---- where they meet -----------------------------------------------------------------------------


def _lose_the_server(place: Place) -> Any:
    """Rank 0 serves the store."""
    comm = communicator(place, init_method="env://")
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.1)
        leave(place, comm, "killed")
    _lose_a_peer(comm)
    return comm


def _outlive_the_server(place: Place) -> tuple[int, int, float]:
    comm = _lose_the_server(place).rebuild()
    assert comm.membership.is_rebuilt and not comm.membership.is_new
    return comm.rank, comm.world_size, _sum(comm)


def _lose_its_host(place: Place) -> str:
    comm = _lose_the_server(place)
    bootstrap._is_here = lambda _: False
    with pytest.raises(fastcomm.InitError) as caught:
        comm.rebuild(timeout=timedelta(seconds=2))
    return str(caught.value)


def test_another_rank_of_the_host_serves_the_store_when_its_server_is_gone():
    outcomes = fresh_ranks(3, _outlive_the_server, env=torchrun_env(3))
    assert values_of(outcomes, 0) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_store_that_is_gone_with_its_host_is_an_error_that_says_so():
    (seen,) = values_of(fresh_ranks(2, _lose_its_host, env=torchrun_env(2)), 0)
    assert "is gone with the process that has served it" in seen


# ---- ranks that are too late, or too early -------------------------------------------------------


def _wait_in_vain(place: Place) -> str:
    """Rank 1 comes too late, and the others do not look for those that wait."""
    comm = communicator(place, timeout=timedelta(seconds=3))
    if comm.rank == 0:
        leave(place, comm, "killed")
    _lose_a_peer(comm)
    if comm.rank == 1:
        wait_for_note(place, "met")
        with pytest.raises(fastcomm.InitError) as caught:
            comm.rebuild(timeout=timedelta(seconds=1))
        note(place, over="")
        return str(caught.value)
    comm.rebuild(timeout=timedelta(seconds=1)).barrier()
    note(place, **{"met" if place.rank == 2 else "met too": ""})
    wait_for_note(place, "over")
    return "missing: rank "


def test_a_rank_that_nobody_takes_in_does_not_go_on_alone():
    seen = values_of(fresh_ranks(4, _wait_in_vain), 0)
    assert all("missing: rank " in one for one in seen)


def _come_when_it_is_over(place: Place, rebuilds: bool) -> str:
    """Rank 0 dies; the others end, or go on without it before. Then another comes in its place."""
    if place.rank == 3:
        bootstrap._ALONE_S = 0.5
        for name in "rank 1 ends", "rank 2 ends":
            wait_for_note(place, name)
        message, seconds = raised(fastcomm.InitError, lambda: _take_the_place_of(place, 0, 3))
        assert seconds < 10
        return message
    comm = _take_the_place_of(place, place.rank, 3)
    if comm.rank == 0:
        leave(place, comm, "killed")
    _lose_a_peer(comm)
    if rebuilds:
        assert _sum(comm.rebuild()) == 3
    note(place, **{f"rank {place.rank} ends": ""})
    os._exit(1)


@pytest.mark.parametrize(
    "backend, rebuilds", [("shm", True), ("shm", False), ("nccl", False), ("group", False)]
)
def test_who_comes_when_the_others_have_ended_is_told_so_within_seconds(backend, rebuilds):
    (seen,) = values_of(_ranks(backend, 4, _come_when_it_is_over, rebuilds), 0, 1, 2)
    assert seen.startswith("rank 0 waits alone where others have met: their processes have ended")


@pytest.mark.parametrize("other", [None, "has not ended", "is started again"])
def test_who_is_not_alone_where_others_have_ended_waits_for_them(other, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store, part = HashStore(), "fastcomm/0/ranks"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    pids = [ended.pid, os.getpid() if other == "has not ended" else ended.pid]
    for rank, pid in enumerate(pids):
        store.set(f"{part}/0/claim/{rank}", json.dumps([pid, bootstrap.host_identity()]))
    store.set(f"{part}/0/2/all", "")
    store.add(f"{part}/n_meetings", 1)
    if other == "is started again":
        came = ["", os.getpid(), bootstrap.host_identity()]
        store.set(f"{part}/1/came/1", json.dumps(came))
    point = bootstrap.MeetingPoint(urlparse("env://"), store)
    point.bootstrap(0, 2, timedelta(seconds=5))
    assert point.is_left_to(0, 2) == (other is None)


def test_a_note_for_another_process_is_not_taken_for_ones_own(monkeypatch):
    """Who comes between the look at those who wait and the note for them waits once more."""
    store = HashStore()
    point = bootstrap.MeetingPoint(urlparse("env://"), store)
    other = membership.Member(1, None, os.getpid() + 1, bootstrap.host_identity())
    meeting = membership.Meeting("prefix", 1, "shm", 2, 2, [other])

    def connect(met: bootstrap.StoreBootstrap, _: str) -> Any:
        if not store.check(["fastcomm/0/ranks/0/taken in"]):
            point.take_in(json.dumps(meeting))
            met.exchange(None, None)
        raise InterruptedError(met.rank)

    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    met = point.bootstrap(1, 2, timedelta(seconds=5))
    with pytest.raises(InterruptedError, match="1"):
        membership.arrive(met, connect, "shm", timedelta(seconds=5))
