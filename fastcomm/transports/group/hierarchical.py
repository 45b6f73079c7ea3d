"""HierarchicalCommunicator: shared memory inside each host, Gloo across hosts, so that every byte
crosses a host's link once.

An all-reduce is a reduce-scatter inside the host, an all-reduce of each rank's part with the ranks
of the other hosts that own the same elements, and an all-gather inside the host. Large tensors go
in chunks, several of which are in flight at a time: one is reduced inside the host while the shards
of others and the results of yet others travel. GroupCommunicator does everything else; it also lets
the ranks agree, abandon and fail.

Hosts need not have equally many ranks. A chunk is cut wherever some host has a boundary between the
parts of two of its ranks (with hosts of 2 and 3 ranks at 1/3, 1/2 and 2/3), so that each segment
has one owner on every host, and every rank of every host takes its share.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fastcomm.comm import messages
from fastcomm.comm.collective import HALVES, addends_of_mean, mean_of_addends
from fastcomm.comm.deadline import running_s
from fastcomm.errors import FastcommError, PeerLostError
from fastcomm.transports.group.call import cast, reduce_rows
from fastcomm.transports.group.communicator import Bootstrap, GroupCommunicator
from fastcomm.transports.group.exchange import UNLIMITED, Exchange, gaps_of
from fastcomm.transports.group.shards import Transfer
from fastcomm.transports.group.wire import BLOCK, Wire
from fastcomm.transports.shm.communicator import ShmCommunicator

# Large enough that a chunk takes much longer on a fast network (10 Gbit/s: 3 ms) than the calls
# that move it, small enough that filling and draining the pipeline costs little.
CHUNK_NBYTES = 4 * 2**20
# how many chunks are sent before the first of them is waited for: the network has work while ranks
# are late
AHEAD = 2
_NOTHING: Iterator[None] = iter(())


@dataclass(frozen=True)
class Segment:
    """A range of this rank's part of a chunk that has the same owners throughout, one per host. In
    units of the chunk's length / n_units.
    """

    begin: int
    end: int
    owners: tuple[int, ...]  # by host


def n_units(hosts: Sequence[Sequence[int]]) -> int:
    """The number of equal units of a chunk, so that every host's parts, and with them all segments,
    begin and end between two units.
    """
    return math.lcm(*(len(ranks) for ranks in hosts))


def segments_of(hosts: Sequence[Sequence[int]], rank: int) -> list[Segment]:
    """The segments of `rank`'s part, ascending, counted from where the part begins. hosts: the
    ranks of each host.
    """
    n = n_units(hosts)
    cuts = sorted({i * (n // len(ranks)) for ranks in hosts for i in range(len(ranks) + 1)})
    found = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        owners = tuple(ranks[begin * len(ranks) // n] for ranks in hosts)
        if rank in owners:
            found.append(Segment(begin, end, owners))
    return [
        Segment(one.begin - found[0].begin, one.end - found[0].begin, one.owners) for one in found
    ]


class HierarchicalCommunicator(GroupCommunicator):
    """A GroupCommunicator that reduces inside each host first. hosts: their ranks, ascending."""

    backend = "hierarchical"

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        bootstrap: Bootstrap,
        timeout: timedelta,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        neighbours = next(ranks for ranks in hosts if rank in ranks)
        exchange = Exchange(rank, world_size)  # no host has ranks to reduce among
        if any(len(ranks) > 1 for ranks in hosts):
            exchange = HierarchicalExchange(rank, world_size, local_rank, bootstrap, hosts)
        super().__init__(rank, world_size, local_rank, bootstrap, timeout, neighbours, exchange)


class HierarchicalExchange(Exchange):
    """An Exchange that reduces inside the host first. hosts: the ranks of each host, ascending.

    16-bit floats are added in float32 and rounded once. A wire_dtype that was chosen for a bucket
    applies across hosts only.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        bootstrap: Bootstrap,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(rank, world_size)
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self.neighbours = hosts[self._host]
        self._n_hosts, self._n_units = len(hosts), n_units(hosts)
        self._segments = segments_of(hosts, rank)
        self._shm_turn = threading.Lock()  # the thread and comm.empty take turns
        self._shm = ShmCommunicator(  # type: ignore[abstract]
            self.neighbours.index(rank),
            len(self.neighbours),
            local_rank,
            _OneHost(bootstrap, self.neighbours),
            UNLIMITED,
        )

    def interrupt(self) -> None:
        """Ends the thread's wait, also for ranks of this host."""
        self._shm.abort()
        super().interrupt()

    def close(self) -> None:
        """Ends the use of Gloo and of shared memory."""
        super().close()
        self._shm.close()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in shared memory."""
        with self._shm_turn:
            return self._shm.empty(numel, dtype=dtype)

    # -- all_reduce --------------------------------------------------------------------------------

    def sent_dtype_of(self, dtype: torch.dtype, wire_dtype: torch.dtype | None) -> torch.dtype:
        """Returns the dtype in which a tensor travels. Halves are added in float32."""
        return wire_dtype or (torch.float32 if dtype in HALVES else dtype)

    def transfer_of(self, flat: Tensor, wire_dtype: torch.dtype | None) -> Transfer:
        if wire_dtype is None:
            return Transfer(functools.partial(self.all_reduce, flat))
        return Transfer(lambda op, _, factors: self._reduce(flat, op, wire_dtype, factors))

    def all_reduce(
        self,
        flat: Tensor,
        op: str,
        rows: Tensor | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        if rows is not None:
            super().all_reduce(flat, op, rows, factors)
        elif op == "mean" and not flat.dtype.is_floating_point:  # from sums that do not wrap around
            sums = addends_of_mean(flat, self._world_size)
            self._reduce(sums.view(-1), "sum")
            flat.copy_(mean_of_addends(sums, self._world_size))
        else:
            self._reduce(flat, op, None, factors)

    def _reduce(
        self,
        flat: Tensor,
        op: str,
        wire_dtype: torch.dtype | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        """wire_dtype: None if none was chosen."""
        sent_dtype = self.sent_dtype_of(flat.dtype, wire_dtype)
        factor = None if factors is None else factors[self._rank]
        if self._n_hosts == 1:
            for chunk in flat.split(CHUNK_NBYTES // flat.element_size()):
                self._reduce_on_one_host(chunk, op, factor)
            return
        quantum = self._n_units * self._n_hosts  # each segment is cut into a shard for each host
        numel = max(1, CHUNK_NBYTES // flat.element_size() // quantum) * quantum
        self._run_pipeline(
            self._steps_of_chunk(index, chunk, op, sent_dtype, factor)
            for index, chunk in enumerate(flat.split(numel))
        )

    def _reduce_on_one_host(self, chunk: Tensor, op: str, factor: float | None) -> None:
        whole = chunk if factor is None else self._whole(chunk, factor=factor)
        self._in_host("all_reduce", whole, op if factor is None else "sum")
        if whole is not chunk:
            cast(whole[: chunk.numel()], chunk)

    def coded_transfer_of(
        self, flat: Tensor, views: Sequence[Tensor], offsets: Sequence[int], wire: Wire
    ) -> Transfer:
        numel = flat.numel() - len(views)
        gradients, used_mask, gaps = flat[:numel], flat[numel:], gaps_of(numel, views, offsets)

        def reduce(op: str, rows: Tensor | None, factors: Sequence[float] | None = None) -> None:
            self.all_reduce(used_mask, op, rows, factors)
            self._reduce_coded(gradients, op, wire, factors)
            gradients.index_fill_(0, gaps, 0)

        return Transfer(reduce)

    def _reduce_coded(
        self, flat: Tensor, op: str, wire: Wire, factors: Sequence[float] | None = None
    ) -> None:
        """Reduces what a wire encodes. Inside a host nothing is encoded."""
        if self._n_hosts == 1:
            self._reduce(flat, op, None, factors)
            return
        factor = None if factors is None else factors[self._rank]
        quantum = self._n_units * self._n_hosts * BLOCK
        numel = max(1, CHUNK_NBYTES // 4 // quantum) * quantum
        self._run_pipeline(
            self._coded_steps_of_chunk(index, chunk, op, wire, factor)
            for index, chunk in enumerate(flat.split(numel))
            if chunk.numel()
        )

    def _run_pipeline(self, chunks: Iterator[Iterator[None]]) -> None:
        """Takes chunks through their steps, several at a time. chunks: the steps of each."""
        in_flight = deque([_NOTHING] * (2 * AHEAD), maxlen=2 * AHEAD + 1)
        for steps in itertools.chain(chunks, [_NOTHING] * (2 * AHEAD)):
            in_flight.append(steps)  # drops the oldest, which is done
            # The newest first, so that the network has something to carry while older ones are
            # reduced.
            for one in (in_flight[-1], in_flight[-1 - AHEAD], in_flight[-1 - 2 * AHEAD]):
                next(one, None)

    def _steps_of_chunk(
        self, index: int, chunk: Tensor, op: str, sent_dtype: torch.dtype, factor: float | None
    ) -> Iterator[None]:
        """Takes a chunk through three steps: reduce it in the host and send it; reduce it across
        hosts and send the result; gather it in the host.
        """
        whole = self._whole(chunk, factor=factor)
        op = op if factor is None else "sum"
        part = self._reduce_in_host(whole, op)
        outgoing = part.to(sent_dtype)
        # One rank rounds to the chunk's dtype for all, unless what is sent cannot hold that.
        can_hold = torch.promote_types(sent_dtype, chunk.dtype) == sent_dtype
        rounded = chunk.dtype if can_hold else sent_dtype
        result = outgoing if rounded == sent_dtype else self.empty(part.numel(), rounded)
        segments, reduced = self._cut(outgoing), self._cut(result)
        received = [torch.empty_like(segment) for segment in segments]
        works = self._trade(2 * index, received, segments)
        yield
        self._wait_for_all(works)
        for ours, theirs, shards in zip(segments, received, reduced, strict=True):
            theirs[self._host] = ours[self._host]
            shards[self._host] = reduce_rows(theirs, "sum" if op == "mean" else op)
        # Every host gets the same.
        answers = [shards[self._host].expand(self._n_hosts, -1) for shards in reduced]
        works = self._trade(2 * index + 1, reduced, answers)
        yield
        self._wait_for_all(works)
        self._gather_in_host(chunk, whole, result)

    def _coded_steps_of_chunk(
        self, index: int, chunk: Tensor, op: str, wire: Wire, factor: float | None
    ) -> Iterator[None]:
        """Sends bytes that a wire makes of float32; else as _steps_of_chunk. `values` holds what
        the ranks of this host have, then what has come from the others, then the result.
        """
        whole = self._whole(chunk, BLOCK, factor)
        op = op if factor is None else "sum"
        values = self._reduce_in_host(whole, op).to(torch.float32)
        segments = self._cut(values)
        outgoing = [wire.rows_for(*rows.shape) for rows in segments]
        received = [wire.rows_for(*rows.shape) for rows in segments]
        others = [host for host in range(self._n_hosts) if host != self._host]
        for i, (rows, coded) in enumerate(zip(segments, outgoing, strict=True)):
            for host in others:
                wire.encode((index, i, host), rows[host], coded[host])
        works = self._trade(2 * index, received, outgoing)
        yield
        self._wait_for_all(works)
        for i, (rows, coded) in enumerate(zip(segments, received, strict=True)):
            result = wire.reduce(coded, rows, self._host, "sum" if op == "mean" else op)
            wire.encode((index, i, "result"), result, coded[self._host])
        answers = [coded[self._host].expand(self._n_hosts, -1) for coded in received]
        works = self._trade(2 * index + 1, received, answers)
        yield
        self._wait_for_all(works)
        for rows, coded in zip(segments, received, strict=True):
            for host in range(self._n_hosts):  # this one's, too: all have what all can decode
                wire.decode(coded[host], rows[host])
        self._gather_in_host(chunk, whole, values)

    def _cut(self, part: Tensor) -> list[Tensor]:
        """This rank's part of a chunk by segments, each with a row for every host."""
        unit = part.numel() // self._segments[-1].end
        return [
            part[one.begin * unit : one.end * unit].view(self._n_hosts, -1)
            for one in self._segments
        ]

    def _gather_in_host(self, chunk: Tensor, whole: Tensor, part: Tensor) -> None:
        """Joins the parts of the host's ranks. whole: memory for it, if of the chunk's dtype."""
        if self._shm.world_size == 1:
            if part is not chunk:
                cast(part[: chunk.numel()], chunk)
            return
        if part.dtype != chunk.dtype:
            part = cast(part, self.empty(part.numel(), chunk.dtype))
        if whole.dtype != chunk.dtype:
            is_padded = whole.numel() > chunk.numel()
            whole = self.empty(whole.numel(), chunk.dtype) if is_padded else chunk
        self._in_host("all_gather_single", whole, part)
        if whole is not chunk:
            chunk.copy_(whole[: chunk.numel()])

    def _whole(self, chunk: Tensor, block: int = 1, factor: float | None = None) -> Tensor:
        """The chunk itself, or a copy of it: padded, so that it can be cut into equal shards, and
        in float32 for halves, so that nothing is rounded inside the host. block: shards are
        multiples of it. factor: of this rank's tensor, where the ranks have weights.
        """
        padding = -chunk.numel() % (self._n_units * self._n_hosts * block)
        dtype = torch.float32 if chunk.dtype in HALVES else chunk.dtype
        whole = chunk
        if padding or dtype != chunk.dtype:
            whole = self.empty(chunk.numel() + padding, dtype)
            whole[: chunk.numel()] = chunk
            whole[chunk.numel() :] = 0
        return whole if factor is None else whole.mul_(factor)

    def _reduce_in_host(self, whole: Tensor, op: str) -> Tensor:
        """This rank's part. A mean is over all ranks: what is left to do is a sum."""
        part = whole
        if self._shm.world_size > 1:
            part = self.empty(whole.numel() // self._shm.world_size, whole.dtype)
            self._in_host("reduce_scatter_single", part, whole, "sum" if op == "mean" else op)
        if op == "mean":  # before the wire, whose range may be small
            part.mul_(1 / self._world_size)
        return part

    def _in_host(self, collective: str, *arguments: object) -> None:
        try:
            with self._shm_turn:
                getattr(self._shm, collective)(*arguments)
        except FastcommError as error:  # numbers the ranks of this host only
            lost = [self.neighbours[rank] for rank in getattr(error, "ranks", ())]
            raise PeerLostError(f"among the ranks of host {self._host}: {error}", lost) from error
        self.moved_at = running_s()

    # Across hosts. Every pair of ranks has one connection, and messages of one tag arrive in the
    # order they were sent.

    def _trade(self, tag: int, incoming: list[Tensor], outgoing: list[Tensor]) -> list[Any]:
        """Exchanges one row of every segment with its owner on each other host."""
        group, works = self.group, []
        for segment, theirs, mine in zip(self._segments, incoming, outgoing, strict=True):
            for host, owner in enumerate(segment.owners):
                if host != self._host:
                    works.append(group.recv([theirs[host]], owner, tag))
                    works.append(group.send([mine[host]], owner, tag))
        return works

    def _wait_for_all(self, works: list[Any]) -> None:
        for work in works:
            work.wait()
        self.moved_at = running_s()


class _OneHost:
    """A bootstrap for the ranks of one host, over the bootstrap of all ranks."""

    def __init__(self, bootstrap: Bootstrap, ranks: Sequence[int]) -> None:
        self._bootstrap, self._ranks = bootstrap, ranks

    def exchange(self, value: Any, form: messages.Form) -> list[Any]:
        values = self._bootstrap.exchange(value, form)
        return [values[rank] for rank in self._ranks]
