"""What collectives compute: the reduction, the concatenation or the copy of what the ranks gave."""

from __future__ import annotations

import time

import pytest
import torch

from tests.support.collective_checks import CHECKS, check_unequal_parts, naming, with_every_op
from tests.support.ranks import on_ranks
from tests.support.reference import (
    DTYPES,
    FLOATS,
    HALVES,
    OPS,
    PLACES,
    assert_reduced,
    assert_same_bits,
    check_all_reduce,
    placed,
    shards_of,
)
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize("collective", CHECKS)
@over(2, 3)
@on_ranks()
def test_a_collective_gives_what_it_should(comm, collective):
    """At sizes that mean something to every transport; each one's own are in its folder."""
    cases = [(0, "sum"), *with_every_op(37), (5000, "mean")]
    for dtype in DTYPES:
        CHECKS[collective](comm, dtype, cases, ["comm.empty", "ordinary"])


@over(2, 3)
@on_ranks()
def test_many_tensors_as_one_give_what_an_all_reduce_of_each_gives(comm):
    """More than a chunk, or a launch of NCCL's, holds; and all of them small."""
    for sizes in ((100, 7, 60_000, 0, 1, 70_000, 333), range(150), [3] * 20, [1]):
        for op in OPS:
            ours = [
                shards_of(torch.float32, comm.world_size, numel, seed=i)[comm.rank].to(comm.device)
                for i, numel in enumerate(sizes)
            ]
            alone = [tensor.clone() for tensor in ours]
            comm.all_reduce_coalesced(tuple(ours), op)
            for tensor in alone:
                comm.all_reduce(tensor, op)
            for i, (one, other) in enumerate(zip(ours, alone, strict=True)):
                with naming(op, i):
                    if comm.adds_by_tree or comm.world_size == 2:
                        assert_same_bits(one, other)
                    else:
                        torch.testing.assert_close(one, other)


@over(2)
@on_ranks()
def test_many_tensors_as_one_may_be_complex_and_require_gradients(comm):
    rank, n = comm.rank, comm.world_size
    waves = [torch.full((2, 3), 1.0 + rank + 1j * rank), torch.full((400,), 2j * rank)]
    comm.all_reduce_coalesced(waves)
    assert torch.equal(waves[0], torch.full((2, 3), sum(1.0 + r + 1j * r for r in range(n))))
    assert torch.equal(waves[1], torch.full((400,), sum(2j * r for r in range(n))))
    leaves = [torch.ones(numel, requires_grad=True) for numel in (1, 3000)]
    comm.all_reduce_coalesced(leaves, "mean")
    assert all((leaf == 1).all() and leaf.grad_fn is None for leaf in leaves)


@over(2, 3)
@on_ranks()
def test_parts_of_all_to_all_may_differ_in_size(comm):
    for numel_of in (
        lambda src, dst: src + 2 * dst,  # some are empty
        lambda src, dst: 3000 * (src + 1) * dst,
        lambda src, dst: 0,
        lambda src, dst: 5 if (src, dst) == (0, 1) else 0,
        lambda src, dst: 60_000 if src != dst else 1,  # over shared memory, several chunks
    ):
        check_unequal_parts(comm, numel_of)


@over(2, 3)
@on_ranks()
def test_parts_come_in_the_order_of_the_ranks_also_where_calls_overlap(comm):
    n, device = comm.world_size, comm.device
    inp = torch.arange(n * 4000.0, device=device) + comm.rank
    outs = [torch.zeros(n * 4000, device=device) for _ in range(3)]
    gathered = torch.zeros(n * n * 4000, device=device) if comm.rank == 1 else None
    works = [comm.all_to_all_single(out, inp, async_op=True) for out in outs]
    works.append(comm.gather(gathered, inp, 1, async_op=True))
    splits = [4000] * n
    unequal = torch.zeros(n * 4000, device=device)
    works.append(comm.all_to_all_single(unequal, inp, splits, splits, async_op=True))
    for work in works:
        work.wait()
    own = torch.arange(n * 4000.0).view(n, -1)[comm.rank]
    wanted = torch.cat([own + src for src in range(n)])
    for out in (*outs, unequal):
        assert_same_bits(out.cpu(), wanted)
    if gathered is not None:
        whole = torch.cat([torch.arange(n * 4000.0) + src for src in range(n)])
        assert_same_bits(gathered.cpu(), whole)


@over(2, 3)
@on_ranks()
def test_the_roots_own_part_may_lie_in_the_whole(comm):
    n = comm.world_size
    for where in ("comm.empty", "ordinary"):
        for numel in (10, 5000, 100_000):
            shards = shards_of(torch.float32, n, numel, seed=numel)
            for root in range(n):
                part, whole = placed(comm, where, shards[comm.rank]), None
                if comm.rank == root:
                    whole = placed(comm, where, torch.zeros(n * numel))
                    part = whole.view(n, numel)[root].copy_(part)
                comm.gather(whole, part, root)
                with naming(where, numel, root):
                    if whole is None:
                        part.zero_()
                    else:
                        assert_same_bits(whole.cpu(), torch.cat(shards))
                    comm.scatter(part, whole, root)
                    assert_same_bits(part.cpu(), shards[comm.rank])


