"""Objects that ranks tell each other: what can be told, and that nothing is executed."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastcomm import FastcommError
from fastcomm.comm import objects
from fastcomm.comm.objects import broadcast_object, gather_objects, tellable
from tests.support.damage import damaged_bytes
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
        return objects._sealed(file.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(objects, "_packed", pack)
        with pytest.raises(FastcommError, match="rank 1 has sent getattr, which is not plain"):
            gather_objects(comm, 3, "the test")
    assert not trap.exists()


# ---- what is damaged on its way ------------------------------------------------------------------


class Wire:
    """Rank 0 of 2, whose peer answers with what the test says: by turns a size and an object, or
    what it broadcasts.
    """

    rank, world_size, device = 0, 2, torch.device("cpu")

    def __init__(self, size: int, sent: bytes) -> None:
        self._answers = [size.to_bytes(8, "little", signed=True), sent]

    def check(self) -> None:
        pass

    def all_gather_single(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        mine = inp.contiguous().view(torch.uint8)
        theirs = self._answers.pop(0)[: len(mine)].ljust(len(mine), b"\0")
        both = torch.cat([mine, torch.frombuffer(bytearray(theirs), dtype=torch.uint8)])
        out.view(torch.uint8).copy_(both)


VALUE = {"lr": 0.5, "state": [torch.arange(6.0), torch.ones(2, 3, dtype=torch.int8)], "n": 2**70}
REAL = objects._packed(("the test", None, VALUE))


def told_over(size: int, sent: bytes) -> list[object]:
    return gather_objects(Wire(size, sent), VALUE, "the test")


def test_an_object_arrives_over_the_wire_of_the_tests():
    own, theirs = told_over(len(REAL), REAL)
    assert torch.equal(own["state"][0], theirs["state"][0]) and theirs["n"] == 2**70


@settings(max_examples=150, deadline=None)
@given(damaged_bytes(REAL))
def test_an_object_that_is_damaged_is_an_error_that_names_its_rank(sent):
    assume(sent != REAL)
    with pytest.raises(FastcommError, match="rank 1 has (sent|announced)"):
        told_over(len(sent), sent)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_that_was_damaged_before_it_was_sealed_does_no_harm(data):
    """What another program, or another version of torch, may have written."""
    records = zipfile.ZipFile(io.BytesIO(REAL[objects._SEAL_NBYTES :]))
    changed = data.draw(st.sampled_from(records.namelist()))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as copy:
        for name in records.namelist():
            content = records.read(name)
            copy.writestr(name, data.draw(damaged_bytes(content)) if name == changed else content)
    sent = objects._sealed(file.getvalue())
    try:
        told_over(len(sent), sent)
    except FastcommError as error:
        assert "rank 1" in str(error) or "rank 0" in str(error)


@pytest.mark.parametrize("size", [-1, 0, -(2**63), 2**62, 2**63 - 1])
def test_an_impossible_size_of_an_object_names_the_rank_that_has_announced_it(size):
    with pytest.raises(FastcommError, match=f"rank 1 has announced an object of {size} bytes"):
        told_over(size, REAL)


@pytest.mark.parametrize("told", [None, (1,), ("5", None), (5, 6), {"a": 1}, (2**62, None)])
def test_a_broadcast_of_something_else_is_an_error_that_names_its_rank(told):
    sent = objects._packed(("the test", None, told))
    with pytest.raises(FastcommError, match="rank 1 has (sent|announced)"):
        broadcast_object(Wire(len(sent), sent), None, 1, "the test", is_wanted=True)
