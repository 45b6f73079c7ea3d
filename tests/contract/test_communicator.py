"""The communicator's contract, through public names: results, several collectives under way,
threads, arguments, ranks that disagree. How communicators begin and end is in
test_life.py.
"""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from fastcomm import FastcommError, MismatchError
from tests.support.ranks import on_ranks
from tests.support.reference import (
    DTYPES,
    FLOATS,
    OPS,
    PLACES,
    assert_same_bits,
    check_all_reduce,
    check_async_collectives,
    placed,
    reduced,
    shards_of,
)

# For float32 of these, 1024 elements are the most that travel in a mailbox, and 65536 fill a
# staging slot.
SMALL = (0, 1, 37, 1023, 1024, 1025)
LARGE = (65_537, 300_001)
# With every operation when small: the operations differ in the arithmetic, the sizes in the way
# through memory.
SIZES_AND_OPS = [
    *((numel, op) for numel in SMALL for op in OPS),
    (LARGE[0], "mean"),
    (LARGE[1], "sum"),
]


# Results


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3, 4)
def test_all_reduce_is_the_reduction_in_rank_order(comm, dtype, where):
    for numel, op in SIZES_AND_OPS:
        check_all_reduce(comm, numel, dtype, op, where, seed=numel)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3, 4)
def test_reduce_scatter_single_keeps_the_ranks_own_part(comm, dtype, where):
    for part, op in SIZES_AND_OPS[:-1]:
        shards = shards_of(dtype, comm.world_size, part * comm.world_size, seed=part)
        inp, out = (
            placed(comm, where, shards[comm.rank]),
            placed(comm, where, torch.zeros(part, dtype=dtype)),
        )
        comm.reduce_scatter_single(out, inp, op)
        assert_same_bits(
            out, reduced([shard.view(comm.world_size, part)[comm.rank] for shard in shards], op)
        )
        assert_same_bits(inp, shards[comm.rank])


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3, 4)
def test_all_gather_single_concatenates_by_rank(comm, dtype, where):
    for numel in (*SMALL, *LARGE):
        shards = shards_of(dtype, comm.world_size, numel, seed=numel)
        inp, out = (
            placed(comm, where, shards[comm.rank]),
            placed(comm, where, torch.zeros(numel * comm.world_size, dtype=dtype)),
        )
        comm.all_gather_single(out, inp)
        assert_same_bits(out, torch.cat(shards))
        assert_same_bits(inp, shards[comm.rank])


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2, 3, 4)
def test_broadcast_copies_from_any_rank(comm, dtype, where):
    for numel in (*SMALL, *LARGE):
        for src in range(comm.world_size):
            shards = shards_of(dtype, comm.world_size, numel, seed=numel + src)
            tensor = placed(comm, where, shards[comm.rank])
            comm.broadcast(tensor, src)
            assert_same_bits(tensor, shards[src])


@on_ranks(2, 3, 4)
def test_broadcast_is_from_rank_0_unless_told_otherwise(comm):
    tensor = torch.full((10,), comm.rank)
    comm.broadcast(tensor)
    assert tensor.tolist() == [0] * 10


def _arrive_one_after_the_other(comm):
    time.sleep(0.1 * comm.rank)
    before = time.monotonic()
    comm.barrier()
    return before, time.monotonic()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nobody_leaves_a_barrier_before_all_have_come(ranks, world_size):
    came, left = zip(*ranks(world_size, _arrive_one_after_the_other), strict=True)
    assert min(left) >= max(came)


@on_ranks(2, 3)
def test_the_op_may_have_torchs_names(comm):
    for name, op in (("avg", "mean"), ("product", "prod")):
        shards = shards_of(torch.float32, comm.world_size, 100)
        tensor = shards[comm.rank].clone()
        comm.all_reduce(tensor, name)
        assert_same_bits(tensor, reduced(shards, op))


@on_ranks(2, 3)
def test_tensors_of_any_shape_are_taken(comm):
    shards = shards_of(torch.float32, comm.world_size, 60)
    tensor = shards[comm.rank].clone().view(3, 4, 5)
    comm.all_reduce(tensor)
    assert_same_bits(tensor, reduced(shards, "sum").view(3, 4, 5))
    scalar = torch.tensor(float(comm.rank))
    comm.all_reduce(scalar, "max")
    assert scalar.item() == comm.world_size - 1


