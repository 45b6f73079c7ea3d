"""Finding NCCL and the driver, and what init says where one is missing, old, there twice, or not
the same on all ranks. With the stand-ins, and with the real library of NVIDIA's wheel, as far as it
goes without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from datetime import timedelta

import pytest
import torch

import fastcomm
from fastcomm import InitError, NcclError
from fastcomm.transports.nccl import library as nccl_library
from tests.fakes.stand_ins import stand_ins
from tests.support.outcomes import values_of
from tests.transports.nccl import outcomes_of

NOWHERE = "/nowhere/lib.so"


def _init(place, device="cpu", backend="nccl"):
    options = {
        "init_method": place.init_method,
        "rank": place.rank,
        "world_size": place.world_size,
        "timeout": timedelta(seconds=10),
    }
    fastcomm.init(backend, device=device, **options).close()


def assert_all_refused(outcomes, *words):
    for outcome in outcomes:
        assert outcome.is_a(InitError), outcome
        assert all(re.search(word, outcome.failure.message) for word in words), outcome


# What is missing or does not do


REFUSALS = {
    "no driver": ({"FASTCOMM_CUDA_LIBRARY": NOWHERE}, "no CUDA driver.*/nowhere/lib.so"),
    "a driver that does not start": (
        {"FASTCOMM_STAND_IN_CUDA_FAULTS": "cuInit=100"},
        "does not start.*CUDA_ERROR_NO_DEVICE",
    ),
    "no device": ({"FASTCOMM_STAND_IN_CUDA_FAULTS": "cuDeviceGetCount=100"}, "no CUDA device 0"),
    "no NCCL": (
        {"FASTCOMM_NCCL_LIBRARY": NOWHERE},
        "no NCCL library.*/nowhere/lib.so.*torch bring one",
    ),
    "something else": ({"FASTCOMM_NCCL_LIBRARY": "libm.so.6"}, "has no ncclGetVersion"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_init_says_what_is_missing(case):
    env, words = REFUSALS[case]
    assert_all_refused(outcomes_of(1, _init, env=env), words)


def test_a_driver_without_the_calls_is_too_old():
    assert_all_refused(
        outcomes_of(1, _init, env={"FASTCOMM_CUDA_LIBRARY": stand_ins().kernels}),
        "too old.*cuInit",
        "11.4",
    )


def test_an_old_nccl_is_refused_with_its_version_and_its_path():
    old = stand_ins().old_nccl
    assert_all_refused(
        outcomes_of(1, _init, env={"FASTCOMM_NCCL_LIBRARY": old}),
        rf"2\.17\.1 in {os.path.realpath(old)}",
        r"2\.18 or newer",
    )


@pytest.mark.parametrize("case", ["no driver", "no NCCL"])
def test_what_one_rank_lacks_all_hear_of(case):
    env, words = REFUSALS[case]
    first, second = outcomes_of(2, _init, env=[{}, env])
    assert_all_refused([first, second], words)
    assert "rank 1 failed" in first.failure.message


def test_different_versions_of_nccl_are_refused_on_all_ranks():
    versions = [
        {"FASTCOMM_STAND_IN_NCCL_VERSION": version} for version in ("22907", "22907", "23005")
    ]
    path = os.path.realpath(stand_ins().nccl)
    assert_all_refused(
        outcomes_of(3, _init, env=versions),
        rf"rank 0: 2\.29\.7 in {path}; rank 1: 2\.29\.7 .*rank 2: 2\.30\.5 in {path}",
    )


@pytest.mark.parametrize(
    "device, backend, words",
    [("cuda:7", "nccl", "cuda:7|CUDA device 7"), ("cuda:0", "shm", "cuda:0")],
)
def test_a_device_that_does_not_fit_is_refused(device, backend, words):
    assert_all_refused(outcomes_of(1, _init, device, backend), words)


def test_nccl_does_not_reduce_on_the_cpu():
    outcomes = outcomes_of(1, _init, env={"FASTCOMM_CUDA_LIBRARY": None})
    assert_all_refused(outcomes, "no CUDA driver|on CUDA devices, not on cpu")


def _ask_for_fp8(place):
    comm = fastcomm.init("nccl", init_method=place.init_method, rank=0, world_size=1, device="cpu")
    with pytest.raises(
        TypeError, match=r"float8_e4m3fn needs NCCL 2\.24 or newer; this is 2\.23\.4"
    ):
        comm.empty(4, dtype=torch.float8_e4m3fn)


def test_8_bit_floats_need_a_newer_nccl():
    values_of(outcomes_of(1, _ask_for_fp8, env={"FASTCOMM_STAND_IN_NCCL_VERSION": "22304"}))


# Which copy


def _load_a_copy_first(place, copy):
    ctypes.CDLL(copy)
    _init(place)


def test_a_second_copy_in_the_process_is_refused(tmp_path):
    copy = shutil.copy(stand_ins().nccl, tmp_path / "libnccl.so.2")
    assert_all_refused(
        outcomes_of(1, _load_a_copy_first, copy),
        re.escape(str(copy)),
        re.escape(os.path.realpath(stand_ins().nccl)),
    )


def _load_after(place, first):
    if first is not None:
        ctypes.CDLL(first)
    return nccl_library.load()


def test_the_copy_that_is_loaded_already_is_taken_before_any_other():
    wheels = os.path.realpath(nccl_library.nccl_wheel())  # torch's own, unless it is a CPU build
    loaded = wheels if wheels in nccl_library.loaded_copies() else stand_ins().nccl
    ((_, path),) = values_of(
        outcomes_of(1, _load_after, loaded, env={"FASTCOMM_NCCL_LIBRARY": None})
    )
    assert path == os.path.realpath(loaded)


# The real library


@pytest.fixture(scope="module")
def wheels_nccl():
    """Of NVIDIA's wheel, which belongs to what the tests need: without it they would prove too
    little.
    """
    path = nccl_library.nccl_wheel()
    assert path is not None, (
        "the tests load NVIDIA's NCCL: install what the extra `dev` names (nvidia-nccl-cu13)"
    )
    return os.path.realpath(path)


@pytest.fixture(scope="module")
def real_nccl(wheels_nccl):
    """The wheel's, or the one that ci/nccl_versions.sh has downloaded."""
    return os.environ.get("FASTCOMM_TEST_NCCL", wheels_nccl)


