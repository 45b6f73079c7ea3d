"""The communicators of a process group, which threads share, and the Works and Futures that torch
gets for their collectives.
"""

# mypy: disable-error-code="assignment, override, no-any-return"
# torch calls these methods with more than its stubs declare.

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from fastcomm.comm.autograd_stack import caller_is_called_by_autograd
from fastcomm.comm.communicator import Work
from fastcomm.comm.deadline import Deadline
from fastcomm.comm.transport import Transport
from fastcomm.comm.words import waited
from fastcomm.errors import FastcommError, TimeoutError
from fastcomm.postmortem.script_end import start_thread

_POLL_S = 50e-6
# After this time this rank's own thread moves a collective under way forward: long against a
# collective, short against a step.
_PROGRESS_S = 1e-3
# How long a poll waits for its turn: long against a turn of the thread that makes progress.
_TURN_S = 1e-3

Places = Sequence[tuple[Tensor, Tensor]]


def is_async(opts: Any) -> bool:
    """Whether the caller wants a Work. Older torch does not say, and waits for every Work."""
    return getattr(opts, "asyncOp", True)


class SharedCommunicator:
    """A communicator whose callers take turns."""

    def __init__(self, comm: Transport) -> None:
        self.comm = comm
        self.lock = threading.Lock()
        self.turn: AbstractContextManager[object] = (
            nullcontext() if comm.is_threadsafe else self.lock
        )
        self.side_stream = torch.cuda.Stream(comm.device) if comm.has_streams else None
        self._progress = _Progress(self.lock)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self.turn:
            return self.comm.empty(numel, dtype=dtype)

    def run(
        self, calls: Sequence[Callable[..., Any]], value: list[Any], places: Places, is_async: bool
    ) -> c10d.Work:
        """Calls a collective, or several coalesced ones. value: of Work.result(). places: pairs
        of the tensor where the caller wants a result, and the tensor where it is afterwards.
        """
        if not is_async:
            with self.turn:
                for call in calls:
                    call()
            put_all(places)
            return Finished(value)
        works: list[Work] = []
        with self.turn:
            try:
                for call in calls:
                    works.append(call(async_op=True))
            finally:
                if not self.comm.progresses_itself:
                    self._progress.watch([work for work in works if not work.is_completed()])
        return registered(UnderWay(self, works, value, places), value)

    def close(self) -> None:
        self._progress.stop()
        self.comm.close()

    def abort(self) -> None:
        self._progress.stop()
        self.comm.abort()


def put_all(places: Places) -> None:
    """Copies results to where the caller wants them, unless they are there already."""
    for target, source in places:
        if source is not target:
            target.detach().copy_(source)


class BackendWork(c10d.Work):
    """A Work of this backend.

    Its methods are in Python. When C++ holds such a Work and nobody in Python does, its Python half
    dies, and torch waits for ever for the other half. So C++ has to get `held(work)`.
    """

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def boxed(self) -> Any:
        return held(self).boxed()


class _Lender(dist.ProcessGroup):
    """Returns a Work as a Python group does: torch's C++ then wraps it, and so keeps it alive."""

    def __init__(self, work: BackendWork) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._work = work

    def barrier(self, opts: Any) -> c10d.Work:
        return self._work


def held(work: BackendWork) -> c10d.Work:
    """The same Work for C++ to keep. It can wait and has the future; do not poll it."""
    return dist.ProcessGroup.barrier(_Lender(work), c10d.BarrierOptions())


def registered(work: BackendWork, outputs: Sequence[Any]) -> BackendWork:
    """The Work, which torch's wait_tensor() finds by its outputs where it is to: see torch's
    allow_inflight_collective_as_graph_input_ctx().
    """
    if c10d._allow_inflight_collective_as_graph_input():
        lent = held(work)
        for output in outputs:
            for tensor in output if isinstance(output, list) else [output]:
                c10d._register_work(tensor, lent)
    return work


@functools.cache
def hold_works_of_join() -> None:
    """Makes DDP's reducer, in a join, hold our Works with their Python half.

    DDP reduces a flag, hands the Work to the C++ reducer, which waits for it in backward, and then
    drops the Work. This is the only place where torch's Python code gives a Work to C++.
    """
    reducer = c10d.Reducer
    set_handle = reducer._set_forward_pass_work_handle

    @functools.wraps(set_handle)
    def set_held_handle(reducer: c10d.Reducer, work: c10d.Work, *options: Any) -> None:
        set_handle(reducer, held(work) if isinstance(work, BackendWork) else work, *options)

    reducer._set_forward_pass_work_handle = set_held_handle


