"""What ranks read from the store they meet at, from each other's processes and from the launcher's
folder, where it is damaged: an error that says so, and never another one.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from fastcomm import FastcommError, InitError
from fastcomm.comm import forms
from fastcomm.launching import bootstrap, membership, runner
from fastcomm.transports.shm.communicator import ShmCommunicator
from tests.support.damage import damaged_json, damaged_values

HERE = bootstrap.host_identity()
SOON = timedelta(seconds=0.01)


TOLD = "what rank 1 has got from rank "
# By key of the store: what lies there, and what rank 1 may say when it is damaged.
MET = {
    "1/all": ([json.dumps({"pid": pid, "cores": [0, 1]}) for pid in (7, 8)], (TOLD,)),
    "claim/1": (
        [7, HERE],
        ("was given to two processes", "the claim to rank 1 in the store cannot be read: "),
    ),
    "world_size": (2, ("rank 1 was started with world_size", TOLD)),
    "failed": ("rank 0 failed", ("",)),
}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(MET)), st.data())
def test_ranks_that_meet_say_what_is_damaged(key, data):
    real, words = MET[key]
    store = HashStore()
    store.set("1/all", json.dumps(MET["1/all"][0]))
    store.set(key, data.draw(damaged_json(real)))
    form = {"pid": forms.PID, "cores": [forms.NUMBER]}
    try:
        met = bootstrap.StoreBootstrap(store, 1, 2, SOON)
        seen = met.exchange({"pid": 8, "cores": [1]}, form)[0]
    except InitError as error:
        assert any(one in str(error) for one in words)
    else:
        assert 0 < seen["pid"] < 2**31


MEMBERS = [[0, 0, 7, HERE], [1, None, 8, "another host"]]
MEETING = ["fastcomm/0/ranks/0", 1, "shm", 2, 2, MEMBERS]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["came/1", "leader", "members"]), st.data())
def test_ranks_that_meet_anew_say_which_note_is_damaged(key, data):
    real = {"came/1": [[1, 1, 8, "another host"], 0], "leader": 0, "members": MEETING}[key]
    note = data.draw(damaged_json(real))
    me = membership.Member(0, 0, os.getpid(), HERE)
    other = membership.Member(1, 1, 8, "another host")
    before = membership.Meeting("prefix", 0, "shm", 2, 2, [me, other])
    point = bootstrap.MeetingPoint(urlparse("env://"), HashStore())
    PrefixStore("prefix/1", point.store).set(key, note)
    point.store.set("prefix/n_rebuilt", "1")
    met = bootstrap.StoreBootstrap(HashStore(), 0, 2, SOON)
    of_ranks = membership.Membership(point, met, lambda *_: None, before)
    began = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(membership, "_GRACE_S", 0.02)
            of_ranks._hold(before, {1}, 1, SOON)
    except FastcommError as error:
        assert " cannot be read: " in str(error)
    assert time.monotonic() - began < 20


# ---- what ranks tell each other of their processes -----------------------------------------------


class Answering:
    """The bootstrap of rank 0 of 2, whose peer answers with what the test says."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def exchange(self, value: Any, form: forms.Form) -> list[Any]:
        if value == "mapped":
            return [value, value]
        answer = json.loads(json.dumps({**value, **self._answer}))
        return [value, forms.checked(answer, form, "what rank 1 has sent", InitError)]


def share_memory_with(answer: Any) -> None:
    ShmCommunicator(0, 2, 0, Answering(answer), timedelta(seconds=1)).abort()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["pid", "fd", "nbytes", "cores"]),
    st.one_of(st.integers(-5, 70), st.integers(-(2**70), 2**70), damaged_values([1, 2]), st.text()),
)
def test_memory_that_a_peer_has_not_is_no_memory(key, value):
    assume(not (key == "pid" and isinstance(value, int) and 0 < value < 2**22))  # may be anybody
    try:
        share_memory_with({key: value})
    except InitError as error:
        assert "rank 1" in str(error) or "of its peers" in str(error)


def test_memory_that_is_too_short_is_refused_before_it_is_touched():
    with pytest.raises(InitError, match=r"the memory of rank 1 has no \d+ bytes"):
        share_memory_with({"nbytes": 2**62})
    with pytest.raises(InitError, match=r"the memory of rank 1 has no 4096 bytes"):
        share_memory_with({"nbytes": 4096})


def test_a_file_of_a_peers_own_is_not_taken_for_its_memory(tmp_path):
    path = tmp_path / "a checkpoint"
    path.write_bytes(b"\0" * 2**20)
    with path.open("r+b") as file, pytest.raises(InitError, match="is no memory of fastcomm"):
        share_memory_with({"fd": file.fileno()})


# ---- the launcher's folder -----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(damaged_json([1.5, True, 3, "rank 1 (pid 7) raised ValueError: out of luck"]))
def test_what_a_rank_has_left_of_its_failure_is_one_though_unreadable(tmp_path_factory, left):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "raised-1").write_bytes(left)
    (folder / "raised-me").write_bytes(left)
    raised = runner.raised_in(folder)
    assert set(raised) == {1}
    assert isinstance(raised[1].text, str) and isinstance(raised[1].exit_code, int)
    assert min(raised.values()) == raised[1]
