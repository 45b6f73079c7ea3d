"""What ranks announce to each other over a group, where it is damaged."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcomm import FastcommError
from fastcomm.control.announcement import Call
from fastcomm.transports.group.exchange import Exchange
from fastcomm.transports.group.shards import PAYLOAD_NBYTES, Announcement, Announcer
from tests.support.bodies import Place, communicator
from tests.support.ranks import fresh_ranks
from tests.support.transports import environment_of

BUCKET = Call("all_reduce", 300, torch.float32, torch.bfloat16, "mean", label=5, fingerprint=7)
REAL = BUCKET.packed() + struct.pack("=II", 2, False)


class Group:
    """Of rank 0 of 2, whose peer announces what the test says."""

    def __init__(self, head: bytes) -> None:
        self._head = list(head)

    def _allgather_base(self, frames: torch.Tensor, own: torch.Tensor) -> Any:
        theirs = own.clone()
        theirs[: len(self._head)] = torch.tensor(self._head, dtype=torch.uint8)
        frames.copy_(torch.cat([own, theirs]))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


def gathered(head: bytes, payload: torch.Tensor | None = None) -> Announcement:
    announcer = Announcer(2)
    announcer.group = Group(head)
    behind = () if payload is not None else (BUCKET, BUCKET)
    announcer.announce(SimpleNamespace(call=BUCKET, payload=payload, is_prepared=False), behind)
    return announcer.take()


def test_calls_are_gathered_over_the_group_of_the_tests():
    assert gathered(REAL).calls == [BUCKET, BUCKET] and gathered(REAL).n_fused == 2


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, len(REAL) - 1),
    st.binary(min_size=1, max_size=8),
    st.sampled_from([None, torch.zeros(PAYLOAD_NBYTES // 4)]),
)
def test_a_damaged_announcement_is_a_call_or_an_error_that_names_its_rank(place, wrong, payload):
    head = (REAL[:place] + wrong + REAL[place + len(wrong) :])[: len(REAL)]
    try:
        calls = gathered(head, payload)
    except FastcommError as error:
        assert str(error).startswith("rank 1 has announced ")
    else:
        assert str(calls.calls[1]) and 0 <= calls.n_fused <= 2


@pytest.mark.parametrize(("numel", "wire"), [(0, torch.int8), (2**60, torch.float32)])
def test_data_of_a_size_that_no_tensor_has_is_a_damaged_announcement(
    numel: int, wire: torch.dtype
) -> None:
    calls = [BUCKET, Call("all_reduce", numel, torch.float32, wire)]
    begun: Any = SimpleNamespace(calls=calls, index=1, begun=None, have_begun=(False, True))
    with pytest.raises(FastcommError, match="^rank 1 has announced 02.*, which is no collective$"):
        Exchange(0, [[0], [1]]).drain(begun)


def _reduce_what_the_other_has_not(place: Place) -> str:
    comm = communicator(place)
    with pytest.raises(FastcommError) as caught:
        if place.rank == 1:
            flat = comm.empty(4, dtype=torch.float32)
            options: dict[str, Any] = {"wire_dtype": None, "label": 9}
            bucket = comm.bind_bucket(flat, [flat[:3]], [0], **options)
            bucket.launch("mean", []).wait()
        else:
            comm.follow()
    return str(caught.value)


def test_a_rank_without_data_refuses_a_bucket_that_it_has_not():
    outcomes = fresh_ranks(
        2, _reduce_what_the_other_has_not, transport="group", env=environment_of("group", 0)
    )
    for outcome in outcomes:
        assert "rank 0 has no bucket like that of all_reduce of 4" in outcome.value, outcome
