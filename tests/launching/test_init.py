"""fastcomm.init: the ways in which ranks find each other, and what it refuses at the call."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, InitError
from fastcomm.comm.who import Process
from fastcomm.launching import rendezvous
from tests.support.bodies import gloo
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, torchrun_env
from tests.support.reference import check_all_reduce


def outcomes_of(world_size, body, *args, **options):
    """What the body returned, by rank, in fresh processes."""
    return values_of(fresh_ranks(world_size, body, *args, **options))


def _describe(comm):
    check_all_reduce(comm, where="comm.empty")
    return comm.rank, comm.world_size, comm.local_rank, str(comm.device), comm.backend


def _init_from_environment(place):
    with fastcomm.init() as comm:
        return _describe(comm)


def test_init_as_torchrun_starts_the_ranks():
    env = [
        {**variables, "LOCAL_RANK": str(5 + rank)} for rank, variables in enumerate(torchrun_env(2))
    ]
    described = outcomes_of(2, _init_from_environment, env=env)
    assert described == [(0, 2, 5, "cpu", "shm"), (1, 2, 6, "cpu", "shm")]


class _Connected:
    """In place of a communicator on a device that this machine lacks."""

    rank, processes, backend = 0, (Process(0, 0),), "nccl"

    def __init__(self, device):
        self.device = device

    def barrier(self):
        pass


def _init_on_cuda(monkeypatch, n_visible, local_rank, **options):
    """The device that init() chooses, and those it makes current."""
    made_current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made_current.append(str(device)))
    monkeypatch.setattr(
        rendezvous,
        "NcclCommunicator",
        lambda *of_rank: _Connected(of_rank[5]),
    )
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    comm = fastcomm.init("nccl", world_size=1, **options)
    return str(comm.device), made_current


@pytest.mark.parametrize(
    "n_visible, local_rank, expected",
    [(8, "3", "cuda:3"), (1, "3", "cuda:0"), (1, None, "cuda:0"), (8, None, "cuda:0")],
)
def test_a_rank_s_device_is_that_of_its_local_rank_or_the_only_one(
    monkeypatch, n_visible, local_rank, expected
):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert _init_on_cuda(monkeypatch, n_visible, local_rank) == (expected, [expected])


def test_a_device_that_is_named_becomes_current(monkeypatch):
    assert _init_on_cuda(monkeypatch, 8, "3", device="cuda:5") == ("cuda:5", ["cuda:5"])


def _split_two_of_one_group(place):
    sums = []
    with fastcomm.init(group=gloo()) as one, fastcomm.init(group=gloo()) as other:
        for comm in (one, other, one):
            with comm.split(place.rank % 2) as part:
                tensor = torch.tensor([place.rank])
                part.all_reduce(tensor)
                sums.append(tensor.item())
    return sums


def test_communicators_of_one_group_split_each_by_itself():
    assert outcomes_of(4, _split_two_of_one_group) == [[2] * 3, [4] * 3, [2] * 3, [4] * 3]


def _init_in_a_part_of_a_group(place):
    import torch.distributed as dist

    gloo()
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with fastcomm.init(group=parts[place.rank % 2]) as comm:
        tensor = torch.tensor([place.rank])
        comm.all_reduce(tensor)
        return comm.rank, comm.world_size, tensor.item()


def test_init_from_a_part_of_the_ranks():
    assert outcomes_of(4, _init_in_a_part_of_a_group) == [
        (0, 2, 2),
        (0, 2, 4),
        (1, 2, 2),
        (1, 2, 4),
    ]


FIRST = {"rank": 0, "world_size": 2}


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"backend": "smoke signals"}, ValueError, "smoke signals"),
        ({"init_method": "http://somewhere"}, ValueError, "http://somewhere"),
        ({"init_method": "tcp://127.0.0.1:29500"}, ValueError, "rank= and world_size="),
        ({"init_method": "file:///tmp/somewhere", "rank": 0}, ValueError, "rank= and world_size="),
        ({"init_method": "file:///nowhere/x", **FIRST}, InitError, "/nowhere is not a folder"),
        ({"init_method": "file:///tmp/x", **FIRST, "timeout": 5}, TypeError, "timedelta"),
        ({"device": "cuda"}, FastcommError, "cuda"),
    ],
)
def test_init_refuses_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        fastcomm.init(**options)


def test_a_world_of_one_under_a_launcher_is_told_whose_its_rank_is(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InitError, match="rank 1 and world_size 1; leave out both where a launcher"):
        fastcomm.init(world_size=1)


@pytest.mark.parametrize("backend", ["auto", "shm", "group", "hierarchical"])
def test_one_rank_needs_neither_launcher_nor_meeting_point(monkeypatch, backend):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with fastcomm.init(backend, world_size=1) as comm:
        assert isinstance(comm, fastcomm.Communicator)
        assert (comm.rank, comm.world_size, comm.local_rank) == (0, 1, 0)
        tensor = torch.tensor([3.0])
        comm.all_reduce(tensor, "mean")
        assert tensor.item() == 3


def _one_fails_alone_while_the_group_meets(place):
    def fail():
        raise OSError("out of luck")

    group = gloo()
    with pytest.MonkeyPatch.context() as patch:
        if place.rank == 1:
            patch.setattr(rendezvous, "_host_identity", fail)
        try:
            comm = fastcomm.init("shm", group=group)  # rank 0 may come when rank 1 tries again
        except (InitError, OSError) as error:
            assert "out of luck" in str(error)
            patch.undo()
            comm = fastcomm.init(group=group)
    with comm:
        return comm.world_size


def test_a_failure_of_one_while_the_others_exchange_leaves_the_group_in_step():
    assert outcomes_of(2, _one_fails_alone_while_the_group_meets) == [2, 2]


def _warnings_of_init(place, threads, cores, cores_of_others):
    os.environ.pop("OMP_NUM_THREADS")
    own = (0, os.getpid())
    os.sched_getaffinity = lambda pid: cores if pid in own else cores_of_others
    torch.get_num_threads = lambda: threads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcomm.init(
            init_method=place.init_method, rank=place.rank, world_size=place.world_size
        ):
            return [str(one.message) for one in caught if one.filename == __file__]


SIX, SIX_OTHERS = set(range(6)), set(range(6, 12))


def test_one_rank_of_a_host_warns_of_more_threads_than_cores():
    of_first, of_second = outcomes_of(2, _warnings_of_init, 6, SIX, SIX)
    (warning,) = of_first
    assert warning.startswith("2 ranks have 6 threads each, and 6 cores in all: ")
    assert "OMP_NUM_THREADS=3 " in warning and of_second == []


def test_ranks_that_are_bound_to_cores_of_their_own_may_have_as_many_threads():
    assert outcomes_of(2, _warnings_of_init, 6, SIX, SIX_OTHERS) == [[], []]
