"""Exchange: moves and reduces tensors between ranks over Gloo. All ranks call the same method, each
on the thread of its WorkQueue.

Only bytes travel. The arithmetic is done here, by the tree over the ranks, so that the results have
the same bits on all ranks, and 16-bit floats are added in float32 and rounded once. The ranks
announce each collective to each other over another group than that of the data, so that no
announcement waits for data. Over "hierarchical" an all-reduce begins and ends in the shared memory
of each host; all else goes between any two ranks, as over "group".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastcomm.comm.collective import BLOCK_DTYPES, HALVES
from fastcomm.comm.communicator import Communicator
from fastcomm.comm.deadline import Deadline, running_s
from fastcomm.comm.words import waited
from fastcomm.control.announcement import Call
from fastcomm.errors import FastcommError, InitError, PeerLostError
from fastcomm.postmortem.script_end import start_thread
from fastcomm.transports.group.call import as_bytes, reduce_rows, with_one_nan
from fastcomm.transports.group.layout import Layout
from fastcomm.transports.group.shards import (
    CHUNK_NBYTES,
    Announcement,
    Announcer,
    CodedExchanges,
    FusedTransfer,
    GroupPair,
    Transfer,
    TwoExchanges,
    tag_of,
)
from fastcomm.transports.group.wire import Wire

# All-reductions that wait are fused if each is so small that its calls cost more than a copy.
FUSABLE_NBYTES = 2**19
FUSED_NBYTES = 16 * 2**20  # several chunks, so that one travels while another is reduced
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

    hosts: the ranks of each host, ascending. Over "group" each rank counts as one.
    shm: of the ranks of this host. None if no host has two ranks.
    moved_at: when an exchange last ended. Deadlines count from there.
    """

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], shm: Communicator | None = None
    ) -> None:
        self.rank, self.world_size = rank, sum(map(len, hosts))
        self.layout = Layout(hosts, rank)
        self.group: Any = None
        self.announcer = Announcer(self.world_size)
        self._own_groups: list[Any] = []
        self._shm = shm
        self._shm_turn = threading.Lock()  # the thread and comm.empty take turns
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
                    place = PrefixStore(name, store), self.rank, self.world_size
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
                f"rank {self.rank} cannot connect to its peers over Gloo: {trouble[0]}. "
                "Can the hosts reach each other? GLOO_SOCKET_IFNAME names the network interface "
                "to use"
            ) from trouble[0]
        self.announcer.group, up, down = self._own_groups
        self.group = GroupPair(self.rank, up, down)

    def interrupt(self) -> None:
        """Ends the wait of the thread that is inside: when a receive times out, Gloo closes all
        connections of the group.
        """
        if self._shm is not None:
            self._shm.abort()
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
        others = [rank for rank in range(self.world_size) if rank != self.rank]
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
        if self._shm is not None:
            self._shm.close()

    # Called by the caller's thread, too.

    @property
    def in_hosts(self) -> bool:
        """Whether ranks of a host reduce first."""
        return self._shm is not None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in shared memory where there is some. Else nothing is reached without a
        copy.
        """
        if self._shm is None:
            return torch.empty(numel, dtype=dtype, device="cpu")
        with self._shm_turn:
            return self._shm.empty(numel, dtype=dtype)

    def sent_dtype_of(self, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype in which a tensor travels. Where ranks of a host reduce first, halves are added
        in float32. wire_dtype: None if none was chosen.
        """
        return wire_dtype or (torch.float32 if self.in_hosts and dtype in HALVES else dtype)

    def transfer_of(self, flat: Tensor, wire_dtype: torch.dtype | None) -> Transfer:
        """Returns the transfer of an all-reduce. wire_dtype: None if none was chosen."""
        dtype = self.sent_dtype_of(flat.dtype, wire_dtype)
        if not self.in_hosts and dtype == flat.dtype and flat.nbytes <= SMALL_NBYTES:
            transfer = Transfer(functools.partial(self.all_reduce, flat))
        else:
            transfer = TwoExchanges(self, flat, dtype)
        if dtype == self.sent_dtype_of(flat.dtype, None):
            transfer.fusable = flat
        return transfer

    def drain(self, gathered: Announcement) -> None:
        """Ends what ranks have begun to send for calls that do not go together, so that nothing
        stays in flight: receives it, sends as much for it, and throws all of it away.
        """
        calls, own = gathered.calls, gathered.begun
        tags = [tag_of(gathered.index, call) for call in calls]
        for rank, (call, has_begun) in enumerate(zip(calls, gathered.have_begun, strict=True)):
            is_met = own is not None and call.shard_key == calls[self.rank].shard_key
            if rank != self.rank and has_begun and not is_met:
                try:
                    unwanted = self._transfer_like(call)
                except RuntimeError as error:  # of a size that no tensor has: it is damaged
                    announced = f"{call.packed().hex()}, which is no collective"
                    raise FastcommError(f"rank {rank} has announced {announced}") from error
                unwanted.begin(tags[rank], to=rank)
                unwanted.drain()
        if own is not None:
            own.drain()

    def _transfer_like(self, call: Call) -> TwoExchanges:
        """A meaningless one, of the sizes that another rank has begun to send for the call. Each
        rank counts as a host.
        """
        if call.wire not in BLOCK_DTYPES:
            zeros = torch.zeros(call.numel, dtype=call.wire, device="cpu")
            return TwoExchanges(self, zeros, call.wire)
        zeros = torch.zeros(call.numel, dtype=torch.float32, device="cpu")
        wire = Wire(call.wire, error_feedback=False)
        return CodedExchanges(self, zeros, [zeros[:-1]], [0], wire)

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
            rows = flat.new_empty(self.world_size, flat.numel())
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
            mine = rows.view(self.world_size, self.world_size, part.numel())[:, self.rank]
            part.copy_(reduce_rows(mine, op))
            return
        n = max(1, CHUNK_NBYTES // part.element_size() // self.world_size)
        columns = whole.view(self.world_size, part.numel()).split(n, dim=1)
        for some, outgoing in zip(part.split(n), columns, strict=True):
            incoming = outgoing.new_empty(outgoing.shape)
            self.swap_parts(incoming, outgoing)
            some.copy_(reduce_rows(incoming, op, factors))

    def all_gather(self, whole: Tensor, part: Tensor, rows: Tensor | None = None) -> None:
        if rows is not None:
            whole.copy_(rows.view(-1))
            return
        n = self.world_size
        self.swap_parts(whole.view(n, part.numel()), part.expand(n, -1))

    def broadcast(self, flats: Sequence[Tensor], src: int, rows: Tensor | None = None) -> None:
        if rows is not None:
            if src != self.rank:
                flats[0].copy_(rows[src])
            return
        options = dist.BroadcastOptions()
        options.rootRank = src
        for chunk in itertools.chain.from_iterable(map(_chunks_of, flats)):
            self.wait(self.group.broadcast([chunk], options))

    def swap_parts(
        self, received: Tensor | Sequence[Tensor], sent: Tensor | Sequence[Tensor]
    ) -> None:
        """Sends every rank a row, and receives one from each, which may be empty."""
        received[self.rank].copy_(sent[self.rank])
        others = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        works = [
            self.group.recv([chunk], rank, _SWAPPED)
            for rank in others
            for chunk in _chunks_of(received[rank])
        ]
        works += [
            self.group.send([chunk], rank, _SWAPPED)
            for rank in others
            for chunk in _chunks_of(sent[rank])
        ]
        for work in works:
            self.wait(work)

    def wait(self, work: Any) -> None:
        work.wait()
        self.moved_at = running_s()

    def in_host(self, collective: str, *arguments: object) -> None:
        """Runs a collective of this host's ranks, in shared memory."""
        try:
            with self._shm_turn:
                getattr(self._shm, collective)(*arguments)
        except FastcommError as error:  # numbers the ranks of this host only
            lost = [self.layout.neighbours[rank] for rank in getattr(error, "ranks", ())]
            where = f"among the ranks of host {self.layout.place}"
            raise PeerLostError(f"{where}: {error}", lost) from error
        self.moved_at = running_s()


def _chunks_of(row: Tensor) -> Sequence[Tensor]:
    """What is moved of it at a time: progress, by which deadlines are counted, comes with each."""
    return as_bytes(row).split(CHUNK_NBYTES) if row.numel() else ()


def _keep_groups() -> None:
    """In a forked child: a Gloo group waits for its threads when it is freed. Here it has none."""
    for exchange in _exchanges:
        _kept.extend((exchange.group, exchange.announcer.group, *exchange._own_groups))


os.register_at_fork(after_in_child=_keep_groups)
