"""Exchange: moves and reduces tensors between ranks over Gloo. All ranks call the same method, each
on the thread of its WorkQueue.

Only bytes travel, in two exchanges: each rank sends every other one the shard that one reduces,
then each rank sends its reduced shard to all; see shards.py. The arithmetic is done here, in rank
order, so that the results have the same bits on all ranks, and 16-bit floats are added in float32
and rounded once. The ranks announce each collective to each other over another group than that of
the data, so that no announcement waits for data. Small tensors travel with the announcement: then
there is no other exchange. All-reductions that wait behind one like them are announced with it, and
fused with it, as far as all ranks have come to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastcomm.comm.collective import BLOCK_DTYPES, as_pairs
from fastcomm.comm.deadline import Deadline, running_s
from fastcomm.comm.words import waited
from fastcomm.control.announcement import Call
from fastcomm.errors import InitError
from fastcomm.postmortem.script_end import start_thread
from fastcomm.transports.group.call import GatheredCalls, as_bytes, reduce_rows, with_one_nan
from fastcomm.transports.group.shards import (
    CHUNK_NBYTES,
    PAYLOAD_NBYTES,
    Announcer,
    CastTransfer,
    CodedTransfer,
    FusedTransfer,
    GroupPair,
    ShardTransfer,
    Transfer,
    chunks_of,
    coded_spans,
    tag_of,
)
from fastcomm.transports.group.wire import Wire

# All-reductions that wait are fused if each is so small that its calls cost more than a copy. They
# are fused up to here: several of hierarchical's chunks, so that one travels while another is
# reduced.
FUSABLE_NBYTES = 2**19
FUSED_NBYTES = 16 * 2**20
SMALL_NBYTES = 8192  # up to here one exchange of everything is quicker than two of shards
# Of Gloo's own waits, which count the time in which this process is stopped, and do not name the
# ranks in their errors: the watchdog ends them before.
UNLIMITED = timedelta(days=365)
_LOOK_S = 0.05  # how often a rank that connects looks for the others
OVER_S = 1.0  # how long announcements take to end once their connections are broken
# Tags, all below those of shards.tag_of. What has one tag arrives in the order it was sent in.
_SWAPPED = 2**15
_NEVER_SENT = 2**20
_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
_kept: list[Any] = []  # the groups of a forked child's parent


class Exchange:
    """Has no connections before `connect`. Errors are torch's RuntimeError.

    moved_at: when an exchange last ended. Deadlines count from there.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.group: Any = None
        self.announcer = Announcer(world_size)
        self._own_groups: list[Any] = []
        self._rank, self._world_size = rank, world_size
        self.moved_at = 0.0
        _exchanges.add(self)

    def connect(self, store: Store, patience: timedelta, look: Callable[[], None]) -> None:
        """Makes private Gloo groups. Collective. Its addresses are those of
        GLOO_SOCKET_IFNAME, else those that the host's name resolves to. Raises InitError.

        patience: with ranks that do not connect. look: called while they do; raises when one will
            not come.
        """
        trouble: list[RuntimeError] = []

        def make() -> None:
            try:
                for name in ("announcements", "up", "down"):
                    place = PrefixStore(name, store), self._rank, self._world_size
                    self._own_groups.append(dist.ProcessGroupGloo(*place, UNLIMITED))
            except RuntimeError as error:
                trouble.append(error)

        # On another thread: Gloo waits for ever for a rank that is lost here.
        making = start_thread("fastcomm connecting", make)
        deadline = Deadline(patience.total_seconds())
        making.join(_LOOK_S)
        while making.is_alive():
            look()
            if deadline.is_over():
                trouble.append(RuntimeError(waited(patience.total_seconds())))
                break
            making.join(_LOOK_S)
        if trouble:
            raise InitError(
                f"rank {self._rank} cannot connect to its peers over Gloo: {trouble[0]}. "
                "Can the hosts reach each other? GLOO_SOCKET_IFNAME names the network interface "
                "to use"
            ) from trouble[0]
        self.announcer.group, up, down = self._own_groups
        self.group = GroupPair(self._rank, up, down)

    def interrupt(self) -> None:
        """Ends the wait of the thread that is inside: when a receive times out, Gloo closes all
        connections of the group.
        """
        for receive in self._receives_of_nothing():
            with contextlib.suppress(RuntimeError):
                receive().wait(timedelta(milliseconds=1))

    def look_at_connections(self) -> None:
        """Raises RuntimeError if one is broken. Gloo tells that to those who begin something, and
        to those who wait for a message, but not once that has begun to come: they would wait for
        the whole time-out.
        """
        for receive in self._receives_of_nothing():
            receive()

    def _receives_of_nothing(self) -> Iterator[Callable[[], Any]]:
        """Functions that begin to receive what nobody sends, over each connection."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        for group, rank in itertools.product(self._own_groups, others):
            never = torch.empty(1, dtype=torch.float32, device="cpu")
            yield functools.partial(group.recv, [never], rank, _NEVER_SENT)

    def close(self) -> None:
        """Drops the groups. But not the one over which an announcement goes on, though its wait was
        ended: Gloo would wait for that as it frees the group.
        """
        if self._own_groups:
            self.group.close()
            deadline = Deadline(OVER_S)
            while not self.announcer.is_over():
                if deadline.is_over():
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.announcer.group))
                    break
                time.sleep(0.01)
        self.group = self.announcer.group = None
        self._own_groups = []

    # Called by the caller's thread, too.

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory: nothing is reached without a copy."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def sent_dtype_of(self, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype in which a bucket is sent. wire_dtype: None if none was chosen."""
        return wire_dtype or dtype

    def transfer_of(self, flat: Tensor, wire_dtype: torch.dtype | None) -> Transfer:
        """Returns the transfer of an all-reduce. wire_dtype: None if none was chosen."""
        if wire_dtype is not None and wire_dtype != flat.dtype:
            with torch.inference_mode(False):  # buckets may be made under it
                wire = torch.zeros(flat.numel(), dtype=wire_dtype, device="cpu")
            return CastTransfer(flat, wire, self.transfer_of(wire, None), self._rank)
        if flat.nbytes <= SMALL_NBYTES:
            return Transfer(functools.partial(self.all_reduce, flat))
        return self._shard_transfer(chunks_of(flat, self._world_size))

    def _shard_transfer(self, chunks: Sequence[Sequence[Tensor]]) -> ShardTransfer:
        return ShardTransfer(self._rank, self._world_size, chunks, self.group, self._wait)

    def coded_transfer_of(
        self, flat: Tensor, views: Sequence[Tensor], offsets: Sequence[int], wire: Wire
    ) -> Transfer:
        """Returns the transfer of a bucket whose gradients a wire carries. The used mask is
        reduced by itself: the payloads are of that.
        """
        numel = flat.numel() - len(views)
        mask = flat[numel:]
        return CodedTransfer(
            self._rank,
            self._world_size,
            flat,
            numel,
            gaps_of(numel, views, offsets),
            wire,
            self.group,
            self._wait,
            lambda op, rows, factors: self.all_reduce(mask, op, rows, factors),
            mask.nbytes <= PAYLOAD_NBYTES,
        )

    def drain(self, gathered: GatheredCalls) -> None:
        """Ends what ranks have begun to send for calls that do not go together, so that nothing
        stays in flight: receives it, sends as much for it, and throws all of it away.
        """
        calls, own = gathered.calls, gathered.begun
        tags = [tag_of(gathered.index, call) for call in calls]
        for rank, (call, has_begun) in enumerate(zip(calls, gathered.have_begun, strict=True)):
            is_met = own is not None and call.shard_key == calls[self._rank].shard_key
            if rank != self._rank and has_begun and not is_met:
                unwanted = self._shard_transfer(_chunks_like(call, self._world_size))
                unwanted.send(tags[rank], [rank])
                unwanted.drain()
        if own is not None:
            own.drain()

    def fused_transfer_of(self, flats: Sequence[Tensor]) -> FusedTransfer:
        """Returns the transfer that reduces several tensors as one."""
        fused = self.empty(sum(flat.numel() for flat in flats), flats[0].dtype)
        torch.cat(list(flats), out=fused)
        return FusedTransfer(flats, fused, self.transfer_of(fused, None))

    # rows, in each of these: the payloads that came with the announcement, or None. factors: of the
    # ranks' tensors, where they have weights.

    def all_reduce(
        self,
        flat: Tensor,
        op: str,
        rows: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        """Of a small tensor: each rank gets everything, and computes it for itself."""
        if rows is None:
            rows = flat.new_empty(self._world_size, flat.numel())
            self.all_gather(rows, flat)
        flat.copy_(with_one_nan(reduce_rows(rows, op, factors)))

    def reduce_scatter(
        self,
        part: Tensor,
        whole: Tensor,
        op: str,
        rows: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        if rows is not None:
            mine = rows.view(self._world_size, self._world_size, part.numel())[:, self._rank]
            part.copy_(reduce_rows(mine, op))
            return
        for some, columns in self._chunks(part, whole):
            outgoing = columns.contiguous()
            incoming = torch.empty_like(outgoing)
            incoming[self._rank] = outgoing[self._rank]
            self._swap(incoming, outgoing)
            some.copy_(reduce_rows(incoming, op, factors))

    def all_gather(self, whole: Tensor, part: Tensor, rows: Tensor | None = None) -> None:
        if rows is not None:
            whole.copy_(rows.view(-1))
            return
        for some, columns in self._chunks(part, whole):
            incoming = columns if columns.is_contiguous() else part.new_empty(columns.shape)
            incoming[self._rank] = some
            self._swap(incoming, some.expand(self._world_size, -1))
            if incoming is not columns:
                columns.copy_(incoming)

    def broadcast(self, flat: Tensor, src: int, rows: Tensor | None = None) -> None:
        if rows is not None:
            if src != self._rank:
                flat.copy_(rows[src])
            return
        options = dist.BroadcastOptions()
        options.rootRank = src
        for chunk in as_bytes(flat).split(CHUNK_NBYTES):
            if chunk.numel():
                self._wait(self.group.broadcast([chunk], options))

    def swap_parts(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Sends every rank a tensor, and receives one from each, which may be empty."""
        received[self._rank].copy_(sent[self._rank])
        self._swap(received, sent)

    def _chunks(self, part: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of a part, each with its columns of `whole`, where every rank's part is a row."""
        n = max(1, CHUNK_NBYTES // part.element_size() // self._world_size)
        rows = whole.view(self._world_size, part.numel())
        for begin in range(0, part.numel(), n):
            yield part[begin : begin + n], rows[:, begin : begin + n]

    def _swap(
        self, incoming: Tensor | Sequence[Tensor], outgoing: Tensor | Sequence[Tensor]
    ) -> None:
        """Sends every other rank its row, and receives theirs."""
        others = [(self._rank + i) % self._world_size for i in range(1, self._world_size)]
        works = [
            self.group.recv([chunk], rank, _SWAPPED)
            for rank in others
            for chunk in _chunks_of(incoming[rank])
        ]
        works += [
            self.group.send([chunk], rank, _SWAPPED)
            for rank in others
            for chunk in _chunks_of(outgoing[rank])
        ]
        for work in works:
            self._wait(work)

    def _wait(self, work: Any) -> None:
        work.wait()
        self.moved_at = running_s()


def _chunks_of(row: Tensor) -> Sequence[Tensor]:
    """What is moved of it at a time: progress, by which deadlines are counted, comes with each."""
    return as_bytes(row).split(CHUNK_NBYTES) if row.numel() else ()


def _keep_groups() -> None:
    """In a forked child: a Gloo group waits for its threads when it is freed. Here it has none."""
    for exchange in _exchanges:
        _kept.extend((exchange.group, exchange.announcer.group, *exchange._own_groups))


os.register_at_fork(after_in_child=_keep_groups)


def _chunks_like(call: Call, world_size: int) -> list[Sequence[Tensor]]:
    """Meaningless chunks, of the sizes that this call sends."""
    if call.wire not in BLOCK_DTYPES:
        return chunks_of(torch.zeros(call.numel, dtype=call.wire, device="cpu"), world_size)
    wire = Wire(call.wire, error_feedback=False)
    return [list(wire.rows_for(world_size, n)) for _, n in coded_spans(call.numel, world_size)]


def gaps_of(numel: int, views: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
    """The elements of a flat buffer that are in no view."""
    with torch.inference_mode(False):  # buckets may be made under it
        is_gap = torch.ones(numel, dtype=torch.bool, device="cpu")
        for view, offset in zip(map(as_pairs, views), offsets, strict=True):
            is_gap.as_strided(view.size(), view.stride(), offset).fill_(False)
        return is_gap.nonzero().view(-1)
