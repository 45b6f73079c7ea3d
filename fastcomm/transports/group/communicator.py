"""GroupCommunicator: Gloo as a Transport, for tensors on the CPU. The public calls and their
checks.

Another thread runs collectives in the order of their calls, so that backward goes on while
gradients travel. The ranks announce which collective they have come to, beside the data or before
it. If they disagree, all of them get the error, and what was sent is thrown away. A rank that
abandons a round announces that in place of a collective. So no collective is ever left half done,
and the group stays in step.
watchdog.py finds lost peers and missed deadlines; then breaking the group's connections ends the
thread's wait.

The thread is in work_queue.py; exchange.py moves and reduces tensors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import Store  # type: ignore[attr-defined]

from fastcomm.comm import messages
from fastcomm.comm.coalesced import checked_together, sizes
from fastcomm.comm.collective import (
    BLOCK_DTYPES,
    CPU_DTYPES,
    OPS,
    WIRE_DTYPES,
    Op,
    as_pairs,
    canonical_op,
    check_numel,
    check_out,
    check_root,
    lacks_memory,
    refuse_dtype,
    refuse_tensor,
    shard_of,
)
from fastcomm.comm.parts import Parts, exchanged, rooted
from fastcomm.comm.transport import Part, Transport
from fastcomm.comm.watchdog import Notes
from fastcomm.comm.who import processes_of
from fastcomm.control.announcement import Call
from fastcomm.transports.group.call import WITHOUT_DATA, as_bytes
from fastcomm.transports.group.exchange import Exchange
from fastcomm.transports.group.shards import CodedExchanges, Transfer
from fastcomm.transports.group.wire import Wire
from fastcomm.transports.group.work import GroupBucket, GroupWork
from fastcomm.transports.group.work_queue import WorkQueue


class Bootstrap(Notes, Protocol):
    """How the ranks have met; see fastcomm.launching.bootstrap."""

    timeout: timedelta

    def exchange(self, value: Any, form: messages.Form) -> list[Any]: ...
    def store(self, name: str) -> Store: ...
    def look(self) -> None: ...


class GroupCommunicator(Transport):
    """Collectives over Gloo. See fastcomm.comm.transport.Transport for the contract. Made by
    fastcomm.init. exchange: moves the tensors.

    Beyond the contract, any number of threads may call it and wait for their works at once, as long
    as the calls come in the same order on all ranks. What a signal handler raises while this rank
    waits, in a collective, a wait or abandon(), is raised once that is over. A second exception is
    raised at once, and aborts the communicator.
    """

    backend = "group"
    has_streams = False
    progresses_itself = is_threadsafe = feeds_back_errors = True
    crosses_network = True
    wire_dtypes = (*WIRE_DTYPES, *BLOCK_DTYPES)
    # Without a Python frame, in which a signal handler might raise.
    standing = property(attrgetter("_queue.life"))
    flight = property(attrgetter("_queue.flight"))
    number = property(attrgetter("_queue.number"))  # of the newest collective begun

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        bootstrap: Bootstrap,
        timeout: timedelta,
        neighbours: Sequence[int],
        exchange: Exchange,
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.device = torch.device("cpu")
        self.timeout = timeout
        self.processes = processes_of(bootstrap.exchange(os.getpid(), messages.PID))
        exchange.connect(bootstrap.store("gloo"), bootstrap.timeout, bootstrap.look)
        self._notes, self._exchange = bootstrap, exchange
        self._queue = WorkQueue(
            self.backend, rank, self.processes, exchange, bootstrap, timeout, neighbours
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: rank {self.rank} of "
            f"{self.world_size}{', ended' if self.failure is not None else ''}>"
        )

    # -- collectives -------------------------------------------------------------------------------

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """A group alone reaches no memory without a copy."""
        self._queue.check_usable()
        if dtype not in CPU_DTYPES:
            refuse_dtype(dtype, CPU_DTYPES)
        check_numel(numel)
        return self._exchange.empty(numel, dtype)

    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> GroupWork | None:
        """16-bit floats are added in float32 and rounded once."""
        op = canonical_op(op)
        flat = self._check(tensor, op)
        call = Call("all_reduce", flat.numel(), flat.dtype, op=op)
        transfer = self._exchange.transfer_of(flat, None)
        work = GroupWork(self._queue, call, transfer, flat, fusable=flat)
        return self._begin(work, async_op, [flat])

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Op = "sum", *, async_op: bool = False
    ) -> GroupWork | None:
        """Reduces a copy, which lies together."""
        op = canonical_op(op)
        flats = checked_together(tensors, functools.partial(self._check, op=op))
        numels = [flat.numel() for flat in flats]
        dtype = flats[0].dtype
        call = Call("all_reduce", sum(numels), dtype, op=op, step=sizes(numels))
        transfer = self._exchange.fused_transfer_of(flats)
        work = GroupWork(self._queue, call, transfer, payload=transfer.fused)
        return self._begin(work, async_op, flats)

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, async_op: bool = False
    ) -> GroupWork | None:
        flat = self._check(tensor)
        check_root("src", src, self.world_size)
        call = Call("broadcast", flat.numel(), flat.dtype, root=src)
        transfer = Transfer(lambda _, rows, __: self._exchange.broadcast(flat, src, rows))
        written = [] if src == self.rank else [flat]
        return self._begin(GroupWork(self._queue, call, transfer, flat), async_op, written)

    def broadcast_all(self, tensors: list[Tensor], src: int = 0) -> None:
        """One collective, so that no exception can split it."""
        flats = [as_bytes(self._check(tensor)) for tensor in tensors]
        check_root("src", src, self.world_size)

        def move(*_: object) -> None:
            for flat in flats:
                self._exchange.broadcast(flat, src)

        call = Call("broadcast", sum(map(len, flats)), torch.uint8, root=src)
        written = [] if src == self.rank else flats
        self._begin(GroupWork(self._queue, call, Transfer(move)), False, written)

    def all_gather_single(
        self, out: Tensor, inp: Tensor, *, async_op: bool = False
    ) -> GroupWork | None:
        flat = self._check(inp)
        whole = self._check_out("all_gather_single", out, inp, inp.numel() * self.world_size)
        call = Call("all_gather_single", flat.numel(), flat.dtype)
        transfer = Transfer(lambda _, rows, __: self._exchange.all_gather(whole, flat, rows))
        return self._begin(GroupWork(self._queue, call, transfer, flat), async_op, [whole])

    def reduce_scatter_single(
        self, out: Tensor, inp: Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> GroupWork | None:
        op = canonical_op(op)
        flat = self._check(inp, op)
        numel = shard_of("reduce_scatter_single", inp, self.world_size)
        part = self._check_out("reduce_scatter_single", out, inp, numel)
        call = Call("reduce_scatter_single", flat.numel(), flat.dtype, op=op)
        transfer = Transfer(functools.partial(self._exchange.reduce_scatter, part, flat))
        return self._begin(GroupWork(self._queue, call, transfer, flat), async_op, [part])

    def gather(
        self, out: Tensor | None, inp: Tensor, dst: int = 0, *, async_op: bool = False
    ) -> GroupWork | None:
        source, target = self._check(inp), None if out is None else self._check(out)
        parts = rooted("gather", self, out, inp, dst)
        return self._exchange_parts("gather", target, source, parts, async_op, dst)

    def scatter(
        self, out: Tensor, inp: Tensor | None, src: int = 0, *, async_op: bool = False
    ) -> GroupWork | None:
        source, target = None if inp is None else self._check(inp), self._check(out)
        parts = rooted("scatter", self, inp, out, src)
        return self._exchange_parts("scatter", target, source, parts, async_op, src)

    def all_to_all_single(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> GroupWork | None:
        source, target = self._check(inp), self._check(out)
        parts = exchanged(self, out, inp, out_splits, in_splits)
        return self._exchange_parts("all_to_all_single", target, source, parts, async_op)

    def _exchange_parts(
        self,
        kind: str,
        out: Tensor | None,
        inp: Tensor | None,
        parts: Parts,
        async_op: bool,
        root: int = 0,
    ) -> GroupWork | None:
        """out, inp: flat, or None where this rank has nothing to receive or to send."""
        dtype = next(tensor.dtype for tensor in (out, inp) if tensor is not None)
        empty = torch.empty(0, dtype=dtype, device="cpu")
        received = (empty if out is None else out).split(parts.received)
        sent = (empty if inp is None else inp).split(parts.sent)
        transfer = Transfer(lambda *_: self._exchange.swap_parts(received, sent))
        call = Call(kind, parts.numel, dtype, root=root)
        written = [] if out is None else [out]
        return self._begin(GroupWork(self._queue, call, transfer), async_op, written)

    def barrier(self, *, async_op: bool = False) -> GroupWork | None:
        """The announcement is the whole barrier."""
        self._queue.check_usable()
        return self._begin(GroupWork(self._queue, Call("barrier")), async_op)

    def bind_bucket(
        self,
        flat: Tensor,
        views: list[Tensor],
        offsets: list[int],
        *,
        wire_dtype: torch.dtype | None,
        label: int,
        lane: int = 0,
        bounds: tuple[int, ...] | None = None,
        error_feedback: bool = False,
    ) -> GroupBucket:
        """There are no lanes: the ranks share one network. Every rank gets the whole result."""
        if wire_dtype is not None and wire_dtype not in (*CPU_DTYPES, *BLOCK_DTYPES):
            refuse_dtype(wire_dtype, (*CPU_DTYPES, *BLOCK_DTYPES), "wire_dtype")
        is_coded = wire_dtype in BLOCK_DTYPES or error_feedback
        if wire_dtype is not None and is_coded:
            wire = Wire(wire_dtype, error_feedback=error_feedback)
            transfer: Transfer = CodedExchanges(self._exchange, flat, views, offsets, wire)
        else:
            transfer = self._exchange.transfer_of(flat, wire_dtype)
        sent_dtype = self._exchange.sent_dtype_of(flat.dtype, wire_dtype)
        is_fusable = not is_coded and sent_dtype == self._exchange.sent_dtype_of(flat.dtype, None)

        def work_of(op: str, used_mask: Tensor, step: int, part: Part) -> GroupWork:
            self._queue.check_usable()
            call = Call(
                *("all_reduce", flat.numel(), flat.dtype, sent_dtype, op),
                label=label,
                step=step,
                part=part,
            )
            return GroupWork(
                self._queue,
                call,
                transfer,
                payload=used_mask if is_coded else None,
                used_mask=used_mask,
                fusable=flat if is_fusable and call.op in OPS else None,
            )

        bucket = GroupBucket(flat, views, work_of, transfer, is_coded)
        self._queue.buckets[label] = bucket
        return bucket

    def follow(self) -> bool:
        self._queue.check_usable()
        work = GroupWork(self._queue, WITHOUT_DATA)
        work.run()
        return not work.has_followed

    def _begin(
        self, work: GroupWork, async_op: bool, written: Sequence[Tensor] = ()
    ) -> GroupWork | None:
        """written: the user's tensors that it writes to; autograd hears of that here and at the
        end, as somebody may use them meanwhile.
        """
        work.written = written
        increment_version(written)
        if async_op:
            work.post()
            return work
        work.run()
        return None

    def _check(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Checks that the communicator can be used and can take the tensor. Returns a flat view of
        it, a complex one as pairs.
        """
        self._queue.check_usable()
        if not isinstance(tensor, Tensor) or not _is_dense_here(tensor):
            refuse_tensor(tensor, self.backend, self.device)
        tensor = as_pairs(tensor, op)
        if tensor.dtype not in CPU_DTYPES:
            refuse_dtype(tensor.dtype, CPU_DTYPES)
        return tensor.detach().view(-1)

    def _check_out(self, name: str, out: Tensor, inp: Tensor, numel: int) -> Tensor:
        flat = self._check(out)
        check_out(name, out, inp, numel)
        return flat

    def check_tensor(self, tensor: Tensor) -> None:
        self._check(tensor)

    def keep_times(self, is_on: bool) -> None:
        self._queue.n_timekeepers += 1 if is_on else -1

    # -- abandoning and ending ---------------------------------------------------------------------

    def check(self) -> None:
        self._queue.check()

    def abandon(self, *, in_any_case: bool = False) -> None:
        """Finishes what all ranks have announced; begins nothing that waits.

        What a signal handler raises is raised once the ranks have met; see GroupWork.wait.
        """
        if not in_any_case and self.standing.is_told():
            return
        self._queue.abandon()
        if not in_any_case:
            self.standing.leave_backward(self.rank)

    def abort(self) -> None:
        self.end_channels(aborts=True)
        self._queue.abort()

    def close(self) -> None:
        """Peers that still wait for this rank get PeerLostError."""
        self.end_channels(aborts=False)
        self._queue.close()


class HierarchicalCommunicator(GroupCommunicator):
    """One whose ranks reduce inside each host first, where hosts have several."""

    backend = "hierarchical"


def _is_dense_here(tensor: Tensor) -> bool:
    """Whether the tensor is on the CPU, dense, contiguous, in memory and no negated view."""
    is_dense = tensor.is_cpu and tensor.layout is torch.strided and not lacks_memory(tensor)
    return is_dense and tensor.is_contiguous() and not tensor.is_neg()
