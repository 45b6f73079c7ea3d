"""The stand-in for NCCL, through ctypes: that it checks, fails and waits as NCCL does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
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


def send(
    nccl: ctypes.CDLL, handle: c_void_p, tensor: torch.Tensor, peer: int, dtype: int = FLOAT32
) -> int:
    address = c_void_p(tensor.data_ptr())
    return nccl.ncclSend(address, c_size_t(tensor.numel()), dtype, peer, handle, None)


def recv(nccl: ctypes.CDLL, handle: c_void_p, tensor: torch.Tensor, peer: int) -> int:
    address = c_void_p(tensor.data_ptr())
    return nccl.ncclRecv(address, c_size_t(tensor.numel()), FLOAT32, peer, handle, None)


@contextlib.contextmanager
def group(nccl: ctypes.CDLL, expected: int = 0) -> Iterator[None]:
    """A group whose end returns what is expected."""
    assert nccl.ncclGroupStart() == 0
    yield
    assert nccl.ncclGroupEnd() == expected


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
    assert send(nccl, alone, torch.ones(3), 0) == INVALID_USAGE
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


def code_of_a_call_that_is_aborted(
    nccl: ctypes.CDLL, handle: c_void_p, call: Callable[[], int]
) -> int:
    codes = []
    thread = threading.Thread(target=lambda: codes.append(call()))
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


# Sends and receives: one process


def test_a_rank_sends_to_itself_in_a_group(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    inp, out = torch.arange(10.0), torch.zeros(10)
    with group(nccl):
        assert recv(nccl, alone, out, 0) == 0
        assert send(nccl, alone, inp, 0) == 0
        assert out.sum() == 0
    assert torch.equal(out, inp)
    comm = f"comm={alone.value:#x}"
    assert log_of(nccl)[-4:] == [
        "ncclGroupStart",
        f"ncclRecv numel=10 dtype=7 peer=0 stream=0x0 {comm}",
        f"ncclSend numel=10 dtype=7 peer=0 stream=0x0 {comm}",
        "ncclGroupEnd",
    ]


def test_a_send_to_oneself_needs_its_match_in_the_group(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    assert send(nccl, alone, torch.ones(3), 0) == INVALID_USAGE
    assert recv(nccl, alone, torch.ones(3), 0) == INVALID_USAGE
    inp, out = torch.ones(3), torch.zeros(4)
    with group(nccl, INVALID_USAGE):
        assert send(nccl, alone, inp, 0) == 0
        assert recv(nccl, alone, out, 0) == 0


def test_a_group_of_messages_is_on_one_stream(nccl: ctypes.CDLL, alone: c_void_p) -> None:
    inp, out = torch.ones(3), torch.zeros(3)
    with group(nccl, INVALID_USAGE):
        assert send(nccl, alone, inp, 0) == 0
        address, stream = c_void_p(out.data_ptr()), c_void_p(17)
        assert nccl.ncclRecv(address, c_size_t(3), FLOAT32, 0, alone, stream) == 0
    assert b"streams" in nccl.ncclGetLastError(None)


def test_a_receive_that_overlaps_another_message_of_its_group_is_refused(
    nccl: ctypes.CDLL, alone: c_void_p
) -> None:
    both = torch.arange(5.0)
    with group(nccl, INVALID_USAGE):
        assert send(nccl, alone, both[:3], 0) == 0
        assert recv(nccl, alone, both[2:], 0) == 0
    with group(nccl):  # in place
        assert send(nccl, alone, both, 0) == 0
        assert recv(nccl, alone, both, 0) == 0
    assert torch.equal(both, torch.arange(5.0))


@pytest.mark.parametrize("call", [send, recv])
def test_a_message_has_a_peer_and_a_buffer(
    nccl: ctypes.CDLL, alone: c_void_p, call: Callable[..., int]
) -> None:
    assert call(nccl, alone, torch.ones(3), 1) == INVALID_ARGUMENT
    assert call(nccl, alone, torch.ones(3), -1) == INVALID_ARGUMENT
    assert call(nccl, alone, torch.ones(3, device="meta"), 0) == INVALID_ARGUMENT


@pytest.mark.parametrize("call", [send, recv])
def test_a_group_with_a_message_that_fails_does_not_run(
    nccl: ctypes.CDLL, alone: c_void_p, call: Callable[..., int]
) -> None:
    name = b"ncclSend" if call is send else b"ncclRecv"
    assert nccl.stand_in_fail(name, SYSTEM_ERROR, 0) == 0
    tensors = torch.ones(3), torch.zeros(3)
    with group(nccl, SYSTEM_ERROR):
        assert call(nccl, alone, torch.ones(3), 0) == SYSTEM_ERROR
        assert nccl.stand_in_fail(name, 0, 0) == 0
        assert send(nccl, alone, tensors[0], 0) == recv(nccl, alone, tensors[1], 0) == 0
    assert tensors[1].tolist() == [0, 0, 0]
    with group(nccl):
        assert send(nccl, alone, tensors[0], 0) == recv(nccl, alone, tensors[1], 0) == 0
    assert tensors[1].tolist() == [1, 1, 1]


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
            code = code_of_a_call_that_is_aborted(
                world.nccl,
                world.handle,
                lambda: all_reduce(world.nccl, world.handle, torch.ones(3)),
            )
            assert code == INTERNAL_ERROR


@on_ranks(2)
def test_ranks_with_different_versions_do_not_form_a_communicator(comm, libraries):
    world = World(comm, libraries.nccl, version="22809" if comm.rank == 0 else "22907")
    assert world.code == INVALID_USAGE
    assert b"versions" in world.nccl.ncclGetLastError(None)
    assert world.nccl.stand_in_live_comms() == 0


# Sends and receives: several processes

LONG = 100_000  # elements, more than are under way between two ranks at a time


def parts(rank: int, peer: int) -> list[torch.Tensor]:
    """What a rank sends to a peer: a short message, an empty one and a long one."""
    return [torch.full((n,), 100.0 * rank + peer + n) for n in (3, 0, LONG + rank)]


@on_ranks(3)
def test_all_ranks_send_to_all_in_one_group(comm, libraries):
    with World(comm, libraries.nccl) as world:
        ranks = range(comm.world_size)
        inputs = [parts(comm.rank, peer) for peer in ranks]
        expected = [parts(peer, comm.rank) for peer in ranks]
        outputs = [[torch.zeros_like(part) for part in theirs] for theirs in expected]
        for _ in range(3):
            with group(world.nccl):
                for peer in ranks:
                    for part in inputs[peer]:
                        assert send(world.nccl, world.handle, part, peer) == 0
                for peer in reversed(ranks):
                    for part in outputs[peer]:
                        assert recv(world.nccl, world.handle, part, peer) == 0
            for theirs, out in zip(expected, outputs, strict=True):
                assert all(map(torch.equal, theirs, out))
                for part in out:
                    part.zero_()


@on_ranks(3)
def test_one_rank_receives_from_all_others(comm, libraries):
    with World(comm, libraries.nccl) as world:
        if comm.rank == 1:
            outputs = [torch.zeros(LONG) for _ in range(2)]
            with group(world.nccl):
                for out, peer in zip(outputs, (0, 2), strict=True):
                    assert recv(world.nccl, world.handle, out, peer) == 0
            assert [out.unique().tolist() for out in outputs] == [[0], [2]]
        else:
            mine = torch.full((LONG,), float(comm.rank))
            assert send(world.nccl, world.handle, mine, 1) == 0


@on_ranks(3)
def test_two_ranks_need_no_third(comm, libraries):
    with World(comm, libraries.nccl) as world:
        out = torch.zeros(3)
        if comm.rank == 0:
            assert send(world.nccl, world.handle, torch.ones(3), 2) == 0
        elif comm.rank == 2:
            assert recv(world.nccl, world.handle, out, 0) == 0
            assert out.sum() == 3


@on_ranks(2)
def test_a_send_waits_for_its_receive(comm, libraries):
    with World(comm, libraries.nccl) as world:
        codes = []
        if comm.rank == 0:
            thread = threading.Thread(
                target=lambda: codes.append(send(world.nccl, world.handle, torch.ones(3), 1))
            )
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
            comm.barrier()
            thread.join(10)
        else:
            comm.barrier()
            codes.append(recv(world.nccl, world.handle, torch.ones(3), 0))
        assert codes == [0]


@on_ranks(2)
def test_a_group_s_collectives_come_before_its_messages(comm, libraries):
    with World(comm, libraries.nccl) as world:
        total, inp, out, other = torch.ones(3), torch.ones(3), torch.zeros(3), 1 - comm.rank
        calls = [
            lambda: send(world.nccl, world.handle, inp, other),
            lambda: all_reduce(world.nccl, world.handle, total),
            lambda: recv(world.nccl, world.handle, out, other),
        ]
        with group(world.nccl):
            assert [call() for call in (calls if comm.rank == 0 else reversed(calls))] == [0, 0, 0]
        assert (total.sum(), out.sum()) == (6, 3)


def code_of_an_aborted_pair(world: World, rank: int, sent: torch.Tensor, dtype: int) -> int:
    """Rank 0 sends this to rank 1, which receives three float32."""

    def call() -> int:
        if rank == 0:
            return send(world.nccl, world.handle, sent, 1, dtype)
        return recv(world.nccl, world.handle, torch.ones(3), 0)

    return code_of_a_call_that_is_aborted(world.nccl, world.handle, call)


@on_ranks(2)
def test_messages_that_do_not_match_wait_until_they_are_aborted(comm, libraries):
    for numel, dtype in ((4, FLOAT32), (2, FLOAT32), (3, INT32)):
        with World(comm, libraries.nccl) as world:
            code = code_of_an_aborted_pair(world, comm.rank, torch.ones(numel), dtype)
            assert code == INTERNAL_ERROR
