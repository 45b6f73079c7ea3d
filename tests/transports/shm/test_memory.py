"""Shared memory: how it is handed out and used again, and that nothing of it is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import fastcomm
from fastcomm import InitError
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.reference import check_all_reduce


def _shared_memory_bytes():
    """Shared memory this process has touched."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem:"))


@on_ranks(2)
def test_memory_goes_back_with_the_last_tensor_that_uses_it(comm):
    gc.collect()
    before = _shared_memory_bytes()
    for _ in range(10):
        tensor = comm.empty(16 * 2**20, dtype=torch.uint8).fill_(1)
        part = tensor[100:200]
        del tensor
        assert (part == 1).all()
        assert _shared_memory_bytes() - before < 40 * 2**20
        del part
    assert _shared_memory_bytes() - before < 4 * 2**20


@on_ranks(2, 3)
def test_ranks_may_take_their_tensors_from_different_places_in_memory(comm):
    held = [
        comm.empty(100_000 * (comm.rank + 1), dtype=torch.float32) for _ in range(comm.rank + 1)
    ]
    for _ in range(3):
        check_all_reduce(comm, 20_000, where="comm.empty")
        held.pop(0) if held else None


def test_a_communicator_that_could_not_be_made_closes_nothing():
    with pytest.raises(InitError, match="64 ranks"):
        fastcomm.transports.shm.communicator.ShmCommunicator(0, 65, 0, None, timedelta(seconds=1))
    os.fstat(0)


def test_tensors_are_apart_in_memory_however_they_come_and_go(tmp_path):
    with fastcomm.init(init_method=f"file://{tmp_path}/store", rank=0, world_size=1) as comm:
        alive = []
        for i in range(100):
            tensor = comm.empty(1 + 997 * (i % 7) ** 4, dtype=torch.float32).fill_(i)
            cycle = [tensor]
            cycle.append(cycle)  # goes when Python collects it, at any time
            if i % 3 == 0:
                alive.append((i, tensor))
            assert all((kept == number).all() for number, kept in alive[-8:])


def test_neighbours_that_have_come_back_are_one_piece_of_memory_again(tmp_path):
    with fastcomm.init(init_method=f"file://{tmp_path}/store", rank=0, world_size=1) as comm:
        pages = [comm.empty(4096, dtype=torch.uint8) for _ in range(4)]
        first = pages[0].data_ptr()
        for i in (0, 2, 1):
            pages[i] = None
        assert comm.empty(3 * 4096, dtype=torch.uint8).data_ptr() == first


# What is left behind


def _use_and_end(place, how):
    comm = communicator(place)
    tensor = comm.empty(1_000_000, dtype=torch.float32)
    comm.all_reduce(tensor)
    comm.all_reduce(torch.ones(1_000_000))
    comm.barrier()
    if how == "raises":
        raise RuntimeError("of the user's own making")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "closes":
        comm.close()


def _shared_memory_files():
    # Python's own multiprocessing, in whatever else runs here, names its files so.
    return {
        path.name
        for path in Path("/dev/shm").iterdir()
        if not path.name.startswith(("sem.", "psm_", "pymp-"))
    }


@pytest.mark.parametrize("how", ["returns", "closes", "raises", "killed"])
def test_nothing_is_left_in_dev_shm_or_the_temporary_directory(how, tmp_path):
    before = _shared_memory_files()
    outcomes = fresh_ranks(2, _use_and_end, how, env={"TMPDIR": str(tmp_path)})
    if how == "killed":  # by itself, in the end
        assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL] * 2
    elif how == "raises":
        assert all("of the user's own making" in str(outcome) for outcome in outcomes)
    else:
        values_of(outcomes)
    assert _shared_memory_files() - before == set()
    assert list(tmp_path.iterdir()) == []


def _memory_that_is_gone(place):
    comm = communicator(place)
    comm.all_reduce(comm.empty(1_000_000, dtype=torch.float32))
    before = _mappings_and_descriptors()
    for _ in range(10):
        with communicator(place) as other:
            other.all_reduce(other.empty(1_000_000, dtype=torch.float32))
        del other
        gc.collect()
    return [
        after - earlier for after, earlier in zip(_mappings_and_descriptors(), before, strict=True)
    ]


def _mappings_and_descriptors():
    return Path("/proc/self/maps").read_text().count("memfd:fastcomm"), len(
        os.listdir("/proc/self/fd")
    )


def test_a_closed_communicator_keeps_no_mapping_and_no_descriptor():
    outcomes = fresh_ranks(2, _memory_that_is_gone)
    values_of(outcomes)
    for mappings, descriptors in (outcome.value for outcome in outcomes):
        # The stores the ranks met at may have descriptors of their own, but not ten times as many.
        assert mappings == 0 and descriptors < 5


# A small /dev/shm

REDUCE_32_MIB = """
import os, sys
rank = 0 if os.fork() else 1
import torch, fastcomm
with fastcomm.init("shm", init_method=sys.argv[1], rank=rank, world_size=2) as comm:
    for tensor in (comm.empty(8 * 2**20, dtype=torch.float32).fill_(1), torch.ones(8 * 2**20)):
        comm.all_reduce(tensor)
        assert (tensor == 2).all()
    comm.barrier()
if rank == 0:
    sys.exit(os.wait()[1])
"""


def test_a_host_with_much_memory_may_have_many_communicators(monkeypatch):
    """Each maps as much address space as there is memory, of which a process has 128 TiB."""
    pages = 4 * 2**40 // os.sysconf("SC_PAGE_SIZE")
    sysconf = os.sysconf
    monkeypatch.setattr(
        os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else sysconf(name)
    )
    comms = [fastcomm.init("shm", world_size=1) for _ in range(60)]
    for comm in comms:
        check_all_reduce(comm)
        comm.close()


def test_tensors_may_be_larger_than_dev_shm(tmp_path):
    mount = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("may not mount a small /dev/shm: needs root and the right to unshare")
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        REDUCE_32_MIB,
        f"file://{tmp_path}/meet",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
