"""What goes wrong around a communicator: ranks that die, leave, come late or never, forks, Ctrl-C,
a small /dev/shm. Every rank must get an error that helps, soon, and nothing may be left behind.
"""

from __future__ import annotations

import builtins
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, InitError, PeerLostError, TimeoutError
from tests.support.ranks import NO_VARIABLES, fresh_ranks, note, noted, torchrun_env, values_of
from tests.support.reference import check_all_reduce


def communicator(place, **options):
    return fastcomm.init(
        "shm",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        **options,
    )


# Peers that go away. The last rank does, and leaves the time for the others to find.


def _leave(place, comm, how):
    note(place, pid=os.getpid(), left_at=time.monotonic())
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exits":
        sys.exit(0)
    elif how == "exits at once":
        os._exit(0)
    elif how == "closes":
        comm.close()
    elif how == "aborts":
        comm.abort()
    else:
        raise RuntimeError("of the user's own making")


COLLECTIVES = {
    "barrier": lambda comm: comm.barrier(),
    "small all_reduce": lambda comm: comm.all_reduce(torch.ones(10)),
    "all_reduce in shared memory": lambda comm: comm.all_reduce(
        comm.empty(100_000, dtype=torch.float32)
    ),
    "large all_reduce": lambda comm: comm.all_reduce(torch.ones(1_000_000)),
    "async all_reduce": lambda comm: comm.all_reduce(torch.ones(100_000), async_op=True).wait(),
    "broadcast": lambda comm: comm.broadcast(torch.ones(100_000)),
    "all_gather": lambda comm: comm.all_gather_single(
        torch.ones(100_000 * comm.world_size), torch.ones(100_000)
    ),
    "reduce_scatter": lambda comm: comm.reduce_scatter_single(
        torch.ones(100_000), torch.ones(100_000 * comm.world_size)
    ),
}


def _lose_a_peer(place, collective, how):
    """What the others get in the collective: the message, and how many seconds after the
    peer left.
    """
    comm = communicator(place)
    check_all_reduce(comm)
    if place.rank == place.world_size - 1:
        time.sleep(0.2)
        _leave(place, comm, how)
        time.sleep(1)
        return None
    with pytest.raises(PeerLostError) as lost:
        COLLECTIVES[collective](comm)
    seconds = time.monotonic() - float(noted(place, "left_at"))
    with pytest.raises(PeerLostError):
        comm.barrier()
    dead = (place.world_size - 1,) if " died" in str(lost.value) else ()
    assert lost.value.ranks == comm.failure.ranks == dead
    return str(lost.value), int(noted(place, "pid")), seconds


def assert_told_of_the_loss(outcomes, *words):
    *others, last = outcomes
    values_of(others)
    for message, pid, seconds in (outcome.value for outcome in others):
        assert f"rank {last.rank} (pid {pid})" in message
        assert any(word in message for word in words), message
        assert seconds < 1


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_killed_peer_is_named_within_a_second(world_size, collective):
    outcomes = fresh_ranks(world_size, _lose_a_peer, collective, "killed")
    assert_told_of_the_loss(outcomes, "died", "gave up on")
    assert outcomes[-1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    "how, words",
    [
        ("exits", "closed"),
        ("exits at once", "died"),
        ("closes", "closed"),
        ("aborts", "aborted"),
        ("raises", "closed"),
    ],
)
@pytest.mark.parametrize("collective", ["barrier", "large all_reduce"])
def test_a_peer_that_leaves_is_named_within_a_second(collective, how, words):
    outcomes = fresh_ranks(3, _lose_a_peer, collective, how)
    assert_told_of_the_loss(outcomes, words, "died", "gave up on")


