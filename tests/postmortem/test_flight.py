"""What a communicator notes of its collectives, for dumps."""

from __future__ import annotations

import time

import pytest
import torch

import fastcomm
from fastcomm.comm.objects import gather_objects
from fastcomm.postmortem.dump import in_words, over_of
from tests.support.ranks import on_ranks
from tests.support.transports import over as over_transports

pytestmark = pytest.mark.usefixtures("transport")


def _since(comm, before):
    """The entries after the one in `before`, if there was one: earlier tests may have filled the
    ring.
    """
    entries = comm.flight.entries()
    return entries[entries.index(before[0]) + 1 :] if before else entries


def _collectives(comm):
    """A few of every kind. Returns the model, whose reducer must live."""
    where = {"device": comm.device}
    comm.barrier()
    comm.all_reduce(torch.ones(5, **where), "max")
    comm.broadcast(torch.ones(3, dtype=torch.float64, **where), src=1)
    comm.reduce_scatter_single(torch.empty(2, **where), torch.ones(2 * comm.world_size, **where))
    model = torch.nn.Linear(3, 2).to(comm.device)
    reducer = fastcomm.Reducer(comm).attach(model)
    model(torch.ones(1, 3, **where)).sum().backward()
    works = [comm.all_reduce(torch.ones(7, **where), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    return reducer


@over_transports(2, 3)
@on_ranks()
def test_every_collective_is_noted_alike_on_all_ranks(comm):
    before = comm.flight.entries()[-1:]
    reducer = _collectives(comm)
    entries = _since(comm, before)
    words = [in_words(entry) for entry in entries]
    n = 2 * comm.world_size
    for expected in (
        "barrier" if comm.backend != "nccl" else "all_reduce of 1 uint8 elements, op max",
        f"reduce_scatter_single of {n} float32 elements, op sum",
        "all_reduce of 5 float32 elements, op max",
        "broadcast of 3 float64 elements from rank 1",
        "all_reduce of 7 float32 elements, op sum",
    ):
        assert expected in words, words
    (bucket,) = [entry for entry in entries if entry.kind == "all_reduce" and entry.op == "mean"]
    assert comm.flight.names[bucket.label] in ("bias ... weight", "weight ... bias")
    assert {entry.kind for entry in entries if entry.root >= 0} == {"broadcast"}
    numbers = [entry.number for entry in entries]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if comm.backend in ("group", "hierarchical"):  # where several are under way at once
        assert all(entry.lane < 0 for entry in entries)
    facts = [
        f"{entry.epoch}/{entry.number}: {one}" for entry, one in zip(entries, words, strict=True)
    ]
    told = gather_objects(comm, facts, "a test")
    for other in told:
        assert other == told[0], (sorted(set(other) ^ set(told[0])), other)
    reducer.detach()


@over_transports(2)
@on_ranks()
def test_a_collective_is_over_when_it_is(comm):
    before = comm.flight.entries()[-1:]
    _collectives(comm).detach()
    deadline = time.monotonic() + 10
    while True:  # over NCCL the watchdog finds out
        entries = _since(comm, before)
        over = over_of(entries, comm.flight.epoch)
        unfinished = [
            in_words(one) for one, is_over in zip(entries, over, strict=True) if not is_over
        ]
        if not unfinished:
            break
        assert time.monotonic() < deadline, unfinished
        time.sleep(0.05)
    if comm.backend != "nccl":
        assert all(entry.ended_ns for entry in entries)
    assert all(entry.ended_ns >= entry.posted_ns for entry in entries if entry.ended_ns)
    assert abs(time.time_ns() - entries[-1].posted_ns) < 20e9


@over_transports(2, nccl=())
@on_ranks()
def test_a_collective_that_ends_with_an_error_says_which(comm):
    tensor = torch.ones(3 + comm.rank)
    with pytest.raises(fastcomm.MismatchError):
        comm.all_reduce(tensor)
    assert comm.flight.entries()[-1].error == "MismatchError"