@over(2, 3)
@on_ranks()
def test_broadcast_all_copies_tensors_of_any_shape(comm):
    for src in range(comm.world_size):
        shards = shards_of(torch.float64, comm.world_size, 1000, seed=src)
        own = shards[comm.rank].to(comm.device, copy=True)
        tensors = [own, torch.tensor(float(comm.rank)), torch.empty(0)]
        comm.broadcast_all(tensors, src)
        assert_same_bits(tensors[0].cpu(), shards[src])
        assert tensors[1].item() == src


@over(2, 3)
@on_ranks()
def test_complex_tensors_travel_as_pairs(comm):
    n, rank = comm.world_size, comm.rank
    for dtype in (torch.complex64, torch.complex128):
        for numel in (n, 400 * n):  # small ones travel in other ways
            values = torch.arange(numel).to(dtype).view(n, -1)
            ours = [values * (1 + r) + 1j * r for r in range(n)]
            total = sum(ours)
            for op, wanted in (("sum", total), ("mean", total / n)):
                tensor, part = ours[rank].clone(), torch.empty_like(values[0])
                comm.all_reduce(tensor, op)
                torch.testing.assert_close(tensor, wanted)
                comm.reduce_scatter_single(part, ours[rank], op)
                torch.testing.assert_close(part, wanted[rank])
            moved = ours[rank].clone()
            comm.broadcast(moved, 1, async_op=True).wait()
            assert torch.equal(moved, ours[1])
            everyone = torch.empty(n, *values.shape, dtype=dtype)
            comm.all_gather_single(everyone, ours[rank])
            assert torch.equal(everyone, torch.stack(ours))


def _arrive_one_after_the_other(comm):
    time.sleep(0.1 * comm.rank)
    before = time.monotonic()
    comm.barrier()
    return before, time.monotonic()


@over(3, shm=(2, 3, 4))
def test_nobody_leaves_a_barrier_before_all_have_come(ranks, world_size):
    came, left = zip(*ranks(world_size, _arrive_one_after_the_other), strict=True)
    assert min(left) >= max(came)


@over(2, shm=(2, 3))
@on_ranks()
def test_tensors_of_any_shape_are_taken(comm):
    shards = shards_of(torch.float32, comm.world_size, 60)
    tensor = shards[comm.rank].to(comm.device, copy=True).view(3, 4, 5)
    comm.all_reduce(tensor)
    assert tensor.shape == (3, 4, 5)
    assert_reduced(comm, tensor.view(60), shards, "sum")
    scalar = torch.tensor(float(comm.rank))
    comm.all_reduce(scalar, "max")
    assert scalar.item() == comm.world_size - 1


@over(2, shm=(2, 3))
@on_ranks()
def test_a_part_of_a_comm_empty_tensor_is_reduced_alone(comm):
    for numel in (10, 20_000):
        shards = shards_of(torch.float32, comm.world_size, numel)
        whole = comm.empty(numel + 20, dtype=torch.float32).fill_(-7)
        part = whole[11 : 11 + numel].copy_(shards[comm.rank])
        comm.all_reduce(part)
        assert_reduced(comm, part, shards, "sum")
        assert (whole[:11] == -7).all() and (whole[11 + numel :] == -7).all()


@over(2)
@on_ranks()
def test_a_tensor_that_requires_a_gradient_is_reduced_in_place(comm):
    for op in OPS:
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                tensor = torch.ones(3000, requires_grad=True)
                comm.all_reduce(tensor, op)
                assert (tensor == (2.0 if op == "sum" else 1.0)).all() and tensor.grad_fn is None


@over(2, 3)
@on_ranks()
def test_a_mean_of_large_16_bit_floats_stays_finite(comm):
    # A sum of the largest bfloat16 overflows float32, too: only NCCL's mean is scaled before.
    for dtype in HALVES if comm.backend == "nccl" else (torch.float16,):
        large = torch.full((100,), 0.9 * torch.finfo(dtype).max, dtype=dtype)
        comm.all_reduce(large, "mean")
        assert torch.isfinite(large).all()


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


@over(3, shm=(2, 3, 4), nccl=())
def test_results_have_the_same_bits_on_all_ranks_and_in_every_run(ranks, world_size):
    first, *others = [*ranks(world_size, _random_sums), *ranks(world_size, _random_sums)]
    assert all(other == first for other in others)


@over(1)
@on_ranks()
def test_one_rank_is_its_own_world(comm):
    for where in PLACES:
        for numel in (0, 5, 5000):
            for dtype in DTYPES:
                for op in OPS:
                    with naming(where, numel, dtype, op):
                        check_all_reduce(comm, numel, dtype, op, where)
            wanted = torch.arange(numel)
            tensor = placed(comm, where, wanted)
            comm.broadcast(tensor)
            out = placed(comm, where, torch.zeros(numel, dtype=torch.int64))
            comm.all_gather_single(out, tensor)
            assert torch.equal(out, wanted)
            comm.reduce_scatter_single(out.zero_(), tensor)
            assert torch.equal(out, wanted)
    comm.barrier()
