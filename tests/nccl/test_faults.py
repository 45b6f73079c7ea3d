"""What goes wrong on the NCCL path, provoked with the stand-ins for NCCL and for the driver: calls
that fail, ranks that die, leave, come late or never. Every rank must get an error that helps, soon;
NCCL's communicators must be ended, and nobody may be left waiting.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

import fastcomm
from fastcomm import (
    AbandonedError,
    FastcommError,
    InitError,
    MismatchError,
    NcclError,
    PeerLostError,
    TimeoutError,
)
from fastcomm.nccl import link as nccl_link
from tests.support.models import Fail, assert_gradients, backward, batch, mean_gradients, mlp
from tests.support.ranks import fresh_ranks, note, noted, torchrun_env, values_of
from tests.support.stand_ins import environment, failing, loaded, log_of, stand_ins

# What NCCL's functions return: from ncclUnhandledCudaError to ncclRemoteError.
CODES = {
    1: "unhandled cuda error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process exited or there was a network error",
}
LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005, "first_bucket_cap_mb": 0.0001}
# A rank that is not waiting itself looks for its peers' notes every second; one that waits, at
# once.
SOON = 2.5


def outcomes_of(world_size, body, *args, env=None, timeout=15):
    """How the body ended on new ranks, which work with the stand-ins also where there is a GPU."""
    env = env or [{}] * world_size
    return fresh_ranks(
        world_size,
        body,
        *args,
        env=[{**environment(stand_ins()), **own} for own in env],
        timeout=timeout,
    )


def communicator(place, **options):
    options = {"init_method": place.init_method, "timeout": timedelta(seconds=10), **options}
    return fastcomm.init(
        "nccl", rank=place.rank, world_size=place.world_size, device="cpu", **options
    )


@contextlib.contextmanager
def hanging(function):
    assert loaded("nccl").stand_in_hang(function.encode()) == 0
    try:
        yield
    finally:
        loaded("nccl").stand_in_hang(None)


def raised(error, call):
    """What the call raised, as text, and after how many seconds."""
    before = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    return str(caught.value), time.monotonic() - before


def assert_all_ended():
    """NCCL's communicators are gone. The watchdog's thread may still be at it when the error is
    raised.
    """
    deadline = time.monotonic() + 5
    while loaded("nccl").stand_in_live_comms() > 0:
        assert time.monotonic() < deadline, (
            f"{loaded('nccl').stand_in_live_comms()} communicators of NCCL's are alive"
        )
        time.sleep(0.01)


# Calls into NCCL that fail. Rank 1's do.

COLLECTIVES = {
    "ncclAllReduce": lambda comm: comm.all_reduce(torch.ones(10)),
    "ncclBroadcast": lambda comm: comm.broadcast(torch.ones(10)),
    "ncclAllGather": lambda comm: comm.all_gather_single(
        torch.ones(10 * comm.world_size), torch.ones(10)
    ),
    "ncclReduceScatter": lambda comm: comm.reduce_scatter_single(
        torch.ones(10), torch.ones(10 * comm.world_size)
    ),
}


def _fail_in(place, function, call, *, code):
    """What every rank hears of it."""
    comm = communicator(place)
    comm.barrier()
    with failing(function, code) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(NcclError, lambda: call(comm))
    assert seconds < SOON
    with pytest.raises(NcclError, match=re.escape(message)):
        comm.barrier()
    comm.close()
    assert_all_ended()
    assert any("ncclCommAbort" in line for line in log_of(loaded("nccl")))
    return message


def _fail_with_every_code(place, function):
    return [_fail_in(place, function, COLLECTIVES[function], code=code) for code in CODES]


@pytest.mark.parametrize("function", COLLECTIVES)
def test_a_collective_that_fails_on_one_rank_is_the_same_nccl_error_on_all(function):
    for messages in values_of(outcomes_of(3, _fail_with_every_code, function)):
        for message, (code, text) in zip(messages, CODES.items(), strict=True):
            assert (
                f"{function} failed with code {code}, {text}: {function} : told to fail (NCCL "
                f"2.29.7)" in message
            )
            assert "rank 1" in message


def _fail_in_a_bucket(place):
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    with failing("ncclAllReduce", 2, after=1) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(NcclError, lambda: backward(model, place.rank))
    assert seconds < SOON
    assert_all_ended()
    return message


def test_a_bucket_that_fails_on_one_rank_is_the_same_nccl_error_on_all():
    first, second = values_of(outcomes_of(2, _fail_in_a_bucket))
    assert first == second
    assert "ncclAllReduce failed with code 2" in first


def _attach(comm):
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(mlp())


def _fail_to_attach_with_every_code(place, function):
    return [_fail_in(place, function, _attach, code=code) for code in CODES]


@pytest.mark.parametrize("function", ["ncclCommWindowRegister", "ncclCommSplit"])
def test_a_window_or_a_lane_that_fails_on_one_rank_ends_attach_on_all(function):
    for messages in values_of(outcomes_of(2, _fail_to_attach_with_every_code, function)):
        for message, (code, text) in zip(messages, CODES.items(), strict=True):
            assert f"{function} failed with code {code}, {text}" in message


def _lack_memory(place, function):
    comm = communicator(place)
    messages = []
    for code in CODES:
        with failing(function, code) if place.rank == 1 else contextlib.nullcontext():
            message, seconds = raised(
                NcclError if place.rank == 1 else FastcommError, lambda: _attach(comm)
            )
        assert seconds < SOON
        messages.append(message)
    _attach(comm)
    return messages


@pytest.mark.parametrize("function", ["ncclMemAlloc", "ncclCommRegister"])
def test_memory_that_one_rank_does_not_get_costs_no_more_than_that_attach(function):
    first, second = values_of(outcomes_of(2, _lack_memory, function))
    assert all("rank 1" in message for message in first)
    for message, (code, text) in zip(second, CODES.items(), strict=True):
        assert (
            f"{function} failed with code {code}, {text}: {function} : told to fail (NCCL 2.29.7)"
            in message
        )


# Beginning


def _fail_to_begin(place, function):
    failing_rank = 0 if function == "ncclGetUniqueId" else 1
    messages = []
    for code in CODES:
        with failing(function, code) if place.rank == failing_rank else contextlib.nullcontext():
            messages.append(
                raised(
                    NcclError if place.rank == failing_rank else InitError,
                    lambda: communicator(place),
                )[0]
            )
    communicator(place).close()
    return messages


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclCommInitRankConfig"])
def test_a_rank_that_cannot_begin_says_why_and_the_others_are_told(function):
    for messages in values_of(outcomes_of(2, _fail_to_begin, function)):
        for message, (code, text) in zip(messages, CODES.items(), strict=True):
            assert (
                f"{function} failed with code {code}, {text}: {function} : told to fail (NCCL "
                f"2.29.7)" in message
            )


def _begin_for_ever(place):
    with hanging("ncclCommInitRankConfig"):
        return raised(InitError, lambda: communicator(place, timeout=timedelta(seconds=2)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_beginning_that_never_ends_is_given_up_at_the_deadline(world_size):
    for message, seconds in values_of(outcomes_of(world_size, _begin_for_ever)):
        assert 1.9 < seconds < 5
        assert "ncclCommInitRankConfig" in message and "2 s" in message


def _die_or_stay_away(place, how):
    if place.rank == 1 and how == "stays away":
        return None
    if place.rank == 1:
        with hanging("ncclCommInitRankConfig"):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            communicator(place)
    return raised(FastcommError, lambda: communicator(place, timeout=timedelta(seconds=3)))


@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_a_rank_that_is_not_there_at_the_beginning_is_missed_at_the_deadline(how):
    outcomes = outcomes_of(3, _die_or_stay_away, how)
    for message, seconds in values_of([outcomes[0], outcomes[2]]):
        assert seconds < 6
        assert how == "dies" or re.search("missing: rank 1", message), message


def _die_while_nccl_connects():
    while not any("ncclCommInitRankConfig" in line for line in log_of(loaded("nccl"))):
        time.sleep(0.01)
    time.sleep(0.2)  # the other rank comes as far, too
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_the_store(place):
    with hanging("ncclCommInitRankConfig"):
        if place.rank == 0:
            threading.Thread(target=_die_while_nccl_connects).start()
        return raised(
            FastcommError, lambda: communicator(place, init_method=os.environ["MEETING_POINT"])
        )


def test_a_store_that_goes_while_nccl_connects_is_fastcomms_error():
    meeting_point = {"MEETING_POINT": f"tcp://127.0.0.1:{torchrun_env(2)[0]['MASTER_PORT']}"}
    ((_, seconds),) = values_of(outcomes_of(2, _lose_the_store, env=[meeting_point] * 2)[1:])
    assert seconds < 3


def _die_before_anybody_watches(place):
    make_watchdog = nccl_link.Watchdog

    def make_watchdog_late(*arguments):
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        return make_watchdog(*arguments)

    nccl_link.Watchdog = make_watchdog_late
    message, _ = raised(FastcommError, lambda: communicator(place))
    assert_all_ended()
    return message


def test_a_rank_that_dies_before_it_is_watched_is_named():
    (message,) = values_of(outcomes_of(2, _die_before_anybody_watches)[:1])
    assert "rank 1" in message and "died" in message


# The driver


def _fail_in_the_driver(place, function):
    comm = communicator(place)
    comm.barrier()
    with failing(function, LAUNCH_FAILED) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(FastcommError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < SOON
    assert_all_ended()
    return message


@pytest.mark.parametrize("function", ["cuEventRecord", "cuStreamWaitEvent"])
def test_a_driver_that_fails_on_one_rank_ends_the_collective_on_all(function):
    for message in values_of(outcomes_of(2, _fail_in_the_driver, function)):
        assert (
            f"{function} failed: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)" in message
        )


def _fail_once_in_a_bucket(place, function):
    comm = communicator(place)
    model = mlp()
    expected = mean_gradients(model, place.world_size, backward)
    fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    with failing(function, LAUNCH_FAILED) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(FastcommError, lambda: backward(model, place.rank))
    assert seconds < SOON
    backward(model, place.rank)
    assert_gradients(model, expected)
    assert comm.n_abandoned == 1
    return message


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_driver_that_fails_in_a_bucket_costs_the_step_on_all(function):
    first, second = values_of(outcomes_of(2, _fail_once_in_a_bucket, function))
    assert "rank 1 abandoned" in first
    assert f"{function} failed: CUDA_ERROR_LAUNCH_FAILED" in second


def _fail_while_nobody_looks(place):
    comm = communicator(place)
    loaded("cuda").stand_in_hold_events(1)
    work = comm.all_reduce(torch.ones(10), async_op=True)
    with failing("cuEventQuery", LAUNCH_FAILED):
        deadline = time.monotonic() + SOON
        with pytest.raises(FastcommError, match="cuEventQuery failed: CUDA_ERROR_LAUNCH_FAILED"):
            while time.monotonic() < deadline:
                comm.check()
                time.sleep(0.02)
    with pytest.raises(FastcommError, match="cuEventQuery"):
        work.wait()
    assert_all_ended()


def test_a_kernel_that_has_crashed_is_noticed_without_a_call():
    values_of(outcomes_of(2, _fail_while_nobody_looks))


# Asynchronous errors


def _report_an_asynchronous_error(place, code):
    comm = communicator(place)
    if place.rank == 1:
        time.sleep(0.3)
        loaded("nccl").stand_in_async_error(code)
    message, seconds = raised(
        FastcommError, comm.barrier if place.rank == 0 else lambda: _wait_for_error(comm)
    )
    assert seconds < SOON
    assert_all_ended()
    with pytest.raises(FastcommError) as again:
        comm.check()
    return message, type(again.value).__name__


def _wait_for_error(comm):
    while True:
        comm.check()
        time.sleep(0.01)


@pytest.mark.parametrize("code", [*CODES])
def test_an_asynchronous_error_is_raised_on_all(code):
    for message, kind in values_of(outcomes_of(2, _report_an_asynchronous_error, code)):
        assert kind == ("PeerLostError" if code == 6 else "NcclError")
        assert f"code {code}, {CODES[code]}" in message


# Peers that go away. The last rank does, and leaves the time for the others to find.


def _leave(place, comm, how):
    note(place, pid=os.getpid(), left_at=time.monotonic())
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exits":
        os._exit(0)
    getattr(comm, how)()
    time.sleep(2)


WAITS = {
    "barrier": lambda comm: comm.barrier(),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(10)),
    "broadcast": lambda comm: comm.broadcast(torch.ones(10), comm.world_size - 1),
    "attach": lambda comm: fastcomm.Reducer(comm).attach(mlp()),
    "a bucket": lambda comm: _bind(comm, lane=0),
    "a bucket of a second lane": lambda comm: _bind(comm, lane=1),
}


def _bind(comm, lane):
    flat = comm.empty(101, dtype=torch.float32).zero_()
    comm.bind_bucket(flat, [flat[:100]], [0], wire_dtype=None, label=1, lane=lane)


def _lose_a_peer(place, wait, how):
    comm = communicator(place)
    comm.barrier()
    if place.rank == place.world_size - 1:
        time.sleep(0.3)
        _leave(place, comm, how)
        return None
    message, _ = raised(PeerLostError, lambda: WAITS[wait](comm))
    seconds = time.monotonic() - float(noted(place, "left_at"))
    with pytest.raises(PeerLostError):
        comm.barrier()
    dead = (place.world_size - 1,) if how in ("killed", "exits") else ()
    assert comm.failure.ranks == dead
    assert_all_ended()
    return message, int(noted(place, "pid")), seconds


def assert_told_of_the_loss(outcomes, words):
    *others, last = outcomes
    for message, pid, seconds in values_of(others):
        assert f"rank {last.rank} (pid {pid})" in message
        assert words in message
        assert seconds < 2


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_peer_is_named_within_two_seconds(wait):
    assert_told_of_the_loss(outcomes_of(3, _lose_a_peer, wait, "killed"), "died")


@pytest.mark.parametrize(
    "how, words",
    [
        ("exits", "died"),
        ("close", "closed its communicator"),
        ("abort", "aborted its communicator"),
    ],
)
def test_a_peer_that_leaves_is_named_within_two_seconds(how, words):
    assert_told_of_the_loss(outcomes_of(2, _lose_a_peer, "all_reduce", how), words)


def _train_until_a_peer_dies(place, delay):
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, streams=2, **SMALL_BUCKETS).attach(model)
    comm.barrier()
    if place.rank == place.world_size - 1:
        threading.Timer(delay, _leave, (place, comm, "killed")).start()
    with pytest.raises(PeerLostError) as lost:
        while True:
            model.zero_grad()
            backward(model, place.rank)
    seconds = time.monotonic() - float(noted(place, "left_at"))
    assert_all_ended()
    return str(lost.value), int(noted(place, "pid")), seconds


@pytest.mark.parametrize("delay", [0.1, 0.1314, 0.1777])
def test_a_peer_may_be_killed_at_any_moment_of_training(delay):
    assert_told_of_the_loss(outcomes_of(3, _train_until_a_peer_dies, delay), "died")


def _lose_a_peer_with_the_store(place):
    comm = communicator(place, init_method=os.environ["MEETING_POINT"])
    comm.barrier()
    if place.rank == 0:
        _leave(place, comm, "killed")
    message, seconds = raised(PeerLostError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < 2
    assert_all_ended()
    return message, int(noted(place, "pid"))


def test_the_rank_that_keeps_the_store_may_be_the_one_that_dies():
    meeting_point = {"MEETING_POINT": f"tcp://127.0.0.1:{torchrun_env(3)[0]['MASTER_PORT']}"}
    outcomes = outcomes_of(3, _lose_a_peer_with_the_store, env=[meeting_point] * 3)
    for rank, (message, pid) in enumerate(values_of(outcomes[1:]), 1):
        assert (
            message == f"rank 0 (pid {pid}) died; rank {rank} waits for all_reduce of 10 float32 "
            "elements, op sum"
        )


# Ranks that come late or never


def _miss_the_deadline(place):
    comm = communicator(place, timeout=timedelta(seconds=2))
    if place.rank == 1:
        time.sleep(4.5)
        with pytest.raises(TimeoutError):
            comm.all_reduce(torch.ones(10))
        return os.getpid()
    message, seconds = raised(TimeoutError, lambda: comm.all_reduce(torch.ones(10)))
    assert 1.9 < seconds < 6
    assert_all_ended()
    return message


def test_a_rank_that_does_not_come_is_named_after_the_timeout():
    first, pid, third = values_of(outcomes_of(3, _miss_the_deadline))
    assert first == third
    before, _, missing = first.partition("missing: ")
    assert "waited 2 s" in before and "all_reduce of 10 float32 elements, op sum" in before
    assert (
        missing.startswith(f"rank 1 (pid {pid})")
        and "rank 0" not in missing
        and "rank 2" not in missing
    )


def _miss_a_bucket(place):
    comm = communicator(place, timeout=timedelta(seconds=2))
    model = mlp()
    fastcomm.Reducer(comm, **SMALL_BUCKETS).attach(model)
    if place.rank == 1:
        time.sleep(4.5)
        return None
    return raised(TimeoutError, lambda: backward(model, place.rank))[0]


def test_a_bucket_that_a_rank_does_not_launch_is_named():
    message, _ = values_of(outcomes_of(2, _miss_a_bucket))
    assert re.search(r"bucket 0 of reducer 0.*missing: rank 1", message), message


def _come_within_the_deadline(place):
    comm = communicator(place, timeout=timedelta(seconds=10))
    time.sleep(2.5 * place.rank)  # longer than it takes until the ranks compare notes
    tensor = torch.ones(10)
    comm.all_reduce(tensor)
    comm.barrier()
    assert tensor.tolist() == [2.0] * 10


def test_a_late_rank_within_the_timeout_is_waited_for():
    values_of(outcomes_of(2, _come_within_the_deadline))


# Ranks that disagree


MISMATCHES = {
    "op": (
        lambda comm: comm.all_reduce(torch.ones(10)),
        lambda comm: comm.all_reduce(torch.ones(10), "max"),
        "op sum",
        "op max",
    ),
    "size": (
        lambda comm: comm.all_reduce(torch.ones(10)),
        lambda comm: comm.all_reduce(torch.ones(11)),
        "10 float32",
        "11 float32",
    ),
    "kind": (
        lambda comm: comm.all_gather_single(torch.ones(10 * comm.world_size), torch.ones(10)),
        lambda comm: comm.broadcast(torch.ones(10)),
        "all_gather_single of 10",
        "broadcast of 10",
    ),
    "source": (
        lambda comm: comm.broadcast(torch.ones(10)),
        lambda comm: comm.broadcast(torch.ones(10), 1),
        "broadcast.*0",
        "broadcast.*1",
    ),
}


def _disagree(place, case):
    comm = communicator(place)
    usual, other, _, _ = MISMATCHES[case]
    message, seconds = raised(
        MismatchError, lambda: (other if place.rank == place.world_size - 1 else usual)(comm)
    )
    assert seconds < 6
    assert_all_ended()
    return message


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_call_different_collectives_all_hear_of_both(case):
    _, _, usual, other = MISMATCHES[case]
    for message in values_of(outcomes_of(3, _disagree, case)):
        assert re.search(f"rank 0: .*{usual}.*; rank 2: .*{other}", message), message


# abandon()


def _fragile_backward(model, rank, step, fails):
    """Raises, where it `fails`, when the gradients of the last layers are under way."""
    x, y = batch(rank, step)
    torch.nn.functional.mse_loss(model[2:](Fail.apply(model[:2](x), fails)), y).backward()


def _fail_in_backward(place, streams, *unlucky):
    """Backward fails in step i on the ranks of unlucky[i]. Returns what this rank heard of it, and
    how often.
    """
    comm = communicator(place)
    model = mlp()
    fastcomm.Reducer(comm, streams=streams, **SMALL_BUCKETS).attach(model)
    heard = []
    for step, who in enumerate(unlucky):
        model.zero_grad()
        expected = mean_gradients(
            model, place.world_size, lambda replica, rank, step=step: backward(replica, rank, step)
        )
        try:
            _fragile_backward(model, place.rank, step, place.rank in who)
        except RuntimeError as error:
            heard.append((step, str(error)))
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            assert_gradients(model, expected)
    assert loaded("nccl").stand_in_live_comms() == streams
    return heard, comm.n_abandoned


@pytest.mark.parametrize("streams", [1, 2])
def test_a_backward_that_raises_on_one_rank_costs_that_step_on_all(streams):
    first, second, third = values_of(outcomes_of(3, _fail_in_backward, streams, (), (1,), (1,), ()))
    assert second == ([(1, "out of luck"), (2, "out of luck")], 2)
    for heard, n_abandoned in (first, third):
        assert [step for step, _ in heard] == [1, 2] and n_abandoned == 2
        assert all("rank 1 abandoned" in message for _, message in heard)


@pytest.mark.parametrize("streams", [1, 2])
def test_backwards_that_raise_on_several_ranks_at_once_cost_one_step(streams):
    unlucky = (), (0, 2), (0, 1, 2), (0, 1), (), (2,), (1, 2), ()
    for heard, n_abandoned in values_of(outcomes_of(3, _fail_in_backward, streams, *unlucky)):
        assert [step for step, _ in heard] == [step for step, who in enumerate(unlucky) if who]
        assert n_abandoned == len(heard)


def _abandon_twice(place):
    comm = communicator(place)
    for _ in range(2):
        for _ in range(2):
            if place.rank == 1:
                comm.abandon()
            else:
                with pytest.raises(AbandonedError, match="rank 1 abandoned"):
                    comm.all_reduce(torch.ones(10))
        tensor = torch.ones(10)
        comm.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 10
    return comm.n_abandoned


def test_a_round_may_be_abandoned_before_the_ranks_have_met_for_it():
    assert values_of(outcomes_of(2, _abandon_twice)) == [4, 4]


def _abandon_while_a_peer_computes(place):
    comm = communicator(place)
    if place.rank == 1:
        comm.abandon()
    else:
        deadline = time.monotonic() + SOON
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            while time.monotonic() < deadline:
                comm.check()
                time.sleep(0.02)
    comm.barrier()
    return comm.n_abandoned


def test_a_rank_that_waits_for_nothing_hears_of_an_abandon_too():
    assert values_of(outcomes_of(2, _abandon_while_a_peer_computes)) == [1, 1]


def _abandon_works(place):
    comm = communicator(place)
    work = comm.all_reduce(torch.ones(10), async_op=True)
    if place.rank == 1:
        comm.abandon()
    else:
        time.sleep(SOON)
    with pytest.raises(FastcommError, match="abandoned"):
        work.wait()
    comm.barrier()


def test_a_work_that_was_abandoned_says_so():
    values_of(outcomes_of(2, _abandon_works))


def _leave_before_the_ranks_meet_anew(place, how):
    comm = communicator(place)
    if place.rank == 1:
        comm.abandon()
        time.sleep(1)
        _leave(place, comm, how)
        return None
    with pytest.raises(FastcommError, match="rank 1 abandoned"):
        comm.all_reduce(torch.ones(10))
    message, seconds = raised(PeerLostError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < 4
    assert_all_ended()
    return message


@pytest.mark.parametrize(
    "how, words", [("killed", "died"), ("close", "closed"), ("abort", "aborted")]
)
def test_a_peer_that_leaves_before_the_ranks_meet_anew_is_named(how, words):
    (message,) = values_of(outcomes_of(2, _leave_before_the_ranks_meet_anew, how)[:1])
    assert "rank 1" in message and words in message


def _fail_to_meet_anew(place):
    comm = communicator(place)
    if place.rank == 1:
        comm.abandon()
    else:
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            comm.all_reduce(torch.ones(10))
    with failing("ncclCommInitRankConfig", 2) if place.rank == 1 else contextlib.nullcontext():
        message, seconds = raised(NcclError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < 4
    with pytest.raises(NcclError):
        comm.barrier()
    return message


def test_ranks_that_cannot_meet_anew_all_hear_why():
    for message in values_of(outcomes_of(2, _fail_to_meet_anew)):
        assert "ncclCommInitRankConfig failed with code 2" in message


# Ending


def _fail_to_end(place, function):
    comm = communicator(place)
    kept = comm.empty(10, dtype=torch.float32)
    with failing(function, 3):
        message, seconds = raised(NcclError, comm.close)
    assert seconds < SOON
    assert_all_ended()
    comm.close()
    kept.zero_()
    return message


@pytest.mark.parametrize("function", ["ncclCommDeregister", "ncclCommFinalize", "ncclCommDestroy"])
def test_a_close_that_fails_says_so_and_ends_the_communicator_all_the_same(function):
    for message in values_of(outcomes_of(2, _fail_to_end, function)):
        assert f"{function} failed with code 3, internal error" in message


def _end_out_of_time(place):
    comm = communicator(place)
    with hanging("ncclCommFinalize"):
        before = time.monotonic()
        with contextlib.suppress(TimeoutError):
            comm.close(timeout=0.5)
        assert 0.4 < time.monotonic() - before < SOON
    assert_all_ended()
    with pytest.raises(FastcommError):
        comm.barrier()


def test_a_close_that_takes_too_long_becomes_an_abort():
    values_of(outcomes_of(2, _end_out_of_time))


def _abort_from_another_thread(place):
    comm = communicator(place)
    if place.rank == 1:
        time.sleep(2)
        return
    threading.Timer(0.3, comm.abort).start()
    message, seconds = raised(FastcommError, lambda: comm.all_reduce(torch.ones(10)))
    assert seconds < SOON and "aborted" in message
    assert_all_ended()


def test_another_thread_may_abort_a_collective_that_waits():
    values_of(outcomes_of(2, _abort_from_another_thread))


def _abort_for_ever(place):
    comm = communicator(place)
    with hanging("ncclCommAbort"):
        before = time.monotonic()
        comm.abort()
        assert time.monotonic() - before < 12
    with pytest.raises(FastcommError, match="aborted"):
        comm.barrier()


def test_an_abort_that_hangs_is_left_behind():
    values_of(outcomes_of(1, _abort_for_ever))


# Forks


def _fork(place):
    comm = communicator(place)
    tensor = comm.empty(100, dtype=torch.float32).fill_(1)
    work = comm.all_reduce(torch.ones(10), async_op=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, _of_what_use_is(comm, work).encode())
        del comm, work, tensor
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    time.sleep(1.2)  # until every rank has looked for notes that the child may have left
    work.wait()
    comm.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 100
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
        comm.abandon,
    ):
        try:
            attempt()
            answers.append("no error")
        except FastcommError as error:
            answers.append(str(error))
    comm.abort()
    comm.close()
    return "\n".join(answers)


def test_a_forked_child_is_told_and_its_parent_goes_on():
    for answer, pid in values_of(outcomes_of(2, _fork)):
        lines = answer.splitlines()
        assert len(lines) == 5
        assert all(
            "fork" in line and str(pid) in line and "fastcomm.init" in line for line in lines
        ), answer