def _lose_a_peer_at_any_moment(place, numel, delay):
    comm = communicator(place)
    tensors = [comm.empty(numel, dtype=torch.float32).zero_(), torch.zeros(numel)]
    comm.barrier()
    if place.rank == place.world_size - 1:
        threading.Timer(delay, _leave, (place, comm, "killed")).start()
    while True:
        try:
            for tensor in tensors:
                comm.all_reduce(tensor)
        except PeerLostError as error:
            return (
                str(error),
                int(noted(place, "pid")),
                time.monotonic() - float(noted(place, "left_at")),
            )


@pytest.mark.parametrize("numel", [100, 10_000, 2_000_000])
@pytest.mark.parametrize("delay", [0.1, 0.1314, 0.1777])
def test_a_peer_may_be_killed_at_any_moment(numel, delay):
    assert_told_of_the_loss(
        fresh_ranks(3, _lose_a_peer_at_any_moment, numel, delay), "died", "gave up on"
    )


def _lose_a_peer_with_works_under_way(place):
    comm = communicator(place)
    if place.rank == 1:
        _leave(place, comm, "killed")
    works = [comm.all_reduce(torch.ones(5000), async_op=True) for _ in range(5)]
    for work in works:
        with pytest.raises(PeerLostError):
            work.wait()


def test_every_work_under_way_hears_of_a_lost_peer():
    values_of(fresh_ranks(2, _lose_a_peer_with_works_under_way)[:1])


# Peers that come late


def _miss_the_deadline(place):
    comm = communicator(place, timeout=timedelta(seconds=0.5))
    check_all_reduce(comm)
    if place.rank == 1:
        time.sleep(1.5)
        with pytest.raises(PeerLostError, match="gave up on rank 1"):
            comm.all_reduce(torch.ones(5000))
        return "", os.getpid()
    before = time.monotonic()
    with pytest.raises((TimeoutError, PeerLostError)) as late:
        comm.all_reduce(torch.ones(5000))
    assert 0.4 < time.monotonic() - before < 1.2
    with pytest.raises(type(late.value)):
        comm.barrier()
    return type(late.value).__name__, str(late.value)


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    outcomes = fresh_ranks(2, _miss_the_deadline)
    values_of(outcomes)
    (error, message), (_, pid) = (outcome.value for outcome in outcomes)
    assert error == "TimeoutError"
    assert re.search(
        rf"waited 0.5 s.*all_reduce of 5000 float32.*missing: rank 1 \(pid {pid}\)", message
    ), message


def test_ranks_that_wait_together_all_name_the_one_that_does_not_come():
    outcomes = fresh_ranks(4, _miss_the_deadline)
    values_of(outcomes)
    first, (_, pid), *others = (outcome.value for outcome in outcomes)
    assert all(f"rank 1 (pid {pid})" in message for _, message in (first, *others))
    # Whose clock runs out first tells the others.
    assert "TimeoutError" in {error for error, _ in (first, *others)}


def test_a_timeout_is_pythons_timeout_error_too():
    assert issubclass(TimeoutError, builtins.TimeoutError)


def _come_within_the_deadline(place):
    comm = communicator(place, timeout=timedelta(seconds=2))
    for late in range(3):
        time.sleep(1 if place.rank == late % 2 else 0)
        check_all_reduce(comm)


def test_a_late_rank_within_the_timeout_is_waited_for():
    values_of(fresh_ranks(2, _come_within_the_deadline))


# Ctrl-C


def _press(times):
    """Ctrl-C, so often."""
    for i in range(times):
        threading.Timer(0.2 + 0.2 * i, os.kill, (os.getpid(), signal.SIGINT)).start()


def _interrupt(place, collective, times):
    comm = communicator(place)
    check_all_reduce(comm)
    if place.rank == 1:
        time.sleep(1.5)
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _press(times)
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        COLLECTIVES[collective](comm)
    if times == 2:
        assert time.monotonic() - before < 1
    else:  # there was nobody to end it with
        assert isinstance(caught.value.__cause__, PeerLostError)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("collective", ["barrier", "large all_reduce", "async all_reduce"])
def test_ctrl_c_ends_the_waiting_once_the_peer_is_gone_and_twice_at_once(collective, times):
    values_of(fresh_ranks(2, _interrupt, collective, times))