def test_the_wheels_library_is_found(wheels_nccl):
    ((version, path),) = values_of(
        outcomes_of(1, _load_after, None, env={"FASTCOMM_NCCL_LIBRARY": None})
    )
    assert version >= nccl_library.OLDEST and path == wheels_nccl


def _unique_ids(place):
    return nccl_library.unique_id(), nccl_library.unique_id(), nccl_library.load()


def test_the_real_library_has_a_version_and_gives_unique_ids(real_nccl):
    env = {"FASTCOMM_NCCL_LIBRARY": real_nccl, "NCCL_SOCKET_IFNAME": "lo"}
    ((first, second, (version, path)),) = values_of(outcomes_of(1, _unique_ids, env=env))
    assert len(first) == len(second) == 256 and first != second
    assert version >= nccl_library.OLDEST and path == real_nccl


def test_the_real_library_without_a_device_is_an_nccl_error_that_names_the_call(real_nccl):
    env = {
        "FASTCOMM_NCCL_LIBRARY": real_nccl,
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    first, second = outcomes_of(2, _init, env=env)
    for outcome in (first, second):
        # Whose call fails first tells the other.
        assert outcome.is_a((NcclError, InitError)), outcome
        assert re.search(
            r"ncclCommInitRankConfig failed with code 1, unhandled cuda error.*: Cuda "
            r"failure.*\(NCCL 2\.",
            outcome.failure.message,
        )
    assert first.is_a(NcclError) or second.is_a(NcclError)