class Finished(BackendWork):
    """A collective that was over when its call returned."""

    def __init__(self, value: list[Any]) -> None:
        super().__init__()
        self._value = value

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._value

    def get_future(self) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        future.set_result(self._value)
        return future


class UnderWay(BackendWork):
    """Collectives under way."""

    def __init__(
        self, shared: SharedCommunicator, works: list[Work], value: list[Any], places: Places
    ) -> None:
        super().__init__()
        self._shared, self._works, self._value, self._places = shared, works, value, places
        self._is_over = False  # over, with the results in place
        self._in_place: torch.cuda.Event | None = None  # for other streams

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what ended the collectives, or TimeoutError after `timeout`."""
        if timeout is not None and timeout > timedelta(0):
            deadline = Deadline(timeout.total_seconds())
            while not self.is_completed():
                if deadline.is_over():
                    raise TimeoutError(
                        f"rank {self._shared.comm.rank} {waited(timeout.total_seconds())} for a "
                        "collective of the backend 'fastcomm', which goes on: wait again, or with "
                        "a longer timeout"
                    )
                time.sleep(_POLL_S)
            self._place()  # waits no more, neither for a rank nor for another thread
        elif not self._is_over:
            with self._shared.turn:
                self._place()
        elif self._in_place is not None:  # the current stream may be another one now
            torch.cuda.current_stream(self._shared.comm.device).wait_event(self._in_place)
        return True

    def _place(self) -> None:
        """Puts results in place when they have come. Raises what ended the collectives."""
        for work in self._works:
            work.wait()
        put_all(self._places)
        self._is_over, self._places = True, ()
        if self._shared.side_stream is not None:
            self._in_place = torch.cuda.current_stream(self._shared.comm.device).record_event()

    def is_completed(self) -> bool:
        """Whether all is over, with results in place. Errors are for those who wait."""
        if self._is_over:
            return True
        takes_turns = not self._shared.comm.is_threadsafe
        # The thread whose turn it is may be waiting for something else: the answer is no then.
        if takes_turns and not self._shared.lock.acquire(timeout=_TURN_S):
            return False
        try:
            if not all(work.is_completed() for work in self._works):
                return False
            with contextlib.suppress(FastcommError):
                self._place()
            return True
        finally:
            if takes_turns:
                self._shared.lock.release()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> FastcommError | None:
        """The error that ended the collectives, if one did."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except FastcommError as error:
            return error
        return None

    def result(self) -> list[Any]:
        self.wait()
        return self._value

    def get_future(self) -> Future[list[Any]]:
        """On the CPU the future is complete. So callbacks, which may call further collectives, run
        at once, in the caller's thread and in the same order on all ranks. DDP chains no callbacks:
        across hosts it gets a future that completes when the result has come. On CUDA the future is
        complete on a stream of its own, so that the caller's stream is not held up before the
        caller waits.
        """
        if self._shared.side_stream is not None:
            with torch.cuda.stream(self._shared.side_stream):  # the future records an event on it
                self.wait()
                future: Future[list[Any]] = Future(devices=[self._shared.comm.device])
                future.set_result(self._value)
            return future
        if self._shared.comm.is_threadsafe and caller_is_called_by_autograd():
            begun: Future[None] = Future()
            # Raises inside the callback, where torch's C++ notices.
            future = begun.then(lambda _: self.result())
            start_thread("fastcomm-future", begun.set_result, None)
            return future
        return Finished(self.result()).get_future()


class _Progress:
    """Moves collectives forward that nobody here waits for yet, on a thread of its own: peers that
    do wait for them must not depend on what this rank's caller does in between. Starts no thread
    before there is such a collective, and sleeps while there is none.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._works: list[Work] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_stopped = False

    def watch(self, works: list[Work]) -> None:
        """Called with the lock held."""
        if not works:
            return
        self._works += works
        if self._thread is None:
            # not by start_thread: it never waits in C++, and need not end before the interpreter
            self._thread = threading.Thread(target=self._run, name="fastcomm-progress", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_stopped:
            self._wake.wait()
            time.sleep(_PROGRESS_S)
            with self._lock:
                self._works = [work for work in self._works if not work.is_completed()]
                if not self._works:
                    self._wake.clear()
