"""A signal handler raises (Ctrl-C, a time limit) while a rank waits: what is under way ends in
step, and then it is raised.

Over every transport, with a reducer; group/test_interrupts.py has the transports with a thread
of their own alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, PeerLostError
from fastcomm.reducer.bucket import Bucket
from tests.support.bodies import hear_of_it, my_place, note
from tests.support.models import (
    Fail,
    assert_gradients,
    attached,
    backward,
    batch,
    check_backward,
    mean_gradients,
    mlp,
)
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.transports import EVERY_TRANSPORT

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports(*EVERY_TRANSPORT)]


class Interrupted(Exception):
    """What the handlers raise. Not KeyboardInterrupt, as any exception will do."""


@contextlib.contextmanager
def interrupted(
    inside: str, times: int = 1, until_raised: bool = True, forget: bool = True
) -> Iterator[None]:
    """Signals the main thread as soon as it waits inside a function of that name, or in one that is
    called from there; `times` in all.

    until_raised: the others hear of it when the handler has raised; else as soon as the signal is
    sent, for waits that no handler ends.
    forget: the notes to the others go when the block ends; not where it ends without them, who have
    then not read the notes yet.
    """

    def handle(*_):
        is_raised.set()
        raise Interrupted

    def send():
        for i in range(times):
            _until_waiting(main, inside)
            is_raised.clear()
            os.kill(os.getpid(), signal.SIGUSR2)
            if until_raised:
                is_raised.wait()
            note(my_place(), **{f"interrupt-{i}": "sent"})

    main, is_raised = threading.main_thread().ident, threading.Event()
    before = signal.signal(signal.SIGUSR2, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
        if forget:
            _forget()


@contextlib.contextmanager
def interrupted_in_finish() -> Iterator[None]:
    """Where the host waits for nobody: as the reducer comes to wait for its first bucket."""
    finish = Bucket.finish

    def signal_first(bucket):
        Bucket.finish = finish
        raise Interrupted

    note(my_place(), **{"interrupt-0": "sent"})
    Bucket.finish = signal_first
    yield
    assert Bucket.finish is finish
    _forget()


def _until_waiting(thread: int, inside: str) -> None:
    """Seen there three times in a row: whoever does not wait is through sooner. One that the tests
    make late (delays.py) does not wait yet.
    """
    n_seen = 0
    while n_seen < 3:
        time.sleep(0.03)
        frame, names = sys._current_frames()[thread], set()
        is_late = frame.f_code.co_name == "late"
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        n_seen = n_seen + 1 if inside in names and not is_late else 0


def _forget() -> None:
    """The other rank has seen it: without it nothing would have ended."""
    for path in Path(my_place().directory).glob("interrupt-*"):
        path.unlink()


def _until_interrupted() -> None:
    path = Path(my_place().directory, "interrupt-0")
    while not path.exists():
        time.sleep(0.005)


def _is_nccl(comm):
    return comm.backend == "nccl"


@on_ranks(2, 3)
def test_an_interrupt_while_backward_waits_is_raised_when_the_round_is_over(comm, buckets):
    """The rank that is interrupted has the gradients of this step, as the others have, and all go
    on in step.
    """
    model = mlp()
    expected = [
        mean_gradients(model, comm.world_size, lambda model, rank, s=step: backward(model, rank, s))
        for step in range(4)
    ]
    fastcomm.Reducer(comm, **buckets).attach(model)
    for step in range(4):
        model.zero_grad()
        if step != 1:
            backward(model, comm.rank, step)
        elif comm.rank == 1:
            signalled = interrupted_in_finish() if _is_nccl(comm) else interrupted("finish")
            with signalled, pytest.raises(Interrupted) as caught:
                backward(model, comm.rank, step)
            if sys.version_info >= (3, 11):
                assert "all ranks have the reduced gradients" in caught.value.__notes__[0]
        else:
            if comm.rank == 0:
                _until_interrupted()
            backward(model, comm.rank, step)
        assert_gradients(model, expected[step])


def _interrupt():
    raise Interrupted


@on_ranks(2)
def test_an_interrupt_before_the_last_bucket_is_launched_costs_one_step(comm, buckets):
    """The signal comes as autograd calls the reducer back, before that has done anything."""
    model, _, _ = attached(comm, **buckets)
    if comm.rank == 1:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(fastcomm.reducer.core, "enclosing_backward", _interrupt)
            backward(model, comm.rank)
    else:
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            backward(model, comm.rank)
            hear_of_it(comm)
    check_backward(comm, model)


@on_ranks(2)
def test_an_interrupt_of_a_collective_is_raised_when_it_is_over(comm):
    comm.barrier()  # over NCCL ranks may have to meet again after the test before
    tensor = torch.full((5000,), comm.rank + 1.0)
    done = []
    if comm.rank == 1:
        with (
            interrupted("_reduce_all", until_raised=not _is_nccl(comm)),
            pytest.raises(Interrupted),
        ):
            _reduce_all(comm, tensor, done)
    else:
        _until_interrupted()
        comm.all_reduce(tensor)
    if not _is_nccl(comm):  # whose host waits for a barrier alone
        assert tensor.tolist() == [3.0] * 5000
    if "all_reduce" not in done:  # else the barrier was interrupted, and is over
        comm.barrier()
    assert tensor.tolist() == [3.0] * 5000


def _reduce_all(comm, tensor, done):
    """Over NCCL the host waits inside the launch, where ranks connect, or in the barrier."""
    comm.all_reduce(tensor)
    done.append("all_reduce")
    comm.barrier()


def _fails(model, rank):
    x, _ = batch(rank, 9)
    model[2:](Fail.apply(model[:2](x), True)).sum().backward()


@on_ranks(2)
def test_an_interrupt_while_the_ranks_meet_after_an_exception_does_not_part_them(comm, buckets):
    """On shared memory and over Gloo the ranks meet inside abandon(); over NCCL at their next
    collective.
    """
    model, _, _ = attached(comm, **buckets)
    if comm.rank == 1 and not _is_nccl(comm):
        with interrupted("_tell_ranks"), pytest.raises(RuntimeError, match="out of luck"):
            _fails(model, comm.rank)
        with pytest.raises(Interrupted):  # it could not be raised where it came
            backward(model, comm.rank)
    elif comm.rank == 1:
        with pytest.raises(RuntimeError, match="out of luck"):
            _fails(model, comm.rank)
    else:
        if not _is_nccl(comm):
            _until_interrupted()
        with pytest.raises(FastcommError, match="rank 1 abandoned"):
            backward(model, comm.rank)
    check_backward(comm, model)


@pytest.mark.transports("shm", "group", "hierarchical")  # where a backward waits
@on_ranks(2)
def test_an_interrupt_of_a_round_that_another_rank_abandons_costs_that_step(comm):
    """Both end the step; the communicator stays, and nobody abandons a second time."""
    model, _, _ = attached(comm)
    before = comm.n_abandoned
    try:
        if comm.rank == 1:
            with interrupted("finish"):
                backward(model, comm.rank, 1)
        else:
            _until_interrupted()
            raise ValueError("bad batch")
    except (Interrupted, ValueError) as error:
        assert isinstance(error, Interrupted if comm.rank == 1 else ValueError)
        comm.abandon()
    assert all(parameter.grad is None for parameter in model.parameters())
    check_backward(comm, model)
    assert comm.n_abandoned == before + 1


def _interrupt_twice(comm):
    model, _, _ = attached(comm)
    backward(model, comm.rank)
    if comm.rank == 1:
        with interrupted("finish", times=2, forget=False), pytest.raises(Interrupted):
            backward(model, comm.rank)
        note(my_place(), aborted=True)
        with pytest.raises(FastcommError, match="aborted"):
            backward(model, comm.rank)
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    # Not before: this rank would complete the round if it came between a signal and its handler.
    while not Path(my_place().directory, "aborted").exists():
        time.sleep(0.005)
    with pytest.raises(PeerLostError, match="rank 1"):
        backward(model, comm.rank)


def test_a_second_interrupt_aborts(transport):
    if transport == "nccl":
        pytest.skip("the host does not wait for a round over NCCL")
    values_of(fresh_ranks(2, _interrupt_twice, pass_comm=True, transport=transport))
