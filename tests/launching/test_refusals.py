"""Ranks that cannot be brought together: each is told why, and what to do."""

from __future__ import annotations

import os
import re
import resource
import socket
import warnings
from datetime import timedelta

import pytest

import fastcomm
from fastcomm import InitError
from fastcomm.launching import rendezvous
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, torchrun_env


def _init(place, rank=None, world_size=None, **options):
    rank = place.rank if rank is None else rank[place.rank]
    world_size = place.world_size if world_size is None else world_size[place.rank]
    point = os.environ.get("MEETING_POINT", place.init_method)
    options = {"init_method": point, "timeout": timedelta(seconds=10), **options}
    fastcomm.init(rank=rank, world_size=world_size, **options).barrier()


def assert_all_refused(outcomes, *words):
    for outcome in outcomes:
        assert outcome.is_a(InitError), outcome
        assert all(re.search(word, outcome.failure.message) for word in words), outcome


def test_a_rank_given_twice_among_three_is_refused_on_all():
    assert_all_refused(fresh_ranks(3, _init, (0, 1, 1)), "rank 1 was given to two processes")


def test_ranks_that_disagree_about_the_world_size_are_refused():
    outcomes = fresh_ranks(3, _init, None, (3, 3, 4))
    assert_all_refused(outcomes, "world_size", r"\b3\b", r"\b4\b")


def _init_with(place, backends):
    _init(place, backend=backends[place.rank])


def test_ranks_that_ask_for_different_backends_are_refused_on_all():
    outcomes = fresh_ranks(3, _init_with, ("auto", "auto", "hierarchical"))
    words = "rank 0, 1: shm; rank 2: hierarchical"
    assert_all_refused(outcomes, "different backends", words)


@pytest.mark.parametrize("rank, world_size", [(2, 2), (-1, 2), (0, 0), (5, 1)])
def test_a_rank_outside_the_world_is_refused(tmp_path, rank, world_size):
    init_method = f"file://{tmp_path}/store"
    with pytest.raises(InitError, match=f"got rank {rank} and world_size {world_size}"):
        fastcomm.init(init_method=init_method, rank=rank, world_size=world_size)


def test_a_rank_that_is_missing_is_named_after_the_timeout(tmp_path):
    init_method, timeout = f"file://{tmp_path}/store", timedelta(seconds=0.3)
    with pytest.raises(InitError, match=r"waited 0\.3 s .* for 2 ranks; missing: rank 0;"):
        fastcomm.init(init_method=init_method, rank=1, world_size=2, timeout=timeout)


def test_a_host_that_does_not_answer_is_an_error_without_pages_of_frames(capfd):
    port = torchrun_env(2)[0]["MASTER_PORT"]
    with pytest.raises(InitError, match=f"nobody answered at 127.0.0.1:{port} for 0.5 s") as error:
        fastcomm.init(
            init_method=f"tcp://127.0.0.1:{port}",
            rank=1,
            world_size=2,
            timeout=timedelta(seconds=0.5),
        )
    assert "frame #" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "init_method",
    [
        *("", "node1:80", "tcp://node1", "tcp://node1:99999", "tcp://node1:port", "tcp://node1:0"),
        *("tcp://[::1", "tcp://::1:80", "tcp://[node1]:80", "tcp://:80"),
        *("file://", "file:///", "file://folder/file"),
    ],
)
def test_a_meeting_point_that_is_none_is_refused_by_its_form(init_method):
    form = f"must be env://, tcp://host:port or file:///path; got {re.escape(repr(init_method))}"
    with pytest.raises(ValueError, match=form):
        fastcomm.init(init_method=init_method, rank=0, world_size=2)


def test_a_folder_is_no_meeting_point(tmp_path):
    with pytest.raises(InitError, match=f"{tmp_path} is a folder: name a file in it"):
        fastcomm.init(init_method=f"file://{tmp_path}", rank=0, world_size=2)
    with pytest.raises(TypeError, match="init_method must be a str, such as 'env://'; got PosixP"):
        fastcomm.init(init_method=tmp_path, rank=0, world_size=2)


def test_a_port_that_is_taken_is_an_error_without_pages_of_frames():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(InitError, match="cannot open the meeting point.*in use") as error:
            fastcomm.init(
                init_method=f"tcp://127.0.0.1:{taken.getsockname()[1]}",
                rank=0,
                world_size=2,
                timeout=timedelta(seconds=0.5),
            )
    assert "frame #" not in str(error.value)


def test_ranks_on_different_hosts_share_no_memory():
    env = [{"FASTCOMM_HOST_ID": host} for host in ("one", "one", "other")]
    outcomes = fresh_ranks(3, _init_with, ("shm",) * 3, env=env)
    assert_all_refused(outcomes, "host", "hierarchical", r"\b2\b")


def _init_with_small_files(place, backend):
    if place.rank == 1:  # rank 0 serves the store until the end
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as `ulimit -f 0`
    _init(place, backend=backend)


def test_memory_that_cannot_be_made_is_an_error_with_the_limit_to_raise():
    point = {"MEETING_POINT": f"tcp://127.0.0.1:{torchrun_env(2)[0]['MASTER_PORT']}"}
    outcomes = fresh_ranks(2, _init_with_small_files, "hierarchical", env=point)
    assert_all_refused(outcomes, "cannot make a file of", "see `ulimit -f`")


def _init_where_pids_are_others(place):
    pid = os.getpid
    os.getpid = lambda: pid() + 2**22  # as another pid namespace would number it
    _init(place)


def test_ranks_that_cannot_see_each_others_pids_are_told_of_their_namespaces():
    env = {"FASTCOMM_HOST_ID": "one"}
    outcomes = fresh_ranks(2, _init_where_pids_are_others, env=env)
    assert_all_refused(outcomes, "one pid namespace and one user: leave FASTCOMM_HOST_ID")


def _init_among_too_many(place):
    rendezvous.MAX_RANKS = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _init(place)
    return [str(one.message) for one in caught if "shared memory" in str(one.message)]


def test_rank_0_warns_where_a_host_has_more_ranks_than_can_share_memory():
    first, *others = values_of(fresh_ranks(2, _init_among_too_many))
    assert first == [
        "a host has 2 ranks, and shared memory takes 1: 'auto' takes Gloo (backend 'group') for "
        "all ranks. Start at most 1 ranks on a host"
    ]
    assert others == [[]]
