"""The CUDA kernels whole, as blocks of lanes: their barriers, shuffles, fences and how the last
block publishes the statistics. A block emulator runs them on the host (emulator.h says what it
models), here and under the sanitizers (ci/sanitize.sh).
"""

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.stand_ins import compiled, stand_ins
from tests.kernels.test_kernels import (
    DTYPES,
    PAIRS,
    THREADS,
    TILE,
    Arena,
    Statistics,
    assert_same,
    cast,
    flatten,
    norm,
    ordinary,
    unflatten,
)

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests" / "kernels"
COMPILER = (
    os.environ.get("CXX", "g++"),
    *("-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-DFASTCOMM_HOST", "-DFASTCOMM_EMULATED"),
    *(f"-I{ROOT / folder}" for folder in ("kernels", "tests/support", "tests/kernels")),
)

# One element, none, less and more than a warp, a pack or a tile, and a tail behind the last pack.
SIZES = [1, 0, 7, 31, 33, 0, 100, 2047, 2048, 2049, 3 * TILE + 5, 0]


class Emulator:
    """Called as the shim's library is, but for the number of threads: every block has this many."""

    def __init__(self, library, n_threads=THREADS):
        self._library = library
        self._n_threads = n_threads

    def __getattr__(self, name):
        kernel = getattr(self._library, f"emulated_{name}")

        def call(n_blocks, _, addresses):
            kernel(n_blocks, self._n_threads, addresses)
            error = self._library.emulator_error()
            assert error is None, error.decode()

        return call


def built(name, *options):
    """The path of a library or program with the kernels and the emulator, which is compiled by
    itself: ThreadSanitizer must not look into it.
    """
    emulator = compiled("emulator.o", *COMPILER, "-O1", "-c", HERE / "emulator.cpp")
    return compiled(name, *COMPILER, *options, HERE / "frames.cpp", emulator)


@pytest.fixture(scope="module")
def library():
    library = ctypes.CDLL(built("libframes.so", "-shared"))
    library.emulator_error.restype = ctypes.c_char_p
    return library


@pytest.fixture
def emulator(library):
    return Emulator(library)


def filled(dtype, past):
    """Tensors of all SIZES."""
    arena = Arena(dtype, SIZES, [past] * len(SIZES))
    for seed, tensor in enumerate(arena.tensors):
        tensor.copy_(ordinary(dtype, tensor.numel(), seed))
    return arena


def assert_are_of(statistics, tensors, grad):
    """The statistics against torch's, of all finite elements."""
    values = torch.cat([tensor.double() for tensor in tensors])
    n_nonfinite = int((~values.isfinite()).sum())
    assert statistics.n_nonfinite == n_nonfinite
    assert statistics.ticket.value == 0
    if n_nonfinite == 0:
        exact = float(values.square().sum())
        assert statistics.square_sum == pytest.approx(exact, rel=1e-13 if grad == "f64" else 1e-6)
    else:
        assert not np.isfinite(statistics.square_sum)


@pytest.mark.parametrize("grad, wire", PAIRS)
def test_a_bucket_goes_there_and_back(emulator, grad, wire):
    grads, flat = filled(DTYPES[grad], 3), Arena(DTYPES[wire], SIZES, [3] * len(SIZES))
    flatten(emulator, grads.tensors, flat, grad, wire, 0.5)
    for tensor, place in zip(grads.tensors, flat.tensors, strict=True):
        assert_same(place, cast(tensor, place.dtype, 0.5))
    flat.check_guards()

    back = Arena(DTYPES[grad], SIZES, [1] * len(SIZES))
    statistics = Statistics()
    unflatten(emulator, flat, back.tensors, grad, wire, 2.0, statistics=statistics)
    for tensor, place in zip(back.tensors, flat.tensors, strict=True):
        assert_same(tensor, cast(place, tensor.dtype, 2.0))
    back.check_guards()
    assert_are_of(statistics, back.tensors, grad)


@pytest.mark.parametrize(
    "grad, n_blocks, n_threads",
    [
        ("f32", 1, 32),
        ("f32", 1, 256),
        ("f16", 2, 64),
        ("bf16", 5, 96),
        ("f64", 3, 256),
        ("f32", 2, 1024),
    ],
)
def test_every_warp_and_every_block_counts(library, grad, n_blocks, n_threads):
    grads = filled(DTYPES[grad], 1)
    grads.tensors[7][2046] = float("inf")
    grads.tensors[10][-1] = float("nan")
    for _ in range(2):
        statistics = norm(Emulator(library, n_threads), grads.tensors, grad, n_blocks=n_blocks)
        assert_are_of(statistics, grads.tensors, grad)
        grads.tensors[7][2046] = grads.tensors[10][-1] = 1


# More blocks than lanes to add them up, than tiles, and than run at once.
@pytest.mark.parametrize("n_blocks, n_threads", [(70, 32), (33, 64), (20, 256)])
def test_the_last_of_many_blocks_adds_them_all(library, n_blocks, n_threads):
    values = ordinary(torch.float64, 40 * TILE + 5)
    statistics = norm(Emulator(library, n_threads), [values], "f64", n_blocks=n_blocks)
    assert_are_of(statistics, [values], "f64")


@pytest.mark.parametrize("grad, n_blocks", [("f32", 1), ("f16", 3), ("bf16", 5), ("f64", 9)])
def test_statistics_have_the_same_bits_whatever_the_order_of_lanes_and_blocks(
    emulator, grad, n_blocks
):
    """They are those of the shim, which runs one lane after the other."""
    grads = filled(DTYPES[grad], 0).tensors
    shim = norm(ctypes.CDLL(stand_ins().kernels), grads, grad, n_blocks=n_blocks)
    for _ in range(2):
        statistics = norm(emulator, grads, grad, n_blocks=n_blocks)
        assert statistics.records.tobytes() == shim.records.tobytes()


def test_a_launch_without_tiles_publishes_zeros(emulator):
    statistics = norm(emulator, [], "f32")
    assert statistics.records.tobytes() == bytes(statistics.records.nbytes)


# The order of memory


def test_lanes_and_blocks_do_not_race():
    options = ("-fsanitize=thread", "-g1", "-DFEW_PAIRS")
    driver = built("frames_under_tsan", *options, HERE / "driver.cpp")
    # See ci/sanitize.sh: older ThreadSanitizers know one layout of addresses.
    is_allowed = subprocess.run(["setarch", "-R", "true"], stderr=subprocess.DEVNULL)
    fixed_layout = ["setarch", "-R"] if is_allowed.returncode == 0 else []
    run = subprocess.run(
        [*fixed_layout, driver, "2", "64"],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
