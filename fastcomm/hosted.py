"""HostedCommunicator: a torch.distributed group (Gloo, MPI, ...) as a Communicator, for tensors on the CPU.

A thread of its own carries collectives out in the order of their calls, so that backward goes on while gradients travel. Before anything
moves, the ranks tell each other which collective they have come to: ranks that disagree all hear of it, and a rank that abandons a round
says so in place of a collective, so that no collective is ever left half done and the group stays in step. What can still go wrong, a
lost peer or a deadline, is found by watchdog.py, and breaking the group's connections ends the thread's wait.

How tensors move and are reduced is hosted_exchange.py's business.
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
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastcomm.communicator import Communicator, canonical_op
from fastcomm.errors import FastcommError, InitError, MismatchError, PeerLostError, TimeoutError
from fastcomm.hosted_call import ABANDON, DTYPES, Call, name_of
from fastcomm.hosted_exchange import Exchange
from fastcomm.hosted_work import HostedBucket, HostedWork, Move
from fastcomm.watchdog import Notes, Watchdog, failure_note

VERDICT_S = 4.0  # how long the watchdog has to name the missing once a deadline has passed: longer than it asks around
EXPLAIN_S = 3.0  # how long the watchdog has to find out why a connection broke: longer than idle ranks take to answer a question
TOLD_S = 0.3  # how long ranks that wait take to read a note
# The watchdog gives its verdict before Gloo, which knows no ranks, gives its own.
GRACE = timedelta(seconds=10)


class Bootstrap(Notes, Protocol):
    """How the ranks have met; see fastcomm.rendezvous."""

    def exchange(self, value: Any) -> list[Any]: ...
    def store(self, name: str) -> Store: ...


class HostedCommunicator(Communicator):
    """Collectives over a torch.distributed group. See fastcomm.communicator.Communicator for the contract. Made by fastcomm.init.

    group: None makes a Gloo group of its own over the store the ranks met at. With another group, nobody else may use that while
    collectives are under way here, and a thread that waits in it when a peer is lost stays there until the group's own time-out.

    More than the contract promises: any number of threads may call it and wait for their works at once, if only the ranks' calls come in
    the same order.
    """

    backend = "hosted"
    has_streams = False
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
        self.number = 0  # of the newest collective this rank has announced
        self.pids = tuple(bootstrap.exchange(os.getpid()))
        self._notes = bootstrap
        self._owns_group = group is None
        self._exchange = Exchange(self._connect(bootstrap) if group is None else group, rank, world_size)
        # Guards what follows. Whoever settles a work holds it, so that no work is started that has been settled.
        self._lock = threading.Lock()
        self._works: list[HostedWork] = []  # not settled yet, by age
        self._current: HostedWork | None = None
        self._since = 0.0  # when the current work was begun, or last moved on
        self._interruption: FastcommError | None = None  # another rank has abandoned, which the caller has not heard of yet
        self._meeting: HostedWork | None = None  # ends when all ranks stand at one place again
        self._trouble: tuple[float, Exception] | None = None  # what the thread fell over, and when
        self._failure: FastcommError | None = None
        self._queue: queue.SimpleQueue[HostedWork | None] = queue.SimpleQueue()
        threading.Thread(target=_carry_out_all, args=(self._queue, weakref.ref(self)), name="fastcomm hosted", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)
        self._watchdog = _Watchdog(self, bootstrap, timeout.total_seconds(), neighbours)

    def _connect(self, bootstrap: Bootstrap) -> dist.ProcessGroupGloo:
        """A Gloo group that nobody else knows. Its addresses are those of GLOO_SOCKET_IFNAME, else what the host's name stands for."""
        try:
            return dist.ProcessGroupGloo(PrefixStore("gloo", bootstrap.store("gloo")), self.rank, self.world_size, self.timeout + GRACE)
        except RuntimeError as error:
            raise InitError(
                f"rank {self.rank} cannot connect to its peers over Gloo: {error}. "
                "Can the hosts reach each other? GLOO_SOCKET_IFNAME names the network interface to use"
            ) from error

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.rank} of {self.world_size}{', ended' if self._failure is not None else ''}>"

    # -- collectives --------------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """See Communicator.empty. Ordinary memory: nothing is reached without a copy."""
        self._check_empty(numel, dtype)
        return torch.empty(numel, dtype=dtype)

    def _check_empty(self, numel: int, dtype: torch.dtype) -> None:
        self._check_usable()
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(name_of, DTYPES))}; got {dtype}")
        if numel < 0:
            raise ValueError(f"numel must not be negative; got {numel}")

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> HostedWork | None:
        """See Communicator.all_reduce. 16-bit floats are added in float32 and rounded once."""
        op = canonical_op(op)
        flat = self._check(tensor)
        call = Call("all_reduce", flat.numel(), flat.dtype, flat.dtype, op)
        return self._end_of(self._post(call, functools.partial(self._all_reduce, flat, op), flat), async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> HostedWork | None:
        """See Communicator.broadcast."""
        return self._end_of(self._post_broadcast(tensor, src), async_op)

    def broadcast_all(self, tensors: list[Tensor], src: int = 0) -> None:
        """See Communicator.broadcast_all. One after the other, without coming back in between."""
        for work in [self._post_broadcast(tensor, src) for tensor in tensors]:
            work.wait()

    def _post_broadcast(self, tensor: Tensor, src: int) -> HostedWork:
        flat = self._check(tensor)
        if not 0 <= src < self.world_size:
            raise ValueError(f"src must be a rank from 0 to {self.world_size - 1}; got {src}")
        call = Call("broadcast", flat.numel(), flat.dtype, flat.dtype, src=src)
        return self._post(call, functools.partial(self._exchange.broadcast, flat, src), flat)

    def all_gather_single(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> HostedWork | None:
        """See Communicator.all_gather_single."""
        flat = self._check(inp)
        whole = self._check_out("all_gather_single", out, inp, flat.numel() * self.world_size)
        call = Call("all_gather_single", flat.numel(), flat.dtype, flat.dtype)
        return self._end_of(self._post(call, functools.partial(self._exchange.all_gather, whole, flat), flat), async_op)

    def reduce_scatter_single(self, out: Tensor, inp: Tensor, op: str = "sum", *, async_op: bool = False) -> HostedWork | None:
        """See Communicator.reduce_scatter_single."""
        op = canonical_op(op)
        flat = self._check(inp)
        if flat.numel() % self.world_size:
            raise ValueError(f"reduce_scatter_single: inp has {flat.numel()} elements, not a multiple of {self.world_size} ranks")
        part = self._check_out("reduce_scatter_single", out, inp, flat.numel() // self.world_size)
        call = Call("reduce_scatter_single", flat.numel(), flat.dtype, flat.dtype, op)
        return self._end_of(self._post(call, functools.partial(self._exchange.reduce_scatter, part, flat, op), flat), async_op)

    def barrier(self, *, async_op: bool = False) -> HostedWork | None:
        """See Communicator.barrier. The announcement is all there is to it."""
        return self._end_of(self._post(Call("barrier"), _nothing), async_op)

    def bind_bucket(
        self, flat: Tensor, views: list[Tensor], offsets: list[int], *, wire: Tensor, label: int, lane: int = 0
    ) -> HostedBucket:
        """See Communicator.bind_bucket. There are no lanes: the ranks share one network."""
        return HostedBucket(flat, views, functools.partial(self._launch_bucket, flat, wire, label))

    def _launch_bucket(self, flat: Tensor, wire: Tensor, label: int, op: str, presence: Tensor) -> HostedWork:
        call = Call("all_reduce", flat.numel(), flat.dtype, wire.dtype, op, label=label)
        return self._post(call, functools.partial(self._reduce_bucket, flat, wire, op), presence=presence)

    def _end_of(self, work: HostedWork, async_op: bool) -> HostedWork | None:
        if async_op:
            return work
        work.wait()
        return None

    def _check(self, tensor: Tensor) -> Tensor:
        """Checks that the communicator can be used and can take the tensor. Returns it as a flat one."""
        self._check_usable()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a torch.Tensor; got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(name_of, DTYPES))}; got {tensor.dtype}")
        if not tensor.is_cpu or tensor.is_sparse:
            raise ValueError(f"the {self.backend} transport takes dense tensors on the CPU; got {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor must be contiguous; its shape is {tuple(tensor.shape)}, its strides are {tensor.stride()}")
        return tensor.detach().view(-1)

    def _check_out(self, name: str, out: Tensor, inp: Tensor, numel: int) -> Tensor:
        flat = self._check(out)
        if out.dtype != inp.dtype:
            raise TypeError(f"{name}: out is {out.dtype}, inp is {inp.dtype}")
        if out.numel() != numel:
            raise ValueError(f"{name}: out must have {numel} elements; it has {out.numel()}")
        return flat

    def _check_usable(self) -> None:
        if self._is_forked():
            raise FastcommError(
                f"this communicator belongs to process {self.pids[self.rank]}, and this process was forked from it: "
                "call fastcomm.init here, or start workers with the spawn method"
            )
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _is_forked(self) -> bool:
        return bool(os.getpid() != self.pids[self.rank])

    # -- ends and new beginnings ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See Communicator.check."""
        self._check_usable()
        with self._lock:
            interruption = self._take_interruption()
        if interruption is not None:
            raise interruption

    def abandon(self) -> None:
        """See Communicator.abandon. What has begun is ended properly, what waits in the queue is not begun."""
        self._check_usable()
        with self._lock:
            self.n_abandoned += 1
            meeting = self._meeting
            if self._interruption is None or meeting is None:
                self._settle(self._waiting(), FastcommError(f"rank {self.rank} abandoned the collectives under way"))
                meeting = self._append(HostedWork(self, ABANDON, _nothing))
            self._interruption = None
        meeting.wait()

    def abort(self) -> None:
        """See Communicator.abort."""
        if self._failure is None and not self._is_forked():
            message = f"rank {self.rank} (pid {os.getpid()}) aborted its communicator"
            with contextlib.suppress(RuntimeError):
                self._notes.write_once("failure", failure_note("PeerLostError", message))
            self._end(FastcommError(f"rank {self.rank} has aborted this communicator"))

    def close(self) -> None:
        """See Communicator.close. Peers that still wait for this rank get PeerLostError."""
        if self._is_forked():
            return
        if self._failure is None:
            with contextlib.suppress(RuntimeError):
                self._notes.write(f"closed/{self.rank}", json.dumps([self.epoch, self.number - bool(self._works)]))
        self._end(FastcommError(f"rank {self.rank} has closed this communicator"))

    def _end(self, failure: FastcommError) -> None:
        self._fail(failure)
        self._queue.put(None)
        self._watchdog.stop()
        self._exchange.group = None

    # -- the caller's side of the queue ---------------------------------------------------------------------------------------------

    def _post(self, call: Call, move: Move, payload: Tensor | None = None, presence: Tensor | None = None) -> HostedWork:
        self._check_usable()
        with self._lock:
            interruption = self._take_interruption()
            if interruption is None:
                return self._append(HostedWork(self, call, move, payload, presence))
        raise interruption  # what belongs to what was abandoned is not to be taken for a collective of the next round

    def _append(self, work: HostedWork) -> HostedWork:
        if self._failure is not None:
            work.settle(self._failure)
            return work
        self._works.append(work)
        self._queue.put(work)
        return work

    def hear(self, error: FastcommError) -> None:
        """The caller learns of `error`, which may be that another rank has abandoned the round."""
        with self._lock:
            if error is self._interruption:
                self._take_interruption()

    def _take_interruption(self) -> FastcommError | None:
        """Under the lock: what the caller is about to hear, if anything. What is called from here on belongs to the next round."""
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            self.n_abandoned += 1
        return interruption

    def look_at_clock(self) -> None:
        """The net under the watchdog, which may itself wait for a store that is out of reach."""
        oldest = self._oldest_unfinished()
        timeout_s = self.timeout.total_seconds()
        if oldest is not None and oldest[1] > timeout_s + VERDICT_S:
            number, _, what = oldest
            message = f"waited {timeout_s:g} s; rank {self.rank} waits for collective number {number}, {what}"
            self._fail(TimeoutError(f"{message}; the store the ranks met at does not answer either"))

    def _waiting(self) -> list[HostedWork]:
        return [work for work in self._works if work is not self._current]

    def _settle(self, works: list[HostedWork], error: FastcommError | None) -> None:
        """Under the lock."""
        for work in works:
            work.settle(error)
        self._works = [work for work in self._works if not work.is_completed()]

    # -- the thread's side ------------------------------------------------------------------------------------------------------------

    def _carry_out(self, work: HostedWork) -> None:
        with self._lock:
            if work.is_completed() or self._trouble is not None:
                return
            self._current, self._since = work, time.monotonic()
        error: FastcommError | None = None
        try:
            self._perform(work)
        except MismatchError as mismatch:
            error = mismatch
        except RuntimeError as trouble:  # torch has no better one; PeerLostError of a part of this transport is one, too
            self._trouble = time.monotonic(), trouble
            return  # the watchdog finds out why, and ends the communicator
        except Exception as defect:
            self._watchdog.give_up(self, FastcommError(f"rank {self.rank} failed in {work.call}: {defect!r}"))
            return
        with self._lock:
            self._current = None
            self._settle([work], error)

    def _perform(self, work: HostedWork) -> None:
        """Raises MismatchError when the ranks call different collectives."""
        calls, payloads = self._announce(work.call, work.payload)
        abandoning = [rank for rank, call in enumerate(calls) if call == ABANDON]
        if abandoning:
            self._meet_anew(work, calls, abandoning)
        elif any(call != calls[0] for call in calls):
            wanted = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise MismatchError(f"the ranks call different collectives (number {self.number} on this communicator): {wanted}")
        elif work.move is not None:
            work.move(payloads)

    def _announce(self, call: Call, payload: Tensor | None = None) -> tuple[list[Call], Tensor | None]:
        """See Exchange.announce."""
        self.number += 1
        return self._exchange.announce(call, payload)

    def _meet_anew(self, work: HostedWork, calls: list[Call], abandoning: list[int]) -> None:
        """Some ranks abandon the round. This one does so, too, until all ranks have come to that."""
        with self._lock:
            own = next((one for one in self._works if one.call == ABANDON), None)
            self._meeting = self._current = own or HostedWork(self, ABANDON, _nothing)
            if own is None:
                ranks = ", ".join(map(str, abandoning))
                self._interruption = FastcommError(
                    f"rank {ranks} abandoned what was under way (an exception ended its backward?): skip this step"
                )
                self._settle(list(self._works), self._interruption)
            elif own is not work:
                self._settle([work], FastcommError(f"rank {self.rank} abandoned the collectives under way"))
        while any(call != ABANDON for call in calls):
            calls, _ = self._announce(ABANDON)
        with self._lock:
            self._settle([self._meeting], None)

    def _all_reduce(self, flat: Tensor, op: str, rows: Tensor | None) -> None:
        self._exchange.all_reduce(flat, op, rows)

    def _reduce_bucket(self, flat: Tensor, wire: Tensor, op: str, rows: Tensor | None) -> None:
        if wire is flat:
            self._exchange.all_reduce(flat, op)
        else:
            wire.copy_(flat)
            self._exchange.all_reduce(wire, op)
            flat.copy_(wire)

    # -- what the watchdog sees; see fastcomm.watchdog.Watched ------------------------------------------------------------------------

    def _oldest_unfinished(self) -> tuple[int, float, str] | None:
        with self._lock:
            work = self._current
            return None if work is None else (self.number, time.monotonic() - self._since, str(work.call))

    def _asynchronous_error(self) -> FastcommError | None:
        """A broken connection says nothing of who broke it. Whoever has not answered in a while after it is missing."""
        if self._trouble is None:
            return None
        since, trouble = self._trouble
        with contextlib.suppress(RuntimeError):  # the store may be gone, too, which the watchdog will find
            self._notes.write_once("question", "where are you?")
        if time.monotonic() - since < EXPLAIN_S:
            return None
        if isinstance(trouble, FastcommError):
            return trouble
        silent = [f"rank {rank} (pid {self.pids[rank]})" for rank in range(self.world_size) if rank != self.rank and self._is_silent(rank)]
        what = f"{', '.join(silent)} died or cannot be reached" if silent else "a connection between the ranks broke"
        return PeerLostError(f"{what}; rank {self.rank} was at collective number {self.number}: {trouble}")

    def _is_silent(self, rank: int) -> bool:
        """Whether the rank has not said lately where it stands. Ranks are never more than one collective apart."""
        with contextlib.suppress(RuntimeError):
            position = self._notes.read(f"position/{self.epoch}/{rank}")
            return position is None or int(json.loads(position)[0]) < self.number - 1
        return False

    def _fail(self, error: FastcommError) -> None:
        """The communicator is of no more use: whoever waits hears of it."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            is_under_way = bool(self._works)
        if is_under_way:
            self._break_connections()
            if self.rank == 0:  # with its process the store may go, in which the others are about to read what has happened
                time.sleep(TOLD_S)
        with self._lock:
            self._settle(list(self._works), error)

    def _break_connections(self) -> None:
        """Ends the thread's wait. Gloo closes all connections of a group when one receive has waited too long for what nobody sends."""
        if not self._owns_group:
            return
        group, others = self._exchange.group, (rank for rank in range(self.world_size) if rank != self.rank)
        for rank in others:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _has_graphs(self) -> bool:
        return False

    def _interrupt(self, error: FastcommError, epoch: int) -> None:
        """Ranks abandon a round by announcing it."""

    def _enter_thread(self) -> None:
        """Nothing belongs to a thread here."""


_NEVER_SENT = 2**30  # a tag


class _Watchdog(Watchdog):
    """Leaves it to the announcements to find ranks that call different collectives, which does not end the communicator."""

    def _compare(self, comm: Any, number: int, what: str) -> None:
        pass


def _carry_out_all(works: queue.SimpleQueue[HostedWork | None], reference: weakref.ref[HostedCommunicator]) -> None:
    """The life of the thread. While it waits for work it does not keep the communicator alive."""
    while True:
        work = works.get()
        comm = reference()
        if work is None or comm is None:
            return
        comm._carry_out(work)
        del work, comm


def _nothing(payloads: Tensor | None) -> None:
    pass
