"""Wires of 8 bits with a scale for each block, and error feedback: the codecs alone, and what
buckets become between ranks. Ranks of even and of odd numbers take each other for those of two
hosts.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.comm.collective import BLOCK_DTYPES
from fastcomm.comm.transport import Part
from fastcomm.transports.group.wire import BLOCK, Wire
from tests.support.ranks import on_ranks
from tests.support.reference import FLOATS, HALVES, OPS, reduced, shards_of
from tests.support.transports import TRANSPORTS_OVER_TORCH
from tests.transports.group.test_over_torch import assert_same_on_all, in_chunks, shards_with_nans

NARROW = (*BLOCK_DTYPES, *HALVES)
# One element, less than a block for each rank, more than that, several chunks.
SIZES = (1, 700, 5001, 140_001)
# Of the largest magnitude of a block: what rounding changes at most.
STEP = {
    torch.int8: 0.5 / 127,
    torch.float8_e4m3fn: 2**-4,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
}
TINY = torch.finfo(torch.float32).tiny

over_torch = pytest.mark.transports(*TRANSPORTS_OVER_TORCH)
with_transport = pytest.mark.usefixtures("transport")


# The codecs


def round_trip(wire, values, key=0):
    """What is left of the values on the other side."""
    coded = wire.rows_for(1, values.numel())[0]
    wire.encode(key, values.clone(), coded)
    decoded = torch.full_like(values, torch.nan)
    wire.decode(coded, decoded)
    return decoded


def largest(values):
    """Of each element's block."""
    return values.double().abs().view(-1, BLOCK).amax(1).repeat_interleave(BLOCK)


