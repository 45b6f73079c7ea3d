"""The places where ranks meet, and what is left of them."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

import fastcomm
from fastcomm import InitError
from fastcomm.launching import bootstrap, rendezvous
from fastcomm.launching.timed_store import TimedStore
from tests.support.bodies import Place, my_place, note, wait_for_note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks

TIMEOUT = timedelta(seconds=20)


def _meet(place: Place, path: str) -> fastcomm.Communicator:
    return fastcomm.init(
        "shm", init_method=f"file://{path}", rank=place.rank, world_size=place.world_size
    )


def _meet_at_many_files(place, folder):
    for i in range(20):
        _meet(place, f"{folder}/{i}").close()
    # The last to drop a file removes it: another may be opening it, to meet there again.
    return len(os.listdir(folder))


def test_ranks_leave_no_file_behind_when_they_end(tmp_path):
    """Those that end at the same time, too."""
    found = values_of(fresh_ranks(3, _meet_at_many_files, str(tmp_path)))
    assert found == [20] * 3
    assert os.listdir(tmp_path) == []


@on_ranks(2)
def test_ranks_meet_again_and_again_at_one_file(comm):
    for i in range(20):
        with _meet(my_place(), f"{my_place().directory}/again") as again:
            tensor = torch.full((3,), float(i))
            again.all_reduce(tensor)
            assert tensor.tolist() == [2.0 * i] * 3


@on_ranks(2)
def test_ranks_meet_again_where_the_user_has_removed_the_file(comm):
    path = f"{my_place().directory}/removed"
    for _ in range(3):
        _meet(my_place(), path).close()
        comm.barrier()
        if comm.rank == 1:
            Path(path).unlink(missing_ok=True)
        comm.barrier()


def _enter_part(store):
    prefix, pass_on = bootstrap.enter_part(TimedStore(store, TIMEOUT), 0)
    return PrefixStore(prefix, store), pass_on


def test_an_attempt_of_torchrun_does_not_meet_what_an_earlier_one_has_left(monkeypatch):
    store, parts = HashStore(), []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        monkeypatch.setattr(bootstrap, "_PROCESS", attempt)  # every attempt is one of its own
        parts.append(_enter_part(store)[0])
    parts[0].set("1/0", "a value of rank 0's")
    assert not parts[1].check(["1/0"])


def test_a_process_that_died_while_it_waited_does_not_keep_its_rank_from_the_next(monkeypatch):
    store = HashStore()
    point = bootstrap.MeetingPoint(urlparse("env://"), store)
    dead = subprocess.Popen(["true"])
    dead.wait()
    with monkeypatch.context() as earlier:
        earlier.setattr(os, "getpid", lambda: dead.pid)
        point.bootstrap(1, 2, timedelta(seconds=5))
    assert point.waiting([0, 1]) == {}
    met = point.bootstrap(1, 2, timedelta(seconds=5))
    assert point.waiting([0, 1]) == {1: [os.getpid(), bootstrap.host_identity()]}
    met.look()  # nobody has failed


def _meet_in_turns(place):
    """Ranks 0 and 1 meet, then ranks 0 and 2, the latter as a rank 1 that has met nobody."""
    for other, address in ((1, "first"), (2, "second"), (1, "again"), (2, "again")):
        if place.rank == 0:
            note(place, **{f"{address} with {other}": ""})
        if place.rank in (0, other):
            wait_for_note(place, f"{address} with {other}")
            with fastcomm.init(
                "shm",
                init_method=f"file://{place.directory}/{address}",
                rank=min(place.rank, 1),
                world_size=2,
            ) as comm:
                comm.barrier()


def test_a_process_that_has_met_others_meets_one_that_has_met_nobody():
    """At a place of its own, and at the same one."""
    values_of(fresh_ranks(3, _meet_in_turns))


def _fail_and_meet(place):
    def meet() -> None:
        with fastcomm.init(
            "shm", init_method=place.init_method, rank=place.rank, world_size=place.world_size
        ) as comm:
            comm.barrier()

    def fail() -> None:
        raise OSError("out of luck")

    if place.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous, "_host_identity", fail)
            with pytest.raises(OSError):
                meet()
        note(place, failed="")
        wait_for_note(place, "heard")
    else:
        wait_for_note(place, "failed")
        with pytest.raises(InitError, match="rank 1 failed in fastcomm.init: out of luck"):
            meet()
        note(place, heard="")
    meet()


def test_who_comes_after_a_failure_learns_of_it_and_all_can_meet_then():
    values_of(fresh_ranks(2, _fail_and_meet))
