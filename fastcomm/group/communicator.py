"""GroupCommunicator: a torch.distributed group (Gloo, MPI, ...) as a Communicator, for tensors on
the CPU.

A thread of its own carries collectives out in the order of their calls, so that backward goes on
while gradients travel. Before anything moves, the ranks tell each other which collective they have
come to: ranks that disagree all hear of it, and a rank that abandons a round says so in place of a
collective, so that no collective is ever left half done and the group stays in step. What can still
go wrong, a lost peer or a deadline, is found by watchdog.py, and breaking the group's connections
ends the thread's wait.

How tensors move and are reduced is exchange.py's business.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastcomm.collective import (
    CPU_DTYPES,
    abandonment,
    canonical_op,
    check_numel,
    check_out,
    check_src,
    mismatch,
    own_abandonment,
    refuse_dtype,
    refuse_tensor,
    share_of,
)
from fastcomm.communicator import Communicator, is_abandoned_already
from fastcomm.errors import (
    AbandonedError,
    FastcommError,
    InitError,
    MismatchError,
    PeerLostError,
    TimeoutError,
)
from fastcomm.group.call import ABANDON, Call, as_bytes, cast
from fastcomm.group.exchange import Exchange
from fastcomm.group.work import GroupBucket, GroupWork, see_through
from fastcomm.lifetime import Lifetime
from fastcomm.watchdog import Notes, Watchdog, failure_note

# how long the watchdog has to name the missing once a deadline has passed: longer than it asks
# around
VERDICT_S = 4.0
# how long the watchdog has to find out why a connection broke: longer than idle ranks take to
# answer a question
EXPLAIN_S = 3.0
TOLD_S = 0.3  # how long ranks that wait take to read a note
# The watchdog gives its verdict before Gloo, which knows no ranks, gives its own.
GRACE = timedelta(seconds=10)
# From a failure on: by then whoever found it has told all who wait, unless an exception out of a
# signal handler was in its way.
INTERRUPTED_S = 3.0


class Bootstrap(Notes, Protocol):
    """How the ranks have met; see fastcomm.bootstrap."""

    def exchange(self, value: Any) -> list[Any]: ...
    def store(self, name: str) -> Store: ...


@dataclass(frozen=True)
class Interruption:
    """Other ranks have abandoned a round. The caller knows of it once n_abandoned is `number`."""

    number: int
    error: FastcommError
    meeting: GroupWork  # ends when all ranks stand at one place again


class GroupCommunicator(Communicator):
    """Collectives over a torch.distributed group. See fastcomm.communicator.Communicator for the
    contract. Made by fastcomm.init.

    group: None makes a Gloo group of its own over the store the ranks met at. With another group,
    nobody else may use that while collectives are under way here, and a thread that waits in it
    when a peer is lost stays there until the group's own time-out.

    More than the contract promises: any number of threads may call it and wait for their works at
    once, if only the ranks' calls come in the same order. What a signal handler raises while this
    rank waits, in a collective, a wait or abandon(), is raised once that is over; a second time it
    aborts the communicator and is raised at once.
    """

    backend = "group"
    has_streams = reduces_fp8 = counts_nonfinite = False
    progresses_itself = is_threadsafe = True
    epoch = 0  # for the watchdog: `number` goes on when the ranks meet anew

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        bootstrap: Bootstrap,
        timeout: timedelta,
        neighbours: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device = torch.device("cpu")
        self.timeout = timeout
        self.n_abandoned = 0
        self.left_in_backward = -1
        self.number = 0  # of the newest collective this rank has announced
        self.pids = tuple(bootstrap.exchange(os.getpid()))
        self._notes = bootstrap
        self._owns_group = group is None
        self._exchange = Exchange(
            self._connect(bootstrap) if group is None else group, rank, world_size
        )
        # Guards what follows. Hold it to settle a work, so that a settled one never starts.
        # Reentrant, as a signal handler may call abort(). A handler may also raise where a caller
        # holds it: what must change together is changed by the thread.
        self._lock = threading.RLock()
        self._works: list[GroupWork] = []  # by age; being put here is being posted
        self._current: GroupWork | None = None
        self._since = 0.0  # when the current work was begun
        self._interruption: Interruption | None = None  # the newest
        self._n_met = 0  # how often the ranks have begun to meet anew
        self._trouble: tuple[float, Exception] | None = (
            None  # the error that stopped the thread, and when
        )
        self.life = Lifetime()
        self._failed_at = 0.0
        # Wakes the thread, which then carries out the oldest of _works. Of works, as these keep the
        # communicator alive.
        self._queue: queue.SimpleQueue[GroupWork | None] = queue.SimpleQueue()
        threading.Thread(
            target=_carry_out_all,
            args=(self._queue, weakref.ref(self)),
            name="fastcomm group",
            daemon=True,
        ).start()
        weakref.finalize(self, self._queue.put, None)
        self._watchdog = _Watchdog(self, bootstrap, timeout.total_seconds(), neighbours)

    def _connect(self, bootstrap: Bootstrap) -> dist.ProcessGroupGloo:
        """A Gloo group that nobody else knows. Its addresses are those of GLOO_SOCKET_IFNAME, else
        what the host's name stands for.
        """
        try:
            return dist.ProcessGroupGloo(
                PrefixStore("gloo", bootstrap.store("gloo")),
                self.rank,
                self.world_size,
                self.timeout + GRACE,
            )
        except RuntimeError as error:
            raise InitError(
                f"rank {self.rank} cannot connect to its peers over Gloo: {error}. "
                "Can the hosts reach each other? GLOO_SOCKET_IFNAME names the network interface "
                "to use"
            ) from error

    @property
    def failure(self) -> FastcommError | None:
        """See Communicator.failure."""
        return self.life.failure

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: rank {self.rank} of "
            f"{self.world_size}{', ended' if self.life.failure is not None else ''}>"
        )

    # -- collectives -------------------------------------------------------------------------------

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """See Communicator.empty. Ordinary memory: nothing is reached without a copy."""
        self._check_empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _check_empty(self, numel: int, dtype: torch.dtype) -> None:
        self._check_usable()
        if dtype not in CPU_DTYPES:
            refuse_dtype(dtype, CPU_DTYPES)
        check_numel(numel)

    def all_reduce(
        self, tensor: Tensor, op: str = "sum", *, async_op: bool = False
    ) -> GroupWork | None:
        """See Communicator.all_reduce. 16-bit floats are added in float32 and rounded once."""
        op = canonical_op(op)
        flat = self._check(tensor)
        call = Call("all_reduce", flat.numel(), flat.dtype, flat.dtype, op)
        return self._begin(
            GroupWork(self, call, functools.partial(self._all_reduce, flat, op), flat), async_op
        )

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, async_op: bool = False
    ) -> GroupWork | None:
        """See Communicator.broadcast."""
        flat = self._check(tensor)
        check_src(src, self.world_size)
        call = Call("broadcast", flat.numel(), flat.dtype, flat.dtype, src=src)
        return self._begin(
            GroupWork(self, call, functools.partial(self._exchange.broadcast, flat, src), flat),
            async_op,
        )

    def broadcast_all(self, tensors: list[Tensor], src: int = 0) -> None:
        """See Communicator.broadcast_all. One collective, which no exception cuts into two."""
        flats = [as_bytes(self._check(tensor)) for tensor in tensors]
        check_src(src, self.world_size)

        def move(rows: Tensor | None) -> None:
            for flat in flats:
                self._exchange.broadcast(flat, src)

        self._begin(GroupWork(self, Call("broadcast", sum(map(len, flats)), src=src), move), False)

    def all_gather_single(
        self, out: Tensor, inp: Tensor, *, async_op: bool = False
    ) -> GroupWork | None:
        """See Communicator.all_gather_single."""
        flat = self._check(inp)
        whole = self._check_out("all_gather_single", out, inp, flat.numel() * self.world_size)
        call = Call("all_gather_single", flat.numel(), flat.dtype, flat.dtype)
        return self._begin(
            GroupWork(self, call, functools.partial(self._exchange.all_gather, whole, flat), flat),
            async_op,
        )

    def reduce_scatter_single(
        self, out: Tensor, inp: Tensor, op: str = "sum", *, async_op: bool = False
    ) -> GroupWork | None:
        """See Communicator.reduce_scatter_single."""
        op = canonical_op(op)
        flat = self._check(inp)
        numel = share_of("reduce_scatter_single", flat, self.world_size)
        part = self._check_out("reduce_scatter_single", out, inp, numel)
        call = Call("reduce_scatter_single", flat.numel(), flat.dtype, flat.dtype, op)
        return self._begin(
            GroupWork(
                self, call, functools.partial(self._exchange.reduce_scatter, part, flat, op), flat
            ),
            async_op,
        )

    def barrier(self, *, async_op: bool = False) -> GroupWork | None:
        """See Communicator.barrier. The announcement is all there is to it."""
        self._check_usable()
        return self._begin(GroupWork(self, Call("barrier"), _nothing), async_op)

    def bind_bucket(
        self,
        flat: Tensor,
        views: list[Tensor],
        offsets: list[int],
        *,
        wire_dtype: torch.dtype | None,
        label: int,
        lane: int = 0,
    ) -> GroupBucket:
        """See Communicator.bind_bucket. There are no lanes: the ranks share one network."""
        if wire_dtype is not None and wire_dtype not in CPU_DTYPES:
            refuse_dtype(wire_dtype, CPU_DTYPES, "wire_dtype")
        reduce = self._bucket_reduction(flat, wire_dtype)
        wire = self._travels_as(flat.dtype, wire_dtype)

        def work_of(op: str, presence: Tensor) -> GroupWork:
            self._check_usable()
            call = Call("all_reduce", flat.numel(), flat.dtype, wire, op, label=label)
            return GroupWork(self, call, functools.partial(reduce, op), presence=presence)

        return GroupBucket(flat, views, work_of)

    def _travels_as(self, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
        """What a bucket is sent in. wire_dtype: None if none was chosen."""
        return wire_dtype or dtype

    def _bucket_reduction(
        self, flat: Tensor, wire_dtype: torch.dtype | None
    ) -> Callable[[str, Tensor | None], None]:
        """What reduces the bucket, given the op, on the thread."""
        if wire_dtype is None or wire_dtype == flat.dtype:
            return functools.partial(self._all_reduce, flat)
        with torch.inference_mode(False):  # buckets may be made under it
            wire = torch.zeros(flat.numel(), dtype=wire_dtype, device=self.device)

        def reduce(op: str, rows: Tensor | None) -> None:
            wire.copy_(flat)
            self._exchange.all_reduce(wire, op)
            cast(wire, flat)

        return reduce

    def _begin(self, work: GroupWork, async_op: bool) -> GroupWork | None:
        if async_op:
            work.post()
            return work
        work.run()
        return None

    def _check(self, tensor: Tensor) -> Tensor:
        """Checks that the communicator can be used and can take the tensor. Returns it as a flat
        one.
        """
        self._check_usable()
        if not isinstance(tensor, Tensor) or not _is_dense_here(tensor):
            refuse_tensor(tensor, self.backend, self.device)
        if tensor.dtype not in CPU_DTYPES:
            refuse_dtype(tensor.dtype, CPU_DTYPES)
        return tensor.detach().view(-1)

    def _check_out(self, name: str, out: Tensor, inp: Tensor, numel: int) -> Tensor:
        flat = self._check(out)
        check_out(name, out, inp, numel)
        return flat

    def _check_usable(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> FastcommError | None:
        """Why the communicator cannot be used any more."""
        return self.life.refusal()

    # -- ends and new beginnings -------------------------------------------------------------------

    def check(self) -> None:
        """See Communicator.check."""
        self._check_usable()
        interruption = self._unheard()
        if interruption is not None:
            self.n_abandoned = interruption.number
            raise interruption.error

    def abandon(self, *, in_any_case: bool = False) -> None:
        """See Communicator.abandon. What has begun is ended properly, what waits is not begun.

        What a signal handler raises is raised once the ranks have met; see GroupWork.wait.
        """
        if not in_any_case and is_abandoned_already(self):
            return
        own: GroupWork | None = None
        theirs: Interruption | None = None

        def meet(_: BaseException | None) -> None:
            nonlocal own, theirs
            if own is None:
                own = GroupWork(self, ABANDON, _nothing)
            if not own.is_posted and theirs is None:
                theirs = self._post_abandonment(own)
            if theirs is None:
                own.sleep()
            else:  # they have announced it: this rank joins them
                self.n_abandoned = theirs.number
                theirs.meeting.sleep()

        raised = see_through(meet, self.abort)
        met = own if theirs is None else theirs.meeting
        error = None if met is None else met.error
        if raised is not None:
            raise raised from error
        if error is not None:
            raise error

    def _post_abandonment(self, own: GroupWork) -> Interruption | None:
        """Returns that of others, if this rank has not heard of it yet: then own is not posted."""
        refusal = self._refusal()
        if refusal is not None:  # without the lock, which a forked process may have got locked
            own.refuse(refusal)
            return None
        with self._lock:
            theirs = self._unheard()
            if theirs is None:
                self._append(own)
        return theirs

    def abort(self) -> None:
        """See Communicator.abort."""
        if self.life.is_forked():
            return
        if self.life.failure is None:
            message = f"rank {self.rank} (pid {os.getpid()}) aborted its communicator"
            with contextlib.suppress(RuntimeError):
                self._notes.write_once("failure", failure_note(PeerLostError(message)))
        self._end(FastcommError(f"rank {self.rank} has aborted this communicator"))

    def close(self) -> None:
        """See Communicator.close. Peers that still wait for this rank get PeerLostError."""
        if self.life.is_forked():
            return
        if self.life.failure is None:
            with contextlib.suppress(RuntimeError):
                self._notes.write(
                    f"closed/{self.rank}", json.dumps([self.epoch, self.number - bool(self._works)])
                )
        self._end(FastcommError(f"rank {self.rank} has closed this communicator"))

    def _end(self, failure: FastcommError) -> None:
        self._fail(failure)
        self._queue.put(None)
        self._watchdog.stop()
        self._exchange.group = None

    # -- the caller's side of the queue ------------------------------------------------------------

    def post(self, work: GroupWork) -> None:
        """Hands the work to the thread, or refuses it."""
        with self._lock:
            interruption = self._unheard()
            if interruption is None:
                self._append(work)
            else:  # it belongs to what was abandoned, not to the next round
                work.refuse(interruption.error)

    def _append(self, work: GroupWork) -> None:
        """Under the lock."""
        if self.life.failure is not None:
            work.refuse(self.life.failure)
            return
        try:
            self._works.append(work)  # this call is what posts it
        finally:
            self._queue.put(work)

    def holds(self, work: GroupWork) -> bool:
        """Whether the work is posted and not settled."""
        return work in self._works

    def hear(self, error: FastcommError) -> None:
        """The caller learns of `error`, which may be that another rank has abandoned the round."""
        interruption = self._unheard()
        if interruption is not None and error is interruption.error:
            self.n_abandoned = interruption.number

    def _unheard(self) -> Interruption | None:
        """Of which the caller does not know yet. What it calls after that is of the next round."""
        interruption = self._interruption
        return (
            None
            if interruption is None or interruption.number <= self.n_abandoned
            else interruption
        )

    def look_at_clock(self) -> None:
        """This rank's own clock, for a watchdog that waits for a store that is out of reach.

        Also makes up for what an exception out of a signal handler may have cut short.
        """
        failure, works = self.life.failure, self._works
        if failure is not None and time.monotonic() - self._failed_at > INTERRUPTED_S:
            self._fail(failure)
        if works and self._current is None:
            self._queue.put(works[0])
        oldest = self._oldest_unfinished()
        timeout_s = self.timeout.total_seconds()
        if oldest is not None and oldest[1] > timeout_s + VERDICT_S:
            number, _, what = oldest
            message = (
                f"waited {timeout_s:g} s; rank {self.rank} waits for collective number {number}, "
                f"{what}"
            )
            self._fail(
                TimeoutError(f"{message}; the store the ranks met at does not answer either")
            )

    def _settle(self, works: list[GroupWork], error: FastcommError | None) -> None:
        """Under the lock."""
        for work in works:
            work.settle(error)
        self._works = [work for work in self._works if not work.is_completed()]

    # -- the thread's side -------------------------------------------------------------------------

    def _carry_out_oldest(self) -> None:
        """Carries out the oldest work there is."""
        with self._lock:
            if self._trouble is not None or not self._works:
                return
            work = self._own_abandonment() or self._works[0]
            self._settle_before(work)
            self._current, self._since = work, time.monotonic()
        error: FastcommError | None = None
        try:
            self._perform(work)
        except MismatchError as mismatch:
            error = mismatch
        # torch has no better one; PeerLostError of a part of this transport is one, too
        except RuntimeError as trouble:
            self._trouble = time.monotonic(), trouble
            return  # the watchdog finds out why, and ends the communicator
        except Exception as defect:
            self._watchdog.give_up(
                self, FastcommError(f"rank {self.rank} failed in {work.call}: {defect!r}")
            )
            return
        with self._lock:
            self._current = None
            self._settle([work], error)

    def _own_abandonment(self) -> GroupWork | None:
        """Under the lock: what was called before it is not begun any more."""
        return next((work for work in self._works if work.call is ABANDON), None)

    def _settle_before(self, work: GroupWork) -> None:
        """Under the lock."""
        older = self._works[: self._works.index(work)]
        if older:
            self._settle(older, FastcommError(own_abandonment(self.rank)))

    def _perform(self, work: GroupWork) -> None:
        """Raises MismatchError when the ranks call different collectives."""
        calls, payloads = self._announce(work.call, work.payload)
        abandoning = [rank for rank, call in enumerate(calls) if call == ABANDON]
        if abandoning:
            self._meet_anew(calls, abandoning)
        elif any(call != calls[0] for call in calls):
            raise MismatchError(mismatch(self.number, calls))
        elif work.move is not None:
            work.move(payloads)

    def _announce(
        self, call: Call, payload: Tensor | None = None
    ) -> tuple[list[Call], Tensor | None]:
        """See Exchange.announce."""
        self.number += 1
        return self._exchange.announce(call, payload)

    def _meet_anew(self, calls: list[Call], abandoning: list[int]) -> None:
        """Some ranks abandon the round. This one does so, too, until all ranks have come to
        that.
        """
        with self._lock:
            self._n_met += 1
            own = self._own_abandonment()
            meeting = self._current = own or GroupWork(self, ABANDON, _nothing)
            if own is None:
                error = AbandonedError(abandonment(abandoning))
                self._interruption = Interruption(self._n_met, error, meeting)
                self._settle(list(self._works), error)
            else:
                self._settle_before(own)
        while any(call != ABANDON for call in calls):
            calls, _ = self._announce(ABANDON)
        with self._lock:
            if own is not None:
                self.n_abandoned = self._n_met
            self._settle([meeting], None)

    def _all_reduce(self, flat: Tensor, op: str, rows: Tensor | None) -> None:
        self._exchange.all_reduce(flat, op, rows)

    # -- what the watchdog sees; see fastcomm.watchdog.Watched -------------------------------------

    def _oldest_unfinished(self) -> tuple[int, float, str] | None:
        with self._lock:
            work = self._current
            moved_at = max(self._since, self._exchange.moved_at)
            return (
                None if work is None else (self.number, time.monotonic() - moved_at, str(work.call))
            )

    def _asynchronous_error(self) -> FastcommError | None:
        """A broken connection says nothing of who broke it. Whoever has not answered in a while
        after it is missing.
        """
        if self._trouble is None:
            return None
        since, trouble = self._trouble
        with contextlib.suppress(
            RuntimeError
        ):  # the store may be gone, too, which the watchdog will find
            self._notes.write_once("question", "where are you?")
        if time.monotonic() - since < EXPLAIN_S:
            return None
        if isinstance(trouble, FastcommError):
            return trouble
        silent = [
            rank for rank in range(self.world_size) if rank != self.rank and self._is_silent(rank)
        ]
        names = ", ".join(f"rank {rank} (pid {self.pids[rank]})" for rank in silent)
        what = (
            f"{names} died or cannot be reached"
            if silent
            else "a connection between the ranks broke"
        )
        return PeerLostError(
            f"{what}; rank {self.rank} was at collective number {self.number}: {trouble}", silent
        )

    def _is_silent(self, rank: int) -> bool:
        """Whether the rank has not said lately where it stands. Ranks are never more than one
        collective apart.
        """
        with contextlib.suppress(RuntimeError):
            position = self._notes.read(f"position/{self.epoch}/{rank}")
            return position is None or int(json.loads(position)[0]) < self.number - 1
        return False

    def _fail(self, error: FastcommError) -> None:
        """The communicator is of no more use: whoever waits hears of it. May be called again."""
        with self._lock:
            if self.life.failure is None:
                self._failed_at = time.monotonic()
                self.life.end(error)
            error = self.life.failure or error
            is_under_way = bool(self._unfinished())
        if is_under_way:
            self._break_connections()
            if (
                self.rank == 0
                # with its process the store may go, in which the others are about to read what has
                # happened
            ):
                time.sleep(TOLD_S)
        with self._lock:
            self._settle(self._unfinished(), error)

    def _unfinished(self) -> list[GroupWork]:
        """Under the lock: all that somebody may be waiting for."""
        works = list(self._works)
        if self._interruption is not None and not self._interruption.meeting.is_completed():
            works.append(self._interruption.meeting)
        return works

    def _break_connections(self) -> None:
        """Ends the thread's wait. Gloo closes all connections of a group when one receive has
        waited too long for what nobody sends.
        """
        if not self._owns_group:
            return
        group, others = (
            self._exchange.group,
            (rank for rank in range(self.world_size) if rank != self.rank),
        )
        for rank in others if group is not None else ():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device=self.device)], rank, _NEVER_SENT).wait(
                    timedelta(milliseconds=1)
                )

    def _has_graphs(self) -> bool:
        return False

    def _interrupt(self, error: FastcommError, epoch: int) -> None:
        """Ranks abandon a round by announcing it."""

    def _enter_thread(self) -> None:
        """Nothing belongs to a thread here."""


_NEVER_SENT = 2**30  # a tag


def _is_dense_here(tensor: Tensor) -> bool:
    """Whether what lies in memory, one element after the other, is what the tensor says."""
    is_dense = tensor.is_cpu and tensor.layout is torch.strided
    return is_dense and tensor.is_contiguous() and not tensor.is_neg()


class _Watchdog(Watchdog):
    """Leaves it to the announcements to find ranks that call different collectives, which does not
    end the communicator.
    """

    def _compare(self, comm: Any, number: int, what: str) -> None:
        pass


def _carry_out_all(
    works: queue.SimpleQueue[GroupWork | None], reference: weakref.ref[GroupCommunicator]
) -> None:
    """The life of the thread. While it waits for work it does not keep the communicator alive.

    Under inference mode, which takes the tensors of callers that are under it, and all others.
    """
    with torch.inference_mode():
        while True:
            work = works.get()
            comm = reference()
            if work is None or comm is None:
                return
            comm._carry_out_oldest()
            del work, comm


def _nothing(payloads: Tensor | None) -> None:
    pass