def _interrupt_and_go_on(place):
    comm = communicator(place)
    tensors = [torch.full((n,), place.rank + 1.0) for n in (10, 100_000)]
    for tensor in tensors:
        if place.rank == 1:
            time.sleep(1.5)  # longer than it takes to say what is waited for
            comm.all_reduce(tensor)
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _press(1)
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(tensor)
    check_all_reduce(comm)
    return [tensor.unique().tolist() for tensor in tensors]


def test_a_collective_interrupted_by_ctrl_c_is_complete_when_that_is_raised():
    assert values_of(fresh_ranks(2, _interrupt_and_go_on)) == [[[3.0], [3.0]]] * 2


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
    fresh_ranks(2, _use_and_end, how, env={"TMPDIR": str(tmp_path)})
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

REDUCE_100_MIB = """
import os, sys
rank = 0 if os.fork() else 1
import torch, fastcomm
with fastcomm.init("shm", init_method=sys.argv[1], rank=rank, world_size=2) as comm:
    for tensor in (comm.empty(25 * 2**20, dtype=torch.float32).fill_(1), torch.ones(25 * 2**20)):
        comm.all_reduce(tensor)
        assert (tensor == 2).all()
    comm.barrier()
if rank == 0:
    sys.exit(os.wait()[1])
"""


def test_tensors_may_be_larger_than_dev_shm(tmp_path):
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
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
        REDUCE_100_MIB,
        f"file://{tmp_path}/meet",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


# Forks


def _fork(place):
    comm = communicator(place)
    tensor = comm.empty(50_000, dtype=torch.float32).fill_(1)
    work = comm.all_reduce(torch.ones(5000), async_op=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, _of_what_use_is(comm, work).encode())
        del comm, work, tensor  # nor may the child take anything from its parent
        gc.collect()
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    work.wait()
    for _ in range(3):
        comm.all_reduce(tensor)
        check_all_reduce(comm)
    assert (tensor == 2**3).all()
    comm.barrier()
    return answer, os.getpid()


def _of_what_use_is(comm, work):
    """What a forked child hears about the communicator of its parent, one line per attempt."""
    answers = []
    for attempt in (
        comm.barrier,
        lambda: comm.all_reduce(torch.ones(4)),
        lambda: comm.empty(4, dtype=torch.float32),
        work.wait,
    ):
        try:
            attempt()
            answers.append("no error")
        except FastcommError as error:
            answers.append(str(error))
    comm.close()
    return "\n".join(answers)


def test_a_forked_child_is_told_and_its_parent_goes_on():
    outcomes = fresh_ranks(2, _fork)
    values_of(outcomes)
    for answer, pid in (outcome.value for outcome in outcomes):
        lines = answer.splitlines()
        assert len(lines) == 4
        assert all(
            "fork" in line and str(pid) in line and "fastcomm.init" in line for line in lines
        ), answer


def _use_a_data_loader(place):
    multiprocessing.current_process()._config["daemon"] = False  # or it may not have workers
    comm = communicator(place)
    totals = []
    for numbers in torch.utils.data.DataLoader(
        list(range(8)), batch_size=4, num_workers=2, multiprocessing_context="fork"
    ):
        comm.all_reduce(numbers)
        totals.append(numbers.tolist())
    comm.barrier()
    assert totals == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_the_workers_of_a_data_loader_disturb_nobody():
    values_of(fresh_ranks(2, _use_a_data_loader))


# Ranks that cannot be brought together


def _init(place, rank=None, world_size=None, **options):
    rank = place.rank if rank is None else rank[place.rank]
    world_size = place.world_size if world_size is None else world_size[place.rank]
    options = {"init_method": place.init_method, "timeout": timedelta(seconds=10), **options}
    fastcomm.init(rank=rank, world_size=world_size, **options).barrier()


