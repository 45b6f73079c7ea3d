"""Which parameter lies in which bucket, at which offset: properties that hold for any list of
parameters.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.reducer.layout import equal_shards, plan_buckets, whole_shards

ALIGNMENT = 64

_DTYPES = {
    dtype: torch.empty(0, dtype=dtype).element_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
}
numels = st.one_of(st.integers(0, 40), st.integers(0, 20_000))
caps = st.integers(1, 100_000)
mixed = st.lists(
    st.builds(
        lambda numel, dtype: (numel, dtype, _DTYPES[dtype]), numels, st.sampled_from(list(_DTYPES))
    ),
    max_size=40,
)


@given(mixed, caps, caps)
def test_parameters_lie_side_by_side_in_buckets_of_one_dtype(parameters, cap, first_cap):
    """In the reverse of their registration, at cache lines, and with no more padding than that."""
    buckets = plan(parameters, cap, first_cap)
    for dtype, itemsize in _DTYPES.items():
        own = [bucket for bucket in buckets if bucket.dtype == dtype]
        slots = [slot for bucket in own for slot in bucket.slots]
        wanted = [i for i, (_, one, _) in enumerate(parameters) if one == dtype]
        assert [slot.index for slot in slots] == wanted[::-1]
        assert all(slot.numel == parameters[slot.index][0] for slot in slots)
        assert all(slot.offset >= 0 and slot.offset * itemsize % ALIGNMENT == 0 for slot in slots)
        for bucket in own:
            in_place = sorted(bucket.slots, key=lambda slot: (slot.offset, slot.numel))
            ends = [slot.offset + slot.numel for slot in in_place]
            begins = [slot.offset for slot in in_place[1:]] + [bucket.numel]
            assert all(end <= begin for end, begin in zip(ends, begins, strict=True))
            least = sum(slot.numel * itemsize + ALIGNMENT for slot in bucket.slots)
            assert bucket.numel * itemsize <= least
            assert nbytes(bucket, without_last=True) < max(cap, first_cap)


def test_two_dtypes_in_turn_share_two_buckets():
    parameters = [(16, torch.float32, 4), (16, torch.bfloat16, 2)] * 10
    assert len(plan(parameters, 1 << 20, 1 << 20)) == 2


def plan(parameters, cap, first_cap):
    return plan_buckets(parameters, cap_bytes=cap, first_cap_bytes=first_cap)


def nbytes(bucket, without_last=False):
    slots = bucket.slots[:-1] if without_last else bucket.slots
    return sum(slot.numel for slot in slots) * _DTYPES[bucket.dtype]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, 16, 17, 1000, 4096])
def test_equal_shards_cover_everything_and_begin_at_cache_lines(numel: int, n: int) -> None:
    bounds = equal_shards(numel, 4, n)
    assert bounds[0] == 0 and numel <= bounds[-1] < numel + 16 * n and len(bounds) == n + 1
    assert len({end - begin for begin, end in itertools.pairwise(bounds)}) == 1
    assert all(bound % 16 == 0 for bound in bounds)


def test_whole_shards_cut_no_slot_and_are_even() -> None:
    layouts = plan_buckets(
        [(100 + 40 * (i % 7), torch.float32, 4) for i in range(40)],
        cap_bytes=2500,
        first_cap_bytes=800,
    )
    loads = [0, 0, 0]
    for layout in layouts:
        bounds = whole_shards(layout, loads)
        assert set(bounds) <= {*(slot.offset for slot in layout.slots), layout.numel}
        assert list(bounds) == sorted(bounds) and bounds[0] == 0 and bounds[-1] == layout.numel
    assert max(loads) < 1.1 * min(loads)
