"""GroupCommunicator: Gloo as a Transport, for tensors on the CPU. What it takes, and which call it
makes of a collective.

Another thread runs collectives in the order of their calls, so that backward goes on while
gradients travel: see work_queue.py. exchange.py moves and reduces tensors. docs/design.md says how
ranks agree, and what is sent when.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm.collective import BLOCK_DTYPES, SENT_DTYPES, WIRE_DTYPES, refuse_dtype
from fastcomm.comm.parts import Parts, equal_parts
from fastcomm.comm.transport import Transport
from fastcomm.comm.who import PROCESS, own_process, processes_of
from fastcomm.control.announcement import Call
from fastcomm.control.collectives import Collectives
from fastcomm.transports.group.call import WITHOUT_DATA
from fastcomm.transports.group.exchange import Exchange
from fastcomm.transports.group.shards import CodedExchanges, Transfer
from fastcomm.transports.group.wire import Wire
from fastcomm.transports.group.work import GroupBucket, GroupWork
from fastcomm.transports.group.work_queue import WorkQueue


class GroupCommunicator(Collectives, Transport):
    """Collectives over Gloo. See fastcomm.comm.transport.Transport for the contract. Made by
    fastcomm.init. bootstrap: how the ranks have met; see fastcomm.launching.bootstrap. exchange:
    moves the tensors.

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
    number = property(attrgetter("_queue.number"))  # of the newest collective begun

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        bootstrap: Any,
        timeout: timedelta,
        neighbours: Sequence[int],
        exchange: Exchange,
    ) -> None:
        told = bootstrap.exchange(own_process(), PROCESS)
        self.processes = processes_of(*zip(*told, strict=True))
        exchange.connect(bootstrap.store("gloo"), bootstrap.timeout, bootstrap.look)
        self._exchange, self.adds_by_tree = exchange, exchange.layout.follows_tree
        self._queue = WorkQueue(
            self.backend, rank, self.processes, exchange, bootstrap, timeout, neighbours
        )
        self.standing, self.flight = self._queue.standing, self._queue.flight

    # -- collectives -------------------------------------------------------------------------------

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A group alone reaches no memory without a copy."""
        return self._exchange.empty(numel, dtype)

    def check_usable(self) -> None:
        self._queue.check_usable()

    def run(
        self, call: Call, inp: Tensor | None, out: Tensor | None, async_op: bool
    ) -> GroupWork | None:
        if call.kind in ("gather", "scatter", "all_to_all_single"):
            parts = equal_parts(call.kind, self, call.numel, call.root)
            return self.run_parts(call, inp, out, parts, async_op)
        inp, out = _flat(inp), _flat(out)
        # of a barrier, the announcement is all there is
        transfer = None if inp is None else self._transfer_of(call, inp, out)
        return self._begin(call, transfer, [] if out is None else [out], async_op)

    def _transfer_of(self, call: Call, inp: Tensor, out: Any) -> Transfer:
        exchange = self._exchange
        if call.kind == "all_reduce":
            transfer = exchange.transfer_of(inp, None)
        elif call.kind == "broadcast":
            transfer = Transfer(lambda _, rows, __: exchange.broadcast([inp], call.root, rows))
        elif call.kind == "all_gather_single":
            transfer = Transfer(lambda _, rows, __: exchange.all_gather(out, inp, rows))
        else:
            transfer = Transfer(functools.partial(exchange.reduce_scatter, out, inp))
        transfer.payload = inp
        return transfer

    def run_together(self, call: Call, flats: list[Tensor], async_op: bool) -> GroupWork | None:
        if call.kind == "broadcast":
            transfer = Transfer(lambda *_: self._exchange.broadcast(flats, call.root))
            written = [] if call.root == self.rank else flats
            return self._begin(call, transfer, written, async_op)
        fusing = self._exchange.fused_transfer_of([flat.detach().view(-1) for flat in flats])
        return self._begin(call, fusing, flats, async_op)

    def run_parts(
        self, call: Call, inp: Tensor | None, out: Tensor | None, parts: Parts, async_op: bool
    ) -> GroupWork | None:
        inp, out = _flat(inp), _flat(out)
        empty = torch.empty(0, dtype=call.dtype, device="cpu")
        received = (empty if out is None else out).split(parts.received)
        sent = (empty if inp is None else inp).split(parts.sent)
        transfer = Transfer(lambda *_: self._exchange.swap_parts(received, sent))
        return self._begin(call, transfer, [] if out is None else [out], async_op)

    def all_gather_v(self, flat: Tensor, bounds: tuple[int, ...], *, label: int = 0) -> GroupWork:
        self.check_tensor(flat)
        shards = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
        sent = [shards[self.rank]] * self.world_size
        transfer = Transfer(lambda *_: self._exchange.swap_parts(shards, sent))
        call = Call("all_gather_v", flat.numel(), flat.dtype, label=label)
        work = GroupWork(self._queue, call, transfer, [flat])
        work.post()
        return work

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
        if wire_dtype is not None and wire_dtype not in SENT_DTYPES:
            refuse_dtype(wire_dtype, SENT_DTYPES, "wire_dtype")
        exchange = self._exchange
        if wire_dtype is not None and (wire_dtype in BLOCK_DTYPES or error_feedback):
            wire = Wire(wire_dtype, error_feedback=error_feedback)
            transfer: Transfer = CodedExchanges(exchange, flat, views, offsets, wire)
        else:
            transfer = exchange.transfer_of(flat, wire_dtype)
        sent = exchange.sent_dtype_of(flat.dtype, wire_dtype)
        bucket = GroupBucket(self._queue, flat, views, transfer, sent, label)
        self._queue.buckets[label] = bucket
        return bucket

    def follow(self) -> bool:
        self._queue.check_usable()
        work = GroupWork(self._queue, WITHOUT_DATA)
        work.run()
        return not work.has_followed

    def _begin(
        self, call: Call, transfer: Transfer | None, written: Sequence[Tensor], async_op: bool
    ) -> GroupWork | None:
        work = GroupWork(self._queue, call, transfer, written)
        if async_op:
            work.post()
            return work
        work.run()
        return None

    def keep_times(self, is_on: bool) -> None:
        self._queue.n_timekeepers += 1 if is_on else -1

    # -- abandoning and ending ---------------------------------------------------------------------

    def check(self) -> None:
        self._queue.check()

    def _abandon(self) -> None:
        self._queue.abandon()

    def _abort(self) -> None:
        self._queue.abort()

    def _close(self) -> None:
        self._queue.close()


class HierarchicalCommunicator(GroupCommunicator):
    """One whose ranks reduce inside each host first, where hosts have several."""

    backend = "hierarchical"


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().view(-1)
