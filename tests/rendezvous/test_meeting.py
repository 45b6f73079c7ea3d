"""The places where ranks meet, and what is left of them."""

from __future__ import annotations

import os

import torch

import fastcomm
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
