"""Ranks that call different collectives: all of them hear of it, and of both sides."""

from __future__ import annotations

import time

import pytest
import torch

import fastcomm
from fastcomm import AbandonedError, MismatchError
from fastcomm.comm.collective import bucket_label
from tests.contract import assert_ended
from tests.support.bodies import hear_of_it
from tests.support.ranks import on_ranks
from tests.support.reference import OPS, check_all_reduce, placed
from tests.support.transports import EVERY_TRANSPORT, over

pytestmark = pytest.mark.usefixtures("transport")


def _all_reduce(comm, numel=100, dtype=torch.float32, op="sum"):
    comm.all_reduce(torch.zeros(numel, dtype=dtype), op)


def _coalesced(comm, *numels, dtype=torch.float32, op="sum"):
    comm.all_reduce_coalesced([torch.zeros(numel, dtype=dtype) for numel in numels], op)


# What all ranks but the last call, what the last one calls, and how messages name the two.
MISMATCHES = {
    "op": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, op="max"),
        "100 float32.*op sum",
        "100 float32.*op max",
    ),
    "size": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, 101),
        "100 float32",
        "101 float32",
    ),
    "kind": (
        lambda comm: _all_reduce(comm),
        lambda comm: comm.broadcast(torch.zeros(100)),
        "all_reduce of 100 float32",
        "broadcast of 100 float32",
    ),
    "source": (
        lambda comm: comm.broadcast(torch.zeros(4), 0),
        lambda comm: comm.broadcast(torch.zeros(4), 1),
        "broadcast.*from rank 0",
        "broadcast.*from rank 1",
    ),
    "path": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, 65_537),
        "100 float32",
        "65537 float32",
    ),
    "dtype": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, dtype=torch.int32),
        "100 float32",
        "100 int32",
    ),
    "barrier": (
        lambda comm: _all_reduce(comm),
        lambda comm: comm.barrier(),
        "all_reduce of 100 float32",
        "barrier",
    ),
    "gather and scatter": (
        lambda comm: comm.all_gather_single(torch.zeros(12 * comm.world_size), torch.zeros(12)),
        lambda comm: comm.reduce_scatter_single(
            torch.zeros(12 // comm.world_size), torch.zeros(12)
        ),
        "all_gather_single of 12",
        "reduce_scatter_single of 12",
    ),
    "root": (
        lambda comm: _gather(comm, 0),
        lambda comm: _gather(comm, 1),
        "gather of 12 float32 elements to rank 0",
        "gather of 12 float32 elements to rank 1",
    ),
    "parts": (
        lambda comm: _scatter(comm, 12),
        lambda comm: comm.all_to_all_single(
            torch.zeros(12 * comm.world_size), torch.zeros(12 * comm.world_size)
        ),
        "scatter of 12 float32 elements from rank 0",
        "all_to_all_single of",
    ),
    "sizes of many": (
        lambda comm: _coalesced(comm, 2, 3),
        lambda comm: _coalesced(comm, 3, 2),
        r"5 float32 elements, op sum in 2 tensors \(sizes",
        r"5 float32 elements, op sum in 2 tensors \(sizes.*checksum of \[t\.numel\(\)",
    ),
    "sizes of many that are told apart by few bits": (
        lambda comm: _coalesced(comm, 2, 110, 145),
        lambda comm: _coalesced(comm, 46, 142, 69),
        "257 float32 elements, op sum in 3 tensors",
        "257 float32 elements, op sum in 3 tensors",
    ),
    "number of many": (
        lambda comm: _coalesced(comm, 30_000, 40_000),
        lambda comm: _coalesced(comm, 30_000, 40_000, 0),
        "70000 float32 elements, op sum in 2 tensors",
        "70000 float32 elements, op sum in 3 tensors",
    ),
    "many and one": (
        lambda comm: _coalesced(comm, 100),
        lambda comm: _all_reduce(comm),
        "100 float32 elements, op sum in 1 tensor ",
        "100 float32 elements, op sum",
    ),
    "op of many": (
        lambda comm: _coalesced(comm, 2, 3),
        lambda comm: _coalesced(comm, 2, 3, op="max"),
        "op sum in 2 tensors",
        "op max in 2 tensors",
    ),
}


def _gather(comm, dst):
    out = torch.zeros(12 * comm.world_size) if comm.rank == dst else None
    comm.gather(out, torch.zeros(12), dst)


def _scatter(comm, numel):
    inp = torch.zeros(numel * comm.world_size) if comm.rank == 0 else None
    comm.scatter(torch.zeros(numel), inp)


def cases():
    """Over NCCL a mismatch is found by the ranks' notes after seconds, whatever it is about: there
    only what the notes tell apart.
    """
    some = ("op", "size", "gather and scatter", "source", "op of many")
    for transport in EVERY_TRANSPORT:
        for world_size in (2, 3) if transport == "shm" else (3,):
            for case in some if transport == "nccl" else MISMATCHES:
                yield transport, world_size, case


def _disagree(comm, case):
    usual, other, _, _ = MISMATCHES[case]
    before = time.monotonic()
    try:
        (other if comm.rank == comm.world_size - 1 else usual)(comm)
        hear_of_it(comm)
    finally:
        assert time.monotonic() - before < 6
        assert_ended(comm)


