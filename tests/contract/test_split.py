"""Parts of a communicator: which ranks they have, in which order, and that they are as good as any
other communicator.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcomm
from fastcomm.launching import rendezvous
from tests.support.ranks import on_ranks
from tests.support.reference import check_all_reduce
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


def ranks_of(part, comm):
    """The ranks of `comm` that are in the part, by their rank there."""
    own = torch.tensor([comm.rank], device=part.device)
    ranks = torch.empty(part.world_size, dtype=own.dtype, device=part.device)
    part.all_gather_single(ranks, own)
    return ranks.tolist()


@over(4)
@on_ranks()
def test_ranks_of_one_color_form_a_communicator(comm):
    with comm.split(comm.rank % 2) as part:
        assert (part.rank, part.world_size) == (comm.rank // 2, 2)
        assert ranks_of(part, comm) == [comm.rank % 2, comm.rank % 2 + 2]
        check_all_reduce(part, 5000)
    check_all_reduce(comm, 5000)


@over(4)
@on_ranks()
def test_keys_order_the_ranks_and_equal_ones_leave_them_as_they_are(comm):
    with comm.split(7, key=-comm.rank // 2) as part:
        assert ranks_of(part, comm) == [3, 1, 2, 0]


@over(3)
@on_ranks()
def test_a_rank_without_a_color_is_in_no_part(comm):
    part = comm.split(None if comm.rank == 1 else 0)
    assert (part is None) == (comm.rank == 1)
    if part is not None:
        assert ranks_of(part, comm) == [0, 2]
        part.close()
    again = comm.split(0)  # the ranks have split equally often
    assert ranks_of(again, comm) == [0, 1, 2]
    again.close()


@over(4)
@on_ranks()
def test_a_part_splits_again_and_outlives_the_whole_split(comm):
    with comm.split(comm.rank // 2) as half, half.split(half.rank) as alone:
        assert (alone.rank, alone.world_size) == (0, 1)
        check_all_reduce(alone, 10)
        check_all_reduce(half, 10)
        with pytest.raises(fastcomm.FastcommError, match="rebuild.. takes ranks that"):
            half.rebuild()


@over(4)
@on_ranks()
def test_a_reducer_averages_over_its_part(comm):
    with comm.split(comm.rank % 2) as part:
        model = nn.Linear(3, 1, bias=False).to(part.device)
        fastcomm.Reducer(part).attach(model)
        model(torch.full((1, 3), float(comm.rank), device=part.device)).sum().backward()
        assert model.weight.grad.tolist() == [[comm.rank % 2 + 1.0] * 3]


@over(2)
@on_ranks()
def test_a_rank_that_fails_in_a_split_is_named_and_the_whole_stays_as_it_is(comm):
    def fail(*_, **__):
        raise OSError("out of luck")

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(rendezvous, "_neighbours", fail)
        with pytest.raises((OSError, fastcomm.InitError), match="out of luck"):
            comm.split(0)
    check_all_reduce(comm, 10)
    with comm.split(0) as part:
        check_all_reduce(part, 10)


@over(2)
@on_ranks()
def test_colors_and_keys_are_integers(comm):
    for color, key in (("a", 0), (0, None), (0.5, 0)):
        wrong = (color, key) if comm.rank else (0, 0)
        with pytest.raises(TypeError, match="rank 1: split.. takes integers as color and key"):
            comm.split(*wrong)  # on every rank, though one alone is wrong
    check_all_reduce(comm, 10)


@over(shm=(2,), group=(2,), hierarchical=(2,))  # over NCCL it would end what all tests use
@on_ranks()
def test_a_split_of_one_rank_alone_is_a_mismatch(comm):
    with pytest.raises(fastcomm.MismatchError):
        comm.split(0) if comm.rank else comm.all_reduce(torch.ones(1000, device=comm.device))