@on_ranks(2, 3)
def test_a_part_of_a_comm_empty_tensor_is_reduced_alone(comm):
    for numel in (10, 20_000):
        shards = shards_of(torch.float32, comm.world_size, numel)
        whole = comm.empty(numel + 20, dtype=torch.float32).fill_(-7)
        part = whole[11 : 11 + numel].copy_(shards[comm.rank])
        comm.all_reduce(part)
        assert_same_bits(part, reduced(shards, "sum"))
        assert (whole[:11] == -7).all() and (whole[11 + numel :] == -7).all()


@on_ranks(2, 3)
def test_ranks_may_take_their_tensors_from_different_places_in_memory(comm):
    held = [
        comm.empty(100_000 * (comm.rank + 1), dtype=torch.float32) for _ in range(comm.rank + 1)
    ]
    for _ in range(3):
        check_all_reduce(comm, 20_000, where="comm.empty")
        held.pop(0) if held else None


def _random_sums(comm):
    """The bytes of results whose last bits depend on the order of addition."""
    results = []
    for dtype in FLOATS:
        for where in PLACES:
            for numel in (100, 70_001):
                tensor = placed(comm, where, shards_of(dtype, comm.world_size, numel)[comm.rank])
                comm.all_reduce(tensor, "mean")
                results.append(bytes(tensor.view(torch.uint8).numpy()))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_have_the_same_bits_on_all_ranks_and_in_every_run(ranks, world_size):
    first, *others = [*ranks(world_size, _random_sums), *ranks(world_size, _random_sums)]
    assert all(other == first for other in others)


@on_ranks(1)
def test_one_rank_is_its_own_world(comm):
    for where in PLACES:
        for numel in (0, 5, 5000):
            for dtype in DTYPES:
                for op in OPS:
                    check_all_reduce(comm, numel, dtype, op, where)
            tensor = placed(comm, where, torch.arange(numel))
            comm.broadcast(tensor)
            out = placed(comm, where, torch.zeros(numel, dtype=torch.int64))
            comm.all_gather_single(out, tensor)
            assert torch.equal(out, torch.arange(numel))
            comm.reduce_scatter_single(out.zero_(), tensor)
            assert torch.equal(out, torch.arange(numel))
    comm.barrier()


# Several collectives under way


@pytest.mark.parametrize("where", PLACES)
@on_ranks(2, 3)
def test_an_async_all_reduce_is_in_place_after_wait(comm, where):
    for numel in (*SMALL, *LARGE):
        shards = shards_of(torch.float32, comm.world_size, numel)
        tensor = placed(comm, where, shards[comm.rank])
        work = comm.all_reduce(tensor, async_op=True)
        work.wait()
        assert work.is_completed()
        assert_same_bits(tensor, reduced(shards, "sum"))


def _wait_for_late_rank(comm):
    tensor = torch.ones(5000)
    if comm.rank == 1:
        time.sleep(0.3)
        comm.all_reduce(tensor)
        return tensor.sum().item()
    before = time.monotonic()
    work = comm.all_reduce(tensor, async_op=True)
    assert time.monotonic() - before < 0.2
    assert not work.is_completed()
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    return tensor.sum().item()


def test_an_async_all_reduce_does_not_wait_for_anybody(ranks):
    assert ranks(2, _wait_for_late_rank) == [10000, 10000]


@pytest.mark.parametrize("where", PLACES)
@on_ranks(2, 3)
def test_a_blocking_collective_may_follow_an_async_one(comm, where):
    shards = shards_of(torch.float32, comm.world_size, 5000)
    tensor = placed(comm, where, shards[comm.rank])
    work = comm.all_reduce(tensor, async_op=True)
    check_all_reduce(comm, 70_000, where=where)
    comm.barrier()
    work.wait()
    assert_same_bits(tensor, reduced(shards, "sum"))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("order", ["in order", "backwards"])
@on_ranks(2, 3)
def test_any_number_of_collectives_may_be_under_way(comm, where, order):
    shards = [shards_of(torch.float32, comm.world_size, 37 * i * i, seed=i) for i in range(50)]
    tensors = [placed(comm, where, shards_of_one[comm.rank]) for shards_of_one in shards]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works if order == "in order" else reversed(works):
        work.wait()
    for tensor, shards_of_one in zip(tensors, shards, strict=True):
        assert_same_bits(tensor, reduced(shards_of_one, "sum"))