@st.composite
def blocks(draw):
    """Blocks of very different magnitudes, from 0 to nearly the largest float32."""
    exponents = draw(st.lists(st.integers(-149, 127), min_size=1, max_size=6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.rand(len(exponents), BLOCK, generator=random, dtype=torch.float64) * 2 - 1
    values[:, : draw(st.integers(0, BLOCK))] *= draw(st.sampled_from([0, 1, 2**-5, 2**-20]))
    return (values * torch.tensor(exponents, dtype=torch.float64).exp2().unsqueeze(1)).float()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_is_not_finite_is_not_finite_on_the_other_side_and_is_not_fed_back(
    dtype, error_feedback, bad
):
    wire = Wire(dtype, error_feedback=error_feedback)
    values = torch.rand(2 * BLOCK, generator=torch.Generator().manual_seed(1)) + 1
    values[3] = bad
    decoded = round_trip(wire, values)
    assert not decoded[3].isfinite()
    assert decoded[BLOCK:].isfinite().all()
    values[3] = 1
    assert round_trip(wire, values).isfinite().all()


def test_float16_that_overflows_is_not_fed_back():
    wire = Wire(torch.float16, error_feedback=True)
    assert round_trip(wire, torch.full((BLOCK,), 1e30)).isinf().all()
    assert (round_trip(wire, torch.ones(BLOCK)) == 1).all()


@given(blocks(), st.sampled_from((*BLOCK_DTYPES, torch.bfloat16)), st.integers(1, 6))
def test_fed_back_rounds_add_up_to_what_was_given_within_one_rounding(values, dtype, n_rounds):
    wire, values = Wire(dtype, error_feedback=True), values.view(-1) / 8
    sent, arrived = torch.zeros(2, values.numel(), dtype=torch.float64)
    for i in range(n_rounds):
        addend = values.roll(i)
        sent += addend
        arrived += round_trip(wire, addend)
    # a residual makes a block a little larger; float32 rounds residuals
    size = largest(torch.stack([values.roll(i).abs() for i in range(n_rounds)]).amax(0))
    assert ((arrived - sent).abs() <= 1.1 * STEP[dtype] * size + TINY).all()


def test_keys_have_residuals_of_their_own():
    wire = Wire(torch.int8, error_feedback=True)
    values = torch.full((BLOCK,), 0.25)
    values[0] = 127
    round_trip(wire, values, key=0)
    assert (round_trip(wire, torch.zeros(BLOCK), key=1) == 0).all()
    assert (round_trip(wire, torch.zeros(BLOCK), key=0)[1:] != 0).all()


# Between ranks


def _of_wires(*world_sizes):
    """Every wire with and without error feedback. Any two of transport, world size, wire and error
    feedback meet, but not any three.
    """
    return [
        (
            TRANSPORTS_OVER_TORCH[(i + error_feedback) % 2],
            world_sizes[(i // 2 + error_feedback) % len(world_sizes)],
            wire_dtype,
            error_feedback,
        )
        for i, wire_dtype in enumerate(NARROW)
        for error_feedback in (False, True)
    ]


def over_wires(*world_sizes):
    names = "transport, world_size, wire_dtype, error_feedback"
    return pytest.mark.parametrize(names, _of_wires(*world_sizes), indirect=["transport"], ids=str)


def _bind(comm, gradients, wire_dtype, label=1, **options):
    """A bucket of one view, and behind it its used mask."""
    flat = torch.cat([gradients, gradients.new_zeros(1)])
    bound = comm.bind_bucket(flat, [flat[:-1]], [0], wire_dtype=wire_dtype, label=label, **options)
    return flat[:-1], bound


@over_wires(2, 3)
@with_transport
@on_ranks()
def test_a_sum_is_rounded_once_before_and_once_after(comm, wire_dtype, error_feedback):
    for dtype in FLOATS:
        results = []
        for numel in SIZES if dtype == torch.float32 else SIZES[:3]:
            shards = shards_of(dtype, comm.world_size, numel)
            gradients, bucket = _bind(
                comm, shards[comm.rank], wire_dtype, error_feedback=error_feedback
            )
            for op in ("sum", "mean"):
                gradients.copy_(shards[comm.rank])
                with in_chunks():
                    assert bucket.launch(op, []).present() == [True]
                results.append(gradients.clone())
                if op == "sum" or not error_feedback:  # else there is a residual of the sum
                    exact = reduced([shard.double() for shard in shards], op)
                    sizes = torch.stack([shard.double().abs().max() for shard in shards])
                    bound = 2.1 * STEP[wire_dtype] * (sizes.sum() if op == "sum" else sizes.mean())
                    own = torch.finfo(dtype).eps * exact.abs()
                    assert ((gradients.double() - exact).abs() <= bound + own).all()
        assert_same_on_all(comm, torch.cat(results))


@over_wires(3)
@with_transport
@on_ranks()
def test_ranks_have_the_same_bits_and_no_infinity_is_lost(comm, wire_dtype, error_feedback):
    torch.set_num_threads(1 + comm.rank % 2)  # which cut loops at other places
    for dtype in FLOATS if not error_feedback else FLOATS[:1]:
        results = []
        for numel in SIZES[1:] if dtype == torch.float32 else SIZES[1:3]:
            shards = shards_with_nans(dtype, comm.world_size, numel)
            gradients, bucket = _bind(
                comm, shards[comm.rank], wire_dtype, error_feedback=error_feedback
            )
            for op in ("mean",) if error_feedback else OPS:
                gradients.copy_(shards[comm.rank])
                bucket.launch(op, []).wait()
                results.append(gradients.clone())
                exact = reduced(shards, op)
                assert not gradients[~exact.isfinite()].isfinite().any()
        assert_same_on_all(comm, torch.cat(results))
    torch.set_num_threads(1)


@over_torch
@with_transport
@pytest.mark.parametrize("n_views", [3, 300])  # carried by the announcement, and not
@on_ranks(3)
def test_the_used_mask_is_exact_beside_great_gradients(comm, n_views):
    flat = torch.empty(2 * n_views)
    views, offsets = list(flat[:n_views].view(n_views, 1)), list(range(n_views))
    bucket = comm.bind_bucket(flat, views, offsets, wire_dtype=torch.int8, label=1)
    for op in OPS:
        flat.fill_(1e30 if op != "prod" else 1e10)
        missing = [0, *([1] if comm.rank else [])]
        present = bucket.launch(op, missing).present()
        assert present == [False, *[True] * (n_views - 1)]


def _with_small_ones():
    """A value of which int8 keeps nothing where the largest of its block is 127."""
    return torch.cat([torch.full((1,), 127.0), torch.full((BLOCK - 1,), 0.25)]).repeat(20)


@over_torch
@with_transport
@on_ranks(2)
def test_what_a_dropped_round_has_dropped_is_not_fed_back(comm):
    values = _with_small_ones()
    small = values == 0.25
    gradients, bucket = _bind(comm, values, torch.int8, error_feedback=True)
    gradients[small] = 0.4
    work = bucket.launch("mean", [], part=Part(votes=comm.rank == 1))
    work.wait()
    assert work.is_skipped()
    gradients[small] = 0.2
    bucket.launch("mean", []).wait()
    assert (gradients[small] == 0).all()


@over_torch
@with_transport
@on_ranks(2)
def test_buckets_have_residuals_of_their_own(comm):
    values = _with_small_ones()
    first, second = (
        _bind(comm, values, torch.int8, label, error_feedback=True) for label in (1, 2)
    )
    first[1].launch("mean", []).wait()
    second[0].zero_()
    second[1].launch("mean", []).wait()
    assert (second[0] == 0).all()


@on_ranks(2)
@with_transport
def test_a_transport_that_feeds_nothing_back_says_so(comm):
    assert not comm.feeds_back_errors
    flat = comm.empty(10, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"over {comm.backend}, error_feedback=True is not"):
        comm.bind_bucket(
            flat, [flat[:9]], [0], wire_dtype=torch.bfloat16, label=1, error_feedback=True
        )
