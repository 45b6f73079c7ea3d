"""The stand-in for NCCL, through ctypes: that it checks, fails and waits as NCCL does."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_void_p

import pytest
import torch

from tests.fakes.stand_ins import StandIns, log_of, stand_ins
from tests.support.ranks import on_ranks

SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 2, 3, 4, 5, 7
SUM, PROD, MAX, MIN, AVG = range(5)
INT32, FLOAT32 = 2, 7


@pytest.fixture(scope="module")
def libraries() -> StandIns:
    return stand_ins()


# NCCL: one process


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("rest", c_int * 7),
    ]


def config(
    size: int = 48, magic: int = 0xCAFEBEEF, version: int = 22907, blocking: int = 1
) -> Config:
    return Config(size, magic, version, blocking)


def unique_id(nccl: ctypes.CDLL) -> UniqueId:
    made = UniqueId()
    assert nccl.ncclGetUniqueId(byref(made)) == 0
    return made


def init(
    nccl: ctypes.CDLL, n_ranks: int, identity: UniqueId, rank: int, how: Config | None
) -> tuple[int, c_void_p]:
    handle = c_void_p()
    code = nccl.ncclCommInitRankConfig(
        byref(handle), n_ranks, identity, rank, byref(how) if how is not None else None
    )
    return code, handle


def all_reduce(
    nccl: ctypes.CDLL, handle: c_void_p, tensor: torch.Tensor, dtype: int = FLOAT32, op: int = SUM
) -> int:
    address = c_void_p(tensor.data_ptr())
    return nccl.ncclAllReduce(address, address, c_size_t(tensor.numel()), dtype, op, handle, None)


def async_error(nccl: ctypes.CDLL, handle: c_void_p) -> int:
    error = c_int(-1)
    assert nccl.ncclCommGetAsyncError(handle, byref(error)) == 0
    return error.value


@pytest.fixture
def nccl(libraries: StandIns) -> Iterator[ctypes.CDLL]:
    """The library, with no orders left and nothing alive when the test ends."""
    library = load_nccl(libraries.nccl)
    yield library
    assert library.stand_in_live_comms() == 0
    assert library.stand_in_live_bytes() == 0


def load_nccl(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
    library.stand_in_live_bytes.restype = c_size_t
    return library


@pytest.fixture
def alone(nccl: ctypes.CDLL) -> Iterator[c_void_p]:
    """A communicator of one rank; the test may have ended it already."""
    code, handle = init(nccl, 1, unique_id(nccl), 0, None)
    assert code == 0
    yield handle
    nccl.ncclCommDestroy(handle)


@pytest.mark.parametrize("wrong", [{"size": 47}, {"magic": 0}, {"version": 0}])
def test_a_config_that_is_none_is_refused(nccl: ctypes.CDLL, wrong: dict[str, int]) -> None:
    assert init(nccl, 1, unique_id(nccl), 0, config(**wrong))[0] == INVALID_ARGUMENT
    assert next(iter(wrong)).encode() in nccl.ncclGetLastError(
        None
    ) or b"shorter" in nccl.ncclGetLastError(None)


def test_a_communicator_that_is_gone_is_refused(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert all_reduce(nccl, alone, torch.ones(3)) == 0
    assert nccl.ncclCommDestroy(alone) == 0
    assert all_reduce(nccl, alone, torch.ones(3)) == INVALID_ARGUMENT
    assert nccl.ncclCommAbort(alone) == INVALID_ARGUMENT


def test_averages_are_refused(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert all_reduce(nccl, alone, torch.ones(3), op=AVG) == INVALID_ARGUMENT


def test_memory_is_freed_after_its_registration(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    address, window = c_void_p(), c_void_p()
    assert nccl.ncclMemAlloc(byref(address), c_size_t(1000)) == 0
    assert nccl.stand_in_live_bytes() == 1000
    assert nccl.ncclCommWindowRegister(alone, address, c_size_t(1000), byref(window), 1) == 0
    assert nccl.ncclMemFree(address) == INVALID_USAGE
    assert nccl.ncclCommWindowDeregister(alone, window) == 0
    assert nccl.ncclMemFree(address) == 0
    assert log_of(nccl)[-4:] == [
        f"ncclCommWindowRegister nbytes=1000 flags=1 comm={alone.value:#x}",
        "ncclMemFree",
        "ncclCommWindowDeregister",
        "ncclMemFree",
    ]


def test_calls_of_a_group_run_when_it_ends(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    inp, out = torch.ones(10), torch.zeros(10)
    addresses = c_void_p(inp.data_ptr()), c_void_p(out.data_ptr())
    assert nccl.ncclGroupStart() == 0
    assert nccl.ncclAllReduce(*addresses, c_size_t(10), FLOAT32, SUM, alone, None) == 0
    assert out.sum() == 0
    assert nccl.ncclGroupEnd() == 0
    assert out.sum() == 10


def test_a_revoked_communicator_only_waits_for_its_end(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert nccl.ncclCommRevoke(alone, 0) == 0
    assert all_reduce(nccl, alone, torch.ones(3)) == INVALID_USAGE
    assert nccl.ncclCommRevoke(alone, 0) == INVALID_ARGUMENT
    assert nccl.ncclCommFinalize(alone) == INVALID_ARGUMENT
    assert nccl.ncclCommAbort(alone) == 0


def test_a_communicator_is_finalized_once(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert nccl.ncclCommFinalize(alone) == 0
    assert nccl.ncclCommFinalize(alone) == INVALID_ARGUMENT
    assert nccl.ncclCommRevoke(alone, 0) == INVALID_ARGUMENT
    assert nccl.ncclCommDestroy(alone) == 0


def test_a_revocation_knows_no_flags(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert nccl.ncclCommRevoke(alone, 1) == INVALID_ARGUMENT
    assert all_reduce(nccl, alone, torch.ones(3)) == 0


def code_of_a_call_that_is_aborted(nccl: ctypes.CDLL, handle: c_void_p) -> int:
    codes = []
    thread = threading.Thread(target=lambda: codes.append(all_reduce(nccl, handle, torch.ones(3))))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert nccl.ncclCommAbort(handle) == 0
    thread.join(10)
    return codes[0]


def test_a_communicator_that_does_not_block_is_in_progress_until_all_are_there(
    nccl: ctypes.CDLL,
) -> None:
    identity = unique_id(nccl)
    code, first = init(nccl, 2, identity, 0, config(blocking=0))
    assert (code, async_error(nccl, first)) == (IN_PROGRESS, IN_PROGRESS)
    assert all_reduce(nccl, first, torch.ones(3)) == INVALID_ARGUMENT
    _, second = init(nccl, 2, identity, 1, config(blocking=0))
    assert (async_error(nccl, first), async_error(nccl, second)) == (0, 0)
    assert nccl.ncclCommAbort(first) == nccl.ncclCommAbort(second) == 0


def test_a_unique_id_is_good_for_one_communicator(nccl: ctypes.CDLL) -> None:
    identity = unique_id(nccl)
    _, handle = init(nccl, 1, identity, 0, None)
    assert init(nccl, 1, identity, 0, None)[0] == SYSTEM_ERROR
    assert nccl.ncclCommDestroy(handle) == 0


# NCCL: several processes


class World:
    """A communicator of the stand-in among the ranks of a test. Its library comes to life in the
    rank process.
    """

    def __init__(self, comm, path: str, version: str | None = None) -> None:
        if version is not None:
            os.environ["FASTCOMM_STAND_IN_NCCL_VERSION"] = version
        self.nccl = load_nccl(path)
        self.n_before = self.nccl.stand_in_live_comms()
        identity = torch.zeros(128, dtype=torch.uint8)
        if comm.rank == 0:
            identity = torch.frombuffer(bytearray(unique_id(self.nccl)), dtype=torch.uint8)
        comm.broadcast(identity, 0)
        self.code, self.handle = init(
            self.nccl, comm.world_size, UniqueId.from_buffer_copy(identity.numpy()), comm.rank, None
        )
        os.environ.pop("FASTCOMM_STAND_IN_NCCL_VERSION", None)

    def __enter__(self) -> World:
        assert self.code == 0
        return self

    def __exit__(self, *_: object) -> None:
        self.nccl.ncclCommAbort(self.handle)
        assert self.nccl.stand_in_live_comms() == self.n_before


@on_ranks(2)
def test_ranks_that_do_not_agree_wait_until_they_abort(comm, libraries):
    with World(comm, libraries.nccl) as world:
        dtype = FLOAT32 if comm.rank == 0 else INT32
        codes = []
        thread = threading.Thread(
            target=lambda: codes.append(all_reduce(world.nccl, world.handle, torch.ones(3), dtype))
        )
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert world.nccl.ncclCommAbort(world.handle) == 0
        thread.join(10)
        assert codes == [INTERNAL_ERROR]


@on_ranks(2)
def test_a_rank_does_not_notice_that_its_peer_has_aborted(comm, libraries):
    with World(comm, libraries.nccl) as world:
        if comm.rank == 0:
            assert world.nccl.ncclCommAbort(world.handle) == 0
        comm.barrier()
        if comm.rank == 1:
            assert code_of_a_call_that_is_aborted(world.nccl, world.handle) == INTERNAL_ERROR


@on_ranks(2)
def test_ranks_with_different_versions_do_not_form_a_communicator(comm, libraries):
    world = World(comm, libraries.nccl, version="22809" if comm.rank == 0 else "22907")
    assert world.code == INVALID_USAGE
    assert b"versions" in world.nccl.ncclGetLastError(None)
    assert world.nccl.stand_in_live_comms() == 0