@pytest.mark.parametrize("transport, world_size, case", list(cases()), indirect=["transport"])
def test_ranks_that_disagree_all_hear_of_it_and_of_both_sides(ranks, transport, world_size, case):
    _, _, usual, other = MISMATCHES[case]
    survives = transport != "nccl"
    ranks.raises(
        world_size,
        MismatchError,
        _disagree,
        case,
        match=f"rank 0: .*{usual}.*rank {world_size - 1}: .*{other}",
        survives=survives,
    )
    ranks(world_size, check_all_reduce)


@over(2, nccl=())
@on_ranks()
def test_a_rank_that_passes_splits_alone_is_told_which_call_it_was(comm):
    n = comm.world_size
    splits = ([2] * n, [2] * n) if comm.rank == 1 else ()
    words = "all_to_all_single of 4.*all_gather_single of 4" + (
        r".*in all_to_all_single\(\) with splits" if comm.rank == 1 else ""
    )
    with pytest.raises(MismatchError, match=f"(?s){words}|in all_to_all_single"):
        comm.all_to_all_single(torch.zeros(2 * n), torch.zeros(2 * n), *splits)
    check_all_reduce(comm, 100)


@over(2, 3)
@on_ranks()
def test_parts_that_others_do_not_expect_are_named_on_every_rank(comm):
    n = comm.world_size
    out_splits = [2] * n
    if comm.rank == 1:
        out_splits[0] = 3
    out = torch.zeros(sum(out_splits), 5)
    words = "rank 0 sends 10 elements to rank 1, which expects 15"
    with pytest.raises(MismatchError, match=words):
        comm.all_to_all_single(out, torch.zeros(2 * n, 5), out_splits, [2] * n)
    check_all_reduce(comm, 100)


def _disagree_about_one_of_many(comm):
    tensors = [torch.ones(100 * 4**i) for i in range(6)]
    works = [
        comm.all_reduce(tensor, "max" if comm.rank == 0 and i == 3 else "sum", async_op=True)
        for i, tensor in enumerate(tensors)
    ]
    outcomes = []
    for work in works:
        try:
            work.wait()
            outcomes.append("done")
        except MismatchError:
            outcomes.append("mismatch")
    agreed = [
        tensor for tensor, outcome in zip(tensors, outcomes, strict=True) if outcome == "done"
    ]
    assert all((tensor == comm.world_size).all() for tensor in agreed)
    return outcomes


@over(3, nccl=())
def test_a_mismatch_ends_one_collective_and_no_other(ranks, world_size):
    wanted = ["done", "done", "done", "mismatch", "done", "done"]
    assert ranks(world_size, _disagree_about_one_of_many) == [wanted] * 3


@over(2, nccl=())
@on_ranks()
def test_a_tensor_of_a_mismatch_is_left_as_it_was(comm):
    for numel in (100, 5000, 300_001):
        for where in ("comm.empty", "ordinary", "mixed"):
            tensor = placed(comm, where, torch.full((numel,), 3.0))
            with pytest.raises(MismatchError):
                comm.all_reduce(tensor, OPS[comm.rank])
            assert (tensor == 3.0).all()
            many = list(tensor.split(numel // 3))
            with pytest.raises(MismatchError):
                comm.all_reduce_coalesced(many, OPS[comm.rank])
            assert (tensor == 3.0).all()


# Over NCCL nobody compares what fits together.


@over(2, nccl=())
@on_ranks()
def test_ranks_that_launch_different_buckets_hear_of_it(comm):
    flat = comm.empty(101, dtype=torch.float32).zero_()
    buckets = [
        comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=None, label=bucket_label(0, i))
        for i in range(2)
    ]
    with pytest.raises(MismatchError, match="bucket 0 of reducer 0.*bucket 1 of reducer 0"):
        buckets[comm.rank].launch("sum", []).wait()
    check_all_reduce(comm)


@over(2, nccl=())
@on_ranks()
def test_ranks_that_train_different_models_hear_of_it(comm):
    models = [torch.nn.Linear(3, 3) for _ in range(2)]
    first, second = [fastcomm.Reducer(comm).attach(model) for model in models]
    assert second.core.number == first.core.number + 1
    words = f"of reducer {first.core.number}.*of reducer {second.core.number}"
    with pytest.raises(MismatchError, match=words):
        models[comm.rank](torch.ones(1, 3)).sum().backward()


@over(2, nccl=())
@on_ranks()
def test_a_rank_past_its_last_backward_is_told_of_uneven_data_like_the_others(comm):
    model = torch.nn.Linear(3, 3)
    reducer = fastcomm.Reducer(comm).attach(model)
    with pytest.raises(MismatchError, match=r"data has ended earlier.*reducer\.join\(\)") as raised:
        if comm.rank == 0:
            model(torch.ones(1, 3)).sum().backward()
        else:
            comm.barrier()
    assert "set_weight" not in str(raised.value)
    if comm.rank == 1:  # whose peer has left the round that it never entered
        with pytest.raises(AbandonedError):
            comm.barrier()
    reducer.detach()
