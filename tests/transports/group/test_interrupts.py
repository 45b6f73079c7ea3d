"""Signal handlers that raise, Ctrl-C for one, over the transports with a thread of their own: the
ranks stay in step, and nobody reads or writes memory that its owner believes to be free."""

from __future__ import annotations

import dis
import functools
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import fastcomm
from fastcomm import FastcommError, PeerLostError
from tests.support.bodies import my_place
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, on_ranks
from tests.support.reference import check_all_reduce
from tests.support.transports import TRANSPORTS_OVER_TORCH

pytestmark = [
    pytest.mark.usefixtures("transport"),
    pytest.mark.transports(*TRANSPORTS_OVER_TORCH),
]


class Interrupted(BaseException):
    """Out of a signal handler."""


def interrupt_inside(function, times=1):
    """Raises Interrupted by a signal, so often, while `function` is on the stack, and notes it."""
    raised = []

    def handle(_, frame):
        if not any(
            code.co_name == function and "fastcomm" in code.co_filename for code in _codes(frame)
        ):
            return
        raised.append(None)
        if len(raised) == times:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _note(f"interrupted {len(raised)}")
        raise Interrupted(len(raised))

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)


def _codes(frame):
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _note(name):
    Path(my_place().directory, name).touch()


def _await_note(name):
    path = Path(my_place().directory, name)
    while not path.exists():
        time.sleep(0.005)
    path.unlink()


# One exception: what the ranks have begun is finished first.

CALLS = {
    "wait": lambda comm, tensor: comm.all_reduce(tensor, async_op=True).wait(),
    "all_reduce": lambda comm, tensor: comm.all_reduce(tensor),
    "broadcast_all": lambda comm, tensor: comm.broadcast_all([tensor[:9], tensor[9:]], 1),
}


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_a_collective_is_finished_before_what_a_handler_raised_is(comm, call):
    tensor = torch.full((3000,), float(comm.rank))
    if comm.rank == 1:
        _await_note("interrupted 1")
        CALLS[call](comm, tensor)
    else:
        interrupt_inside("sleep")
        with pytest.raises(Interrupted):
            CALLS[call](comm, tensor)
    assert (tensor == 1).all()
    check_all_reduce(comm)


@on_ranks(2)
def test_what_a_handler_raised_comes_from_the_error_of_the_collective(comm):
    before = comm.n_abandoned
    if comm.rank == 1:
        _await_note("interrupted 1")
        comm.abandon()
    else:
        interrupt_inside("sleep")
        with pytest.raises(Interrupted) as interrupted:
            comm.all_reduce(torch.ones(3000))
        assert isinstance(interrupted.value.__cause__, FastcommError)
        assert "rank 1 abandoned" in str(interrupted.value.__cause__)
    assert comm.n_abandoned == before + 1
    check_all_reduce(comm)


# A second one

WAITS = {
    "wait": lambda comm: comm.all_reduce(torch.ones(3000)),
    "abandon": lambda comm: comm.abandon(),
}


def _interrupt_twice(place, transport, wait):
    options = {"rank": place.rank, "world_size": 2, "init_method": place.init_method}
    comm = fastcomm.init(transport, **options)
    comm.barrier()
    if place.rank == 1:
        _await_note("raised at once")
        with pytest.raises(PeerLostError, match="rank 0 .*aborted"):
            comm.barrier()
        return 0.0
    interrupt_inside("sleep", times=2)
    before = time.monotonic()
    with pytest.raises(Interrupted, match="2"):
        WAITS[wait](comm)
    seconds = time.monotonic() - before
    _note("raised at once")
    with pytest.raises(FastcommError, match="aborted"):
        comm.barrier()
    return seconds


@pytest.mark.parametrize("wait", WAITS)
def test_a_second_exception_aborts_and_is_raised_at_once(ranks, wait):
    outcomes = fresh_ranks(2, _interrupt_twice, ranks.transport, wait, transport=ranks.transport)
    assert max(values_of(outcomes)) < 3


# At every instruction after which Python looks for signals