@on_ranks(2, 3)
def test_collectives_of_every_kind_may_be_under_way(comm):
    check_async_collectives(comm)


@on_ranks(2)
def test_wait_may_be_called_twice(comm):
    work = comm.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    work.wait()


@pytest.mark.parametrize("where", PLACES)
@on_ranks(2, 3)
def test_a_work_that_nobody_holds_does_no_harm(comm, where):
    for numel in (*SMALL, *LARGE):
        comm.all_reduce(placed(comm, where, torch.ones(numel)), async_op=True)
        gc.collect()
        check_all_reduce(comm, where=where)


# The GIL and threads


@pytest.mark.parametrize("numel", [10, 5000, LARGE[1]])
@on_ranks(2)
def test_python_threads_run_while_a_collective_waits(comm, numel):
    ticks = []
    is_over = threading.Event()

    def tick():
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    if comm.rank == 1:
        time.sleep(0.5)
        comm.all_reduce(torch.ones(numel))
        return
    thread = threading.Thread(target=tick)
    thread.start()
    comm.all_reduce(torch.ones(numel))
    is_over.set()
    thread.join()
    assert len(ticks) > 50
    assert max(after - before for before, after in zip(ticks, ticks[1:], strict=False)) < 0.2


@on_ranks(2)
def test_a_second_thread_in_the_communicator_is_told_so(comm):
    if comm.rank == 1:
        time.sleep(0.5)
        comm.barrier()
        return
    waiting = threading.Thread(target=comm.barrier)
    waiting.start()
    time.sleep(0.2)
    with pytest.raises(FastcommError, match="thread"):
        comm.all_reduce(torch.ones(10))
    waiting.join()


@on_ranks(2)
def test_threads_may_take_turns(comm):
    for _ in range(5):
        thread = threading.Thread(target=check_all_reduce, args=(comm,))
        thread.start()
        thread.join()
        check_all_reduce(comm)


# Arguments. Rank 0 calls what is wrong, the others nothing: it must not wait for them, nor disturb
# them.


def refused(comm, error, words, call):
    if comm.rank == 0:
        with pytest.raises(error, match=words):
            call()
    check_all_reduce(comm)


@on_ranks(2)
def test_tensors_that_are_not_contiguous_are_refused(comm):
    columns = torch.zeros(6, 4)[:, :2]
    refused(comm, ValueError, "contiguous", lambda: comm.all_reduce(columns))
    refused(comm, ValueError, "contiguous", lambda: comm.broadcast(columns))
    refused(
        comm, ValueError, "contiguous", lambda: comm.all_gather_single(torch.zeros(24), columns)
    )
    refused(
        comm,
        ValueError,
        "contiguous",
        lambda: comm.all_gather_single(torch.zeros(48)[::2], torch.zeros(12)),
    )
    refused(
        comm, ValueError, "contiguous", lambda: comm.reduce_scatter_single(torch.zeros(6), columns)
    )


@on_ranks(2)
def test_tensors_elsewhere_or_sparse_are_refused(comm):
    for tensor in (torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()):
        refused(comm, ValueError, "CPU", lambda tensor=tensor: comm.all_reduce(tensor))
        refused(comm, ValueError, "CPU", lambda tensor=tensor: comm.broadcast(tensor))
        refused(
            comm,
            ValueError,
            "CPU",
            lambda tensor=tensor: comm.all_gather_single(torch.zeros(8), tensor),
        )


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.complex64, torch.int8], ids=str)
@on_ranks(2)
def test_other_dtypes_are_refused(comm, dtype):
    name = str(dtype).removeprefix("torch.")
    refused(comm, TypeError, name, lambda: comm.all_reduce(torch.zeros(4, dtype=dtype)))
    refused(comm, TypeError, name, lambda: comm.broadcast(torch.zeros(4, dtype=dtype)))
    refused(comm, TypeError, name, lambda: comm.empty(4, dtype=dtype))


@on_ranks(2)
def test_what_is_no_tensor_is_refused(comm):
    refused(comm, TypeError, "list", lambda: comm.all_reduce([1.0, 2.0]))
    refused(comm, TypeError, "NoneType", lambda: comm.broadcast(None))
    refused(comm, TypeError, "list", lambda: comm.all_gather_single([0.0] * 4, torch.zeros(2)))


