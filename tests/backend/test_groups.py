"""Groups of the backend: parts of the ranks, one beside Gloo, one after another."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
import torch.distributed as dist

from fastcomm.errors import InitError
from tests.support import process_groups
from tests.support.outcomes import values_of
from tests.support.process_groups import start, world
from tests.support.ranks import fresh_ranks, on_ranks

ranks = process_groups.ranks  # a pool of this module's own


@on_ranks(3)
def test_sub_groups_have_a_fast_path_of_their_own(comm):
    world()
    for members in ([0, 1], [0, 2], [1, 2]):
        group = dist.new_group(members)
        if comm.rank in members:
            tensor = torch.tensor([2 * comm.rank])
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
            assert tensor.item() == sum(members)
            dist.broadcast(tensor, members[1], group=group)
            dist.destroy_process_group(group)
    dist.barrier()


def _group_beside_gloo(place):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=place.init_method, rank=place.rank, world_size=place.world_size
    )
    group = dist.new_group(backend="fastcomm")
    integers = torch.tensor([2 * place.rank])
    dist.all_reduce(integers, dist.ReduceOp.AVG, group=group)
    dist.destroy_process_group()
    return integers.item()


def test_a_group_may_be_made_beside_a_default_one_over_gloo():
    assert [outcome.value for outcome in fresh_ranks(2, _group_beside_gloo)] == [1, 1]


@on_ranks(2)
def test_the_group_says_its_name(comm):
    assert dist.get_backend(world()) == "fastcomm"
    assert world().name() == "fastcomm"
    assert not world().supports_reconfigure


def _begin_quietly(place):
    with open(f"{place.directory}/stderr{place.rank}", "w+") as stderr:
        os.dup2(stderr.fileno(), 2)
        start(place)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        stderr.seek(0)
        return stderr.read()


def test_a_group_begins_and_ends_without_a_word():
    assert [outcome.value for outcome in fresh_ranks(2, _begin_quietly)] == ["", ""]


def _ask_for_a_group_that_can_be_reconfigured(place):
    with pytest.raises(InitError, match="cannot be reconfigured: leave enable_reconfigure out"):
        dist.init_process_group(
            "fastcomm",
            init_method=f"file://{place.directory}/backend",
            rank=place.rank,
            world_size=place.world_size,
            enable_reconfigure=True,
        )


@pytest.mark.skipif(
    "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters,
    reason="no group can be reconfigured before torch 2.15",
)
def test_a_group_that_can_be_reconfigured_is_refused_at_once():
    values_of(fresh_ranks(2, _ask_for_a_group_that_can_be_reconfigured))


def _begin_and_end_twice(place):
    for time in ("first", "second"):
        start(place, file=f"{time} time")
        first = dist.new_group([0, 1])
        pair = dist.new_group([0, place.world_size - 1])
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        for group in (first, pair):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()
        dist.destroy_process_group()
    return int(tensor[0])


def test_ranks_begin_again_after_destroy_process_group():
    assert [outcome.value for outcome in fresh_ranks(3, _begin_and_end_twice)] == [3, 3, 3]
