"""The places where ranks meet, and what is left of them."""

from __future__ import annotations

import os

import torch
from torch.distributed import HashStore

import fastcomm
from fastcomm import bootstrap
from tests.support.bodies import my_place
from tests.support.ranks import on_ranks


def _meet(comm, path: str) -> fastcomm.Communicator:
    """Another communicator of the same ranks."""
    n = comm.world_size
    return fastcomm.init("shm", init_method=f"file://{path}", rank=comm.rank, world_size=n)


@on_ranks(2, 3)
def test_ranks_leave_no_file_behind(comm):
    """Those that end at the same time, too."""
    folder = f"{my_place().directory}/meetings"
    os.makedirs(folder, exist_ok=True)
    for i in range(40):
        _meet(comm, f"{folder}/{i}").close()
    comm.barrier()
    assert os.listdir(folder) == []


@on_ranks(2)
def test_ranks_meet_again_and_again_at_one_file(comm):
    for i in range(50):
        with _meet(comm, f"{my_place().directory}/again") as again:
            tensor = torch.full((3,), float(i))
            again.all_reduce(tensor)
            assert tensor.tolist() == [2.0 * i] * 3


def test_an_attempt_of_torchrun_does_not_meet_what_an_earlier_one_has_left(monkeypatch):
    store, parts = HashStore(), []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr(bootstrap, "_uses", {})  # every attempt is a process of its own
        parts.append(bootstrap.own_part(store, "env://"))
    parts[0].set("1/0", "a value of rank 0's")
    assert not parts[1].check(["1/0"])


def test_communicators_of_one_process_do_not_meet_at_one_place():
    store = HashStore()
    first, second = (bootstrap.own_part(store, "a place of this test alone") for _ in range(2))
    first.set("1/0", "a value of rank 0's")
    assert not second.check(["1/0"])