@on_ranks(2)
def test_unknown_operations_are_refused(comm):
    refused(comm, ValueError, "median", lambda: comm.all_reduce(torch.zeros(4), "median"))
    refused(
        comm,
        ValueError,
        "median",
        lambda: comm.reduce_scatter_single(torch.zeros(2), torch.zeros(4), "median"),
    )


@on_ranks(2)
def test_outputs_that_do_not_fit_are_refused(comm):
    refused(
        comm,
        ValueError,
        "8 elements.*has 7",
        lambda: comm.all_gather_single(torch.zeros(7), torch.zeros(4)),
    )
    refused(
        comm,
        ValueError,
        "2 elements.*has 4",
        lambda: comm.reduce_scatter_single(torch.zeros(4), torch.zeros(4)),
    )
    refused(
        comm,
        ValueError,
        "multiple of 2",
        lambda: comm.reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
    )
    refused(
        comm,
        TypeError,
        "float64.*float32",
        lambda: comm.all_gather_single(torch.zeros(8).double(), torch.zeros(4)),
    )
    refused(
        comm,
        TypeError,
        "float64.*float32",
        lambda: comm.reduce_scatter_single(torch.zeros(2).double(), torch.zeros(4)),
    )


@pytest.mark.parametrize("src", [-1, 2, 100])
@on_ranks(2)
def test_a_source_that_is_no_rank_is_refused(comm, src):
    refused(comm, ValueError, f"0 to 1.*{src}", lambda: comm.broadcast(torch.zeros(4), src=src))


@on_ranks(2)
def test_comm_empty_refuses_a_negative_size(comm):
    refused(comm, ValueError, "-1", lambda: comm.empty(-1, dtype=torch.float32))


# Ranks that disagree


def _all_reduce(comm, numel=100, dtype=torch.float32, op="sum"):
    comm.all_reduce(torch.zeros(numel, dtype=dtype), op)


MISMATCHES = {
    "op": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, op="max"),
        "op sum",
        "op max",
    ),
    "size": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, 101),
        "100 float32",
        "101 float32",
    ),
    "path": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, LARGE[0]),
        "100 float32",
        f"{LARGE[0]} float32",
    ),
    "dtype": (
        lambda comm: _all_reduce(comm),
        lambda comm: _all_reduce(comm, dtype=torch.int32),
        "100 float32",
        "100 int32",
    ),
    "kind": (
        lambda comm: _all_reduce(comm),
        lambda comm: comm.barrier(),
        "all_reduce of 100 float32",
        "barrier",
    ),
    "source": (
        lambda comm: comm.broadcast(torch.zeros(4), 0),
        lambda comm: comm.broadcast(torch.zeros(4), 1),
        "broadcast.*from rank 0",
        "broadcast.*from rank 1",
    ),
    "gather and scatter": (
        lambda comm: comm.all_gather_single(torch.zeros(12 * comm.world_size), torch.zeros(12)),
        lambda comm: comm.reduce_scatter_single(
            torch.zeros(12 // comm.world_size), torch.zeros(12)
        ),
        "all_gather_single of 12",
        "reduce_scatter_single of 12",
    ),
}


def _disagree(comm, case):
    usual, other, _, _ = MISMATCHES[case]
    (other if comm.rank == comm.world_size - 1 else usual)(comm)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_disagree_all_hear_of_it_and_of_both_sides(ranks, world_size, case):
    _, _, usual, other = MISMATCHES[case]
    ranks.raises(
        world_size,
        MismatchError,
        _disagree,
        case,
        match=f"rank 0: .*{usual}.*rank {world_size - 1}: .*{other}",
        survives=True,
    )
    ranks(world_size, check_all_reduce)


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


def test_a_mismatch_ends_one_collective_and_no_other(ranks):
    wanted = ["done", "done", "done", "mismatch", "done", "done"]
    assert ranks(3, _disagree_about_one_of_many) == [wanted] * 3


@on_ranks(2)
def test_a_tensor_of_a_mismatch_is_left_as_it_was(comm):
    for numel in (100, 5000, LARGE[1]):
        for where in PLACES:
            tensor = placed(comm, where, torch.full((numel,), 3.0))
            with pytest.raises(MismatchError):
                comm.all_reduce(tensor, OPS[comm.rank])
            assert (tensor == 3.0).all()