def assert_all_refused(outcomes, *words, error=InitError):
    for outcome in outcomes:
        assert outcome.is_a(error), outcome
        assert all(re.search(word, outcome.failure.message) for word in words), outcome


def _init_from_environment(place, **options):
    fastcomm.init(**options)


def test_without_torchrun_init_says_what_to_do():
    assert_all_refused(
        fresh_ranks(1, _init_from_environment),
        "RANK is not set",
        "torchrun --nproc-per-node",
        "init_method=",
    )


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_part_of_torchruns_environment_is_not_enough(missing):
    env = {**torchrun_env(1)[0], missing: None}
    assert_all_refused(fresh_ranks(1, _init_from_environment, env=env), missing)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_an_environment_that_is_no_number_is_refused(name):
    env = {**torchrun_env(1)[0], name: "two"}
    assert_all_refused(fresh_ranks(1, _init_from_environment, env=env), name, "two")


def test_a_rank_given_twice_is_refused_on_both():
    assert_all_refused(fresh_ranks(2, _init, (0, 0)), "rank 0 was given to two processes")


def test_a_rank_given_twice_among_three_is_refused_on_all():
    assert_all_refused(fresh_ranks(3, _init, (0, 1, 1)), "rank 1 was given to two processes")


def test_ranks_that_disagree_about_the_world_size_are_refused():
    outcomes = fresh_ranks(3, _init, None, (3, 3, 4))
    assert_all_refused(outcomes, "world_size", r"\b3\b", r"\b4\b")


@pytest.mark.parametrize("rank, world_size", [(2, 2), (-1, 2), (0, 0), (5, 1)])
def test_a_rank_outside_the_world_is_refused(rank, world_size):
    outcomes = fresh_ranks(1, _init, (rank,), (world_size,))
    assert_all_refused(
        outcomes, rf"rank {rank}\b", rf"world_size {world_size}\b", error=(InitError, ValueError)
    )


def test_a_rank_outside_the_world_of_torchrun_is_refused():
    env = {**torchrun_env(1)[0], "RANK": "1"}
    assert_all_refused(
        fresh_ranks(1, _init_from_environment, env=env),
        "rank 1",
        "world_size 1",
        error=(InitError, ValueError),
    )


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_a_rank_that_is_missing_is_named_after_the_timeout(scheme, missing):
    place = (
        NO_VARIABLES
        if scheme == "file"
        else {"MEETING_POINT": f"tcp://127.0.0.1:{torchrun_env(2)[0]['MASTER_PORT']}"}
    )
    outcomes = fresh_ranks(2, _init_without, missing, env=place)
    (present,) = [outcome for outcome in outcomes if outcome.rank != missing]
    assert present.is_a((InitError, TimeoutError)), present
    if (
        scheme == "tcp" and missing == 0
    ):  # nobody keeps the store; there is no way to know who is there
        assert "cannot open the meeting point" in present.failure.message
    else:
        assert re.search(rf"ranks? \[?{missing}\b", present.failure.message), present


def _init_without(place, missing):
    if place.rank == missing:
        return
    before = time.monotonic()
    try:
        _init(
            place,
            timeout=timedelta(seconds=1),
            init_method=os.environ.get("MEETING_POINT", place.init_method),
        )
    finally:
        assert time.monotonic() - before < 5


def test_ranks_on_different_hosts_share_no_memory():
    env = [{"FASTCOMM_HOST_ID": host} for host in ("one", "one", "other")]
    outcomes = fresh_ranks(3, _init_on_hosts, "shm", env=env)
    assert_all_refused(outcomes, "host", "hierarchical")
    assert re.search(r"\b2\b", outcomes[0].failure.message) and re.search(
        r"\b2\b", outcomes[2].failure.message
    )


def _init_on_hosts(place, backend):
    _init(place, backend=backend)


def test_ranks_on_one_host_by_another_name_are_brought_together():
    values_of(fresh_ranks(2, _init, env={"FASTCOMM_HOST_ID": "one"}))