class _Interrupter:
    """Raises Interrupted at the n-th place of this transport where a handler could."""

    def __init__(self, n):
        self._left, self._before, self.where = n, {}, None

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(None)
        return kind is Interrupted

    def _trace(self, frame, event, _):
        if "fastcomm/transports/group/" not in frame.f_code.co_filename:
            return None
        frame.f_trace = self._trace  # first: since Python 3.13 else no opcode is told
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        before = self._before.get(frame)
        self._before[frame] = frame.f_lasti
        if event == "call" or (event == "opcode" and before in _checks(frame.f_code)):
            self._left -= 1
            if self._left == -1:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise Interrupted(self.where)
        return self._trace


@functools.cache
def _checks(code):
    """Where the instructions lie at whose end the interpreter looks for signals."""
    kinds = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    return {one.offset for one in dis.get_instructions(code) if one.opname.startswith(kinds)}


def _sweep(comm, one_round):
    """Runs rounds, each interrupted a little later, until one comes through. All learn of that."""
    n_interrupted = 0
    while True:
        was_interrupted = one_round(comm, n_interrupted)
        check_all_reduce(comm, 10)
        goes_on = torch.tensor([int(was_interrupted)])
        comm.broadcast(goes_on, 0)
        if not goes_on.item():
            return n_interrupted
        n_interrupted += 1


def _abandon_once(comm, n):
    before = comm.n_abandoned
    if comm.rank == 1:
        with pytest.raises(FastcommError, match="rank 0 abandoned"):
            comm.all_reduce(torch.ones(10))
        was_interrupted = False
    else:
        with _Interrupter(n) as interrupter:
            comm.abandon()
        was_interrupted = interrupter.where is not None
        if comm.n_abandoned == before:  # at the doorstep
            assert was_interrupted and n < 4, interrupter.where
            comm.abandon()
    assert comm.n_abandoned == before + 1
    return was_interrupted


def test_abandon_may_be_interrupted_anywhere(ranks):
    assert ranks(2, _sweep, _abandon_once)[0] > 20


def _reduce_once(comm, n):
    tensor = torch.full((10,), float(comm.rank))
    if comm.rank == 1:
        comm.all_reduce(tensor)
        was_interrupted = False
    else:
        with _Interrupter(n) as interrupter:
            comm.all_reduce(tensor)
        was_interrupted = interrupter.where is not None
        if (tensor == 0).all():  # it has not begun
            assert was_interrupted
            comm.all_reduce(tensor)
    assert (tensor == 1).all()
    return was_interrupted


def test_a_collective_may_be_interrupted_anywhere(ranks):
    assert ranks(2, _sweep, _reduce_once)[0] > 20


_bound = {}


def _launch_once(comm, n):
    if comm not in _bound:
        flat = torch.zeros(11)
        _bound[comm] = flat, comm.bind_bucket(flat, [flat[:10]], [0], wire_dtype=None, label=3)
    flat, bucket = _bound[comm]
    flat.fill_(comm.rank)
    bucket.gather([None])
    assert bucket.posted is None
    with _Interrupter(n if comm.rank == 0 else sys.maxsize) as interrupter:
        bucket.launch("sum", []).wait()
    if bucket.posted is None:
        bucket.launch("sum", [])
    bucket.posted.wait()
    assert (flat[:10] == 1).all()
    return interrupter.where is not None


def test_a_bucket_says_whether_an_interrupted_launch_was_posted(ranks):
    assert ranks(2, _sweep, _launch_once)[0] > 20


@on_ranks(2)
def test_ranks_have_met_when_abandon_raises_what_a_handler_raised(comm):
    """This rank gives up when it has announced a bucket and the others have not."""
    flat = torch.full((5001,), float(2 + comm.rank))
    bucket = comm.bind_bucket(flat, [flat[:5000]], [0], wire_dtype=None, label=7)
    if comm.rank == 1:
        _await_note("interrupted 1")
        work = bucket.launch("mean", [])
        with pytest.raises(FastcommError, match="rank 0 abandoned"):
            comm.barrier()
        work.wait()
        assert (flat[:5000] == 2.5).all()
    else:
        before = comm.number
        bucket.launch("mean", [])
        while comm.number == before:  # its thread tells the others of it
            time.sleep(0.001)
        interrupt_inside("abandon")
        with pytest.raises(Interrupted):
            comm.abandon()
        flat.fill_(3)  # the next gradient
    check_all_reduce(comm)
    assert comm.rank == 1 or (flat == 3).all()
