"""Objects that ranks tell each other: what can be told, and that nothing is executed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fastcomm import FastcommError
from fastcomm.comm import objects
from fastcomm.comm.objects import broadcast_object, gather_objects, tellable
from tests.support.ranks import on_ranks


@tellable
class Told(NamedTuple):
    name: str
    size: torch.Size
    values: dict[str, torch.Tensor]


class Stranger:
    pass


class Unwilling:
    def __reduce__(self):
        raise ValueError("cannot be saved")


@pytest.mark.transports("shm", "group", "nccl")
@on_ranks(2)
def test_plain_data_and_tensors_are_told(comm):
    values = {"step": torch.tensor(3.0), "mean": torch.arange(6, dtype=torch.bfloat16).view(2, 3)}
    own = [Told(f"rank {comm.rank}", torch.Size([2, 3]), values), (None, 2**80, {1, 2}, b"raw")]
    for rank, (told, others) in enumerate(gather_objects(comm, own, "the test")):
        assert told.name == f"rank {rank}" and told.size == (2, 3)
        assert torch.equal(told.values["mean"], values["mean"])
        assert others == (None, 2**80, {1, 2}, b"raw")
    told = broadcast_object(comm, {"lr": 0.5}, 1, "the test", is_wanted=comm.rank == 0)
    assert told == ({"lr": 0.5} if comm.rank == 0 else None)


@pytest.mark.transports("shm", "group", "nccl")
@on_ranks(2)
def test_what_cannot_be_told_is_an_error_on_every_rank(comm):
    own = Stranger() if comm.rank == 1 else 3
    with pytest.raises(TypeError, match=r"the test: rank 1 cannot tell.*Stranger is not plain"):
        gather_objects(comm, own, "the test")
    with pytest.raises(TypeError, match=r"the test: rank 1 cannot tell.*cannot be saved"):
        gather_objects(comm, Unwilling() if comm.rank == 1 else 3, "the test")
    with pytest.raises(TypeError, match=r"the test: rank 1 cannot tell.*<lambda>"):
        gather_objects(comm, (lambda: 1) if comm.rank == 1 else 3, "the test")
    with pytest.raises(TypeError, match=r"the test: rank 1 cannot tell.*Stranger is not plain"):
        broadcast_object(comm, own, 1, "the test", is_wanted=True)
    assert gather_objects(comm, comm.rank, "the test") == [0, 1]


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.transports("shm")
@on_ranks(2)
def test_nothing_that_a_peer_has_sent_is_executed(comm, tmp_path):
    trap = tmp_path / "executed"

    def pack(value):
        file = io.BytesIO()
        torch.save(Trap(trap), file)
        return file.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(objects, "_packed", pack)
        with pytest.raises(FastcommError, match="rank 1 has sent getattr, which is not plain"):
            gather_objects(comm, 3, "the test")
    assert not trap.exists()
