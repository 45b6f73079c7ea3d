"""The shared-memory core: the C driver built and run as it is (ci/sanitize.sh runs it under the
sanitizers), and the arithmetic, bit by bit, against torch's.
"""

import os
import subprocess
from glob import glob
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lib.arithmetic import reduction_of
from tests.fakes.stand_ins import compiled
from tests.support.reference import (
    DTYPES,
    FLOATS,
    HALVES,
    OPS,
    assert_same_bits,
    reduced,
    shards_of,
)

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent.parent.parent

# The driver


@pytest.fixture(scope="module")
def driver():
    compiler = os.environ.get("CC", "gcc")
    sources = [*glob(f"{ROOT}/kernels/shm/*.c"), *glob(f"{ROOT}/tests/transports/shm/*.c")]
    options = [
        "-std=gnu11",
        "-O1",  # to compile with more takes longer than it saves
        "-ffp-contract=off",
        "-DFASTCOMM_NO_CLONES",
        f"-I{ROOT}/kernels",
    ]
    return compiled("shm_driver", compiler, *options, *sources)


@pytest.mark.parametrize("ranks_are, sizes", [("processes", "full"), ("threads", "quick")])
def test_driver(driver, ranks_are, sizes):
    run = subprocess.run([driver, ranks_are, sizes], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr


# The arithmetic


def check(shards, op):
    expected = reduced(shards, op)
    found = reduction_of(shards, op)()
    assert found == (not expected.isfinite().all()) or len(shards) == 1
    for shard in shards:
        assert_same_bits(shard, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(OPS),
    n=st.integers(1, 9),
    numel=st.one_of(st.integers(0, 200), st.integers(200, 5000)),
    seed=st.integers(0, 2**32),
)
def test_reduction_is_torchs_by_the_tree(dtype, op, n, numel, seed):
    check(shards_of(dtype, n, numel, seed), op)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_of_any_shard_reaches_the_result(dtype, op, n):
    for position in range(n):
        shards = shards_of(dtype, n, 1000, 2)
        shards[position][::7] = float("nan")
        check(shards, op)
        assert shards[0][::7].isnan().all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_infinity_is_found_wherever_it_stands(dtype, op):
    for at in (0, 7, 511, 512, 1000):  # the last one fills no vector
        for n in (2, 3):
            shards = shards_of(dtype, n, 1001, 2)
            for shard in shards:
                shard[at] = -float("inf")
            check(shards, op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinities_and_overflow(dtype, op):
    largest = torch.finfo(dtype).max
    special = torch.tensor(
        [float("inf"), -float("inf"), largest, -largest, 0.0, 1.0, torch.finfo(dtype).tiny],
        dtype=dtype,
    )
    check(list(torch.cartesian_prod(special, special, special).T.contiguous()), op)


# 16-bit floats: all of them


@pytest.fixture
def flush_subnormals():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    yield
    torch.set_flush_denormal(False)


def every_value(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_16_bit_float_survives_where_subnormals_are_flushed(dtype, flush_subnormals):
    """max(x, x) is x, once widened and narrowed."""
    values = every_value(dtype)
    shards = [values.clone(), values.clone()]
    reduction_of(shards, "max")()
    numbers = ~(values != values)
    assert torch.equal(shards[0].view(torch.int16)[numbers], values.view(torch.int16)[numbers])
    assert (shards[0] != shards[0])[~numbers].all()


def pairs(dtype):
    """Every 16-bit float with many others, near and far: their sums and products fall everywhere
    between 16-bit floats.
    """
    values = every_value(dtype)
    for distance in (1, 2, 3, 1023, 1025, 4097, 16384, 21845, 30001, 32768):
        yield values, values.roll(distance)


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_results_are_rounded_as_torch_rounds(dtype, op):
    for one, other in pairs(dtype):
        check([one.clone(), other.clone()], op)
        check([one.clone(), other.clone(), one.roll(7)], op)


def test_float16_results_are_right_where_subnormals_are_flushed(flush_subnormals):
    for one, other in pairs(torch.float16):
        torch.set_flush_denormal(False)
        expected = reduced([one, other], "sum")
        torch.set_flush_denormal(True)
        shards = [one.clone(), other.clone()]
        reduction_of(shards, "sum")()
        torch.set_flush_denormal(False)
        assert_same_bits(shards[0], expected)
