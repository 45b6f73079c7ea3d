"""How communicators begin and end, and the memory they hand out, through public names."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, InitError, PeerLostError
from tests.support.ranks import fresh_ranks, gloo, on_ranks, torchrun_env, values_of
from tests.support.reference import (
    DTYPES,
    PLACES,
    assert_same_bits,
    check_all_reduce,
    placed,
    reduced,
    shards_of,
)


def outcomes_of(world_size, body, *args, **options):
    """What the body returned, by rank, in fresh processes."""
    return values_of(fresh_ranks(world_size, body, *args, **options))


# Memory


@on_ranks(2)
def test_comm_empty_gives_flat_cpu_tensors(comm):
    for dtype in DTYPES:
        for numel in (0, 1, 1000):
            tensor = comm.empty(numel, dtype=dtype)
            assert (tensor.shape, tensor.dtype, tensor.device) == ((numel,), dtype, comm.device)
            assert tensor.is_contiguous() and not tensor.requires_grad
            assert tensor.data_ptr() % 64 == 0


@on_ranks(2)
def test_comm_empty_tensors_do_not_overlap(comm):
    tensors = [comm.empty(numel, dtype=torch.float32) for numel in (1, 1000, 1025, 100_000)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


@on_ranks(2)
def test_comm_empty_is_local(comm):
    if comm.rank == 0:
        held = [comm.empty(1000, dtype=torch.float32) for _ in range(10)]
        del held
    comm.barrier()


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


def _tensor_after_close(place):
    comm = fastcomm.init(
        "shm", init_method=place.init_method, rank=place.rank, world_size=place.world_size
    )
    tensor = comm.empty(100_000, dtype=torch.float32).fill_(comm.rank)
    comm.all_reduce(tensor, "max")
    comm.close()
    del comm
    gc.collect()
    tensor.add_(1)
    return tensor.sum().item()


def test_a_tensor_outlives_its_communicator():
    assert outcomes_of(2, _tensor_after_close) == [200_000] * 2


@on_ranks(2)
def test_comm_empty_memory_of_many_sizes_is_used_again(comm):
    addresses = set()
    for i in range(200):
        tensor = comm.empty(1000 + i % 7 * 5000, dtype=torch.float32)
        addresses.add(tensor.data_ptr())
        check_all_reduce(comm, 2000, where="comm.empty")
    assert len(addresses) < 20


# To begin with


def _describe(comm):
    check_all_reduce(comm, where="comm.empty")
    return comm.rank, comm.world_size, comm.local_rank, str(comm.device), comm.backend


DESCRIPTIONS = [(0, 2, 0, "cpu", "shm"), (1, 2, 1, "cpu", "shm")]


def _init_from_environment(place, backend):
    with fastcomm.init(backend) as comm:
        return _describe(comm)


@pytest.mark.parametrize("backend", ["auto", "shm"])
def test_init_as_torchrun_starts_the_ranks(backend):
    assert outcomes_of(2, _init_from_environment, backend, env=torchrun_env(2)) == DESCRIPTIONS


def test_local_rank_is_what_the_launcher_says():
    env = [
        {**variables, "LOCAL_RANK": str(5 + rank)} for rank, variables in enumerate(torchrun_env(2))
    ]
    assert [
        local_rank
        for _, _, local_rank, _, _ in outcomes_of(2, _init_from_environment, "auto", env=env)
    ] == [5, 6]


def _init_at(place, init_method):
    with fastcomm.init(
        init_method=init_method or place.init_method, rank=place.rank, world_size=place.world_size
    ) as comm:
        return _describe(comm)


def test_init_over_tcp():
    assert (
        outcomes_of(2, _init_at, f"tcp://127.0.0.1:{torchrun_env(2)[0]['MASTER_PORT']}")
        == DESCRIPTIONS
    )


def test_init_over_a_file():
    assert outcomes_of(2, _init_at, None) == DESCRIPTIONS


def _init_from_group(place):
    with fastcomm.init(group=gloo()) as comm:
        return _describe(comm)


def test_init_from_a_group_of_torch_distributed():
    assert outcomes_of(2, _init_from_group) == DESCRIPTIONS


def _init_in_a_part_of_a_group(place):
    import torch.distributed as dist

    gloo()
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with fastcomm.init(group=parts[place.rank % 2]) as comm:
        tensor = torch.tensor([place.rank])
        comm.all_reduce(tensor)
        return comm.rank, comm.world_size, tensor.item()


def test_init_from_a_part_of_the_ranks():
    assert outcomes_of(4, _init_in_a_part_of_a_group) == [
        (0, 2, 2),
        (0, 2, 4),
        (1, 2, 2),
        (1, 2, 4),
    ]


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"backend": "smoke signals"}, ValueError, "smoke signals"),
        ({"init_method": "http://somewhere"}, ValueError, "http://somewhere"),
        ({"init_method": "tcp://127.0.0.1:29500"}, ValueError, "rank= and world_size="),
        ({"init_method": "file:///tmp/somewhere", "rank": 0}, ValueError, "rank= and world_size="),
        ({"device": "cuda"}, FastcommError, "cuda"),
    ],
)
def test_init_refuses_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        fastcomm.init(**options)


@on_ranks(2)
def test_communicators_side_by_side_do_not_disturb_each_other(comm):
    with fastcomm.init(group=gloo()) as other:
        for where in PLACES:
            shards = shards_of(torch.float32, comm.world_size, 20_000)
            tensor = placed(other, where, shards[comm.rank])
            work = other.all_reduce(tensor, async_op=True)
            check_all_reduce(comm, where=where)
            work.wait()
            assert_same_bits(tensor, reduced(shards, "sum"))
    check_all_reduce(comm)


@on_ranks(2)
def test_a_tensor_of_another_communicator_is_an_ordinary_one(comm):
    with fastcomm.init(group=gloo()) as other:
        tensor = other.empty(20_000, dtype=torch.float32).fill_(1)
        comm.all_reduce(tensor)
        assert (tensor == 2).all()


def _init_again_and_again(place):
    for _ in range(5):
        with fastcomm.init(
            init_method=place.init_method, rank=place.rank, world_size=place.world_size
        ) as comm:
            check_all_reduce(comm)


def test_init_may_be_called_again_at_the_same_place():
    outcomes_of(2, _init_again_and_again)


# To end with


def _use_after_end(comm, end):
    getattr(comm, end)()
    getattr(comm, end)()
    comm.close()
    calls = (
        lambda: comm.all_reduce(torch.zeros(4)),
        lambda: comm.all_reduce(torch.zeros(4), async_op=True),
        lambda: comm.broadcast(torch.zeros(4)),
        lambda: comm.all_gather_single(torch.zeros(8), torch.zeros(4)),
        lambda: comm.reduce_scatter_single(torch.zeros(2), torch.zeros(4)),
        comm.barrier,
        lambda: comm.empty(4, dtype=torch.float32),
    )
    for call in calls:
        with pytest.raises(FastcommError, match=end):
            call()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_communicator_says_that_it_has_ended(end):
    outcomes_of(2, _use_after_end, end, pass_comm=True)


def _end_before_the_others_come(comm, end):
    if comm.rank == 0:
        work = comm.all_reduce(torch.zeros(5000), async_op=True)
        getattr(comm, end)()
        with pytest.raises(FastcommError, match=end):
            work.wait()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_work_says_that_its_communicator_has_ended(end):
    outcomes_of(2, _end_before_the_others_come, end, pass_comm=True)


@on_ranks(1, 2)
def test_a_finished_work_remains_so_after_the_end(comm):
    with fastcomm.init(group=gloo()) as other:
        work = other.all_reduce(torch.zeros(5000), async_op=True)
        work.wait()
    work.wait()
    assert work.is_completed()


def _context_manager(place):
    with fastcomm.init(
        init_method=place.init_method, rank=place.rank, world_size=place.world_size
    ) as comm:
        check_all_reduce(comm)
        assert comm.failure is None
    assert "closed" in str(comm.failure)
    with pytest.raises(FastcommError, match="closed"):
        comm.barrier()


def test_a_context_manager_closes():
    outcomes_of(2, _context_manager)


def _fail_inside_context_manager(place):
    with fastcomm.init(
        init_method=place.init_method, rank=place.rank, world_size=place.world_size
    ) as comm:
        if place.rank == 0:
            raise KeyError("of the user's own making")
        comm.barrier()


def test_a_context_manager_left_by_an_exception_lets_nobody_wait():
    first, second = fresh_ranks(2, _fail_inside_context_manager, timeout=20)
    assert first.is_a(KeyError), first
    assert second.is_a(PeerLostError), second


def _one_fails_while_the_group_meets(place):
    group = gloo()
    if place.rank == 1:
        os.environ["FASTCOMM_HOST_ID"] = "elsewhere"
    with pytest.raises(InitError):
        fastcomm.init("shm", group=group)
    os.environ.pop("FASTCOMM_HOST_ID", None)
    with fastcomm.init(group=group) as comm:  # the group is not out of step
        return comm.world_size


def test_a_failure_while_a_group_meets_is_an_error_on_all_and_leaves_the_group_in_step():
    assert outcomes_of(2, _one_fails_while_the_group_meets) == [2, 2]


def _abort_from_another_thread(place):
    comm = fastcomm.init(
        init_method=place.init_method, rank=place.rank, world_size=place.world_size
    )
    if place.rank == 1:
        time.sleep(3)
        return None
    threading.Timer(0.3, comm.abort).start()
    with pytest.raises(FastcommError, match="aborted"):
        comm.all_reduce(torch.ones(100_000))
    return "aborted"


def test_another_thread_may_abort_a_collective_that_waits():
    assert outcomes_of(2, _abort_from_another_thread) == ["aborted", None]


def test_a_communicator_that_could_not_be_made_closes_nothing():
    with pytest.raises(InitError, match="64 ranks"):
        fastcomm.shm.communicator.ShmCommunicator(0, 65, 0, None, timedelta(seconds=1))
    os.fstat(0)


def test_tensors_are_apart_in_memory_however_they_come_and_go(tmp_path):
    with fastcomm.init(init_method=f"file://{tmp_path}/store", rank=0, world_size=1) as comm:
        alive = []
        for i in range(300):
            tensor = comm.empty(1 + 997 * (i % 7) ** 4, dtype=torch.float32).fill_(i)
            cycle = [tensor]
            cycle.append(cycle)  # goes when Python collects it, at any time
            if i % 3 == 0:
                alive.append((i, tensor))
            assert all((kept == number).all() for number, kept in alive[-8:])


def test_a_timeout_that_is_no_timedelta_is_refused(tmp_path):
    with pytest.raises(TypeError, match="timedelta"):
        fastcomm.init(init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=5)


def test_a_file_in_a_folder_that_does_not_exist_is_an_error_at_once(tmp_path):
    with pytest.raises(InitError, match="nowhere"):
        fastcomm.init(init_method=f"file://{tmp_path}/nowhere/store", rank=0, world_size=2)


def test_a_communicator_says_its_rank(tmp_path):
    with fastcomm.init(init_method=f"file://{tmp_path}/store", rank=0, world_size=1) as comm:
        assert repr(comm) == "<ShmCommunicator: rank 0 of 1>"


def _one_rank_skips(place):
    with fastcomm.init(
        init_method=place.init_method, rank=place.rank, world_size=place.world_size
    ) as comm:
        model = torch.nn.Linear(4, 1)
        fastcomm.Reducer(comm).attach(model)
        skipped = []
        for step in range(3):
            model.zero_grad()
            try:
                if step == 1 and comm.rank == 1:
                    comm.abandon()
                    raise FastcommError("bad batch")
                model(torch.full((1, 4), float(step))).sum().backward()
            except FastcommError:
                skipped.append(step)
        return skipped, model.weight.grad.tolist()


def test_a_rank_that_skips_a_step_says_so_with_abandon():
    assert outcomes_of(2, _one_rank_skips) == [([1], [[2.0] * 4])] * 2
