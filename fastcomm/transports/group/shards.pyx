# cython: language_level=3
"""What a rank sends before the others have come: its announcement of a collective, and the shards
that they reduce.

A tensor is reduced in two exchanges. Each rank sends every other one the shard that one reduces,
then its own reduced shard to all. The first begins as soon as the tensor is ready: the others
receive once they are there. In chunks, so that one is reduced while others travel.

Compiled, so that no signal handler runs between two statements: what a rank has sent half, the
others would wait for.
"""

import collections
import struct
import zlib

import torch

from fastcomm.comm.collective import CPU_DTYPES, OPS, WEIGHTED_OPS
from fastcomm.control.announcement import Call
from fastcomm.errors import FastcommError
from fastcomm.transports.group.call import GatheredCalls, cast, reduce_rows
from fastcomm.transports.group.wire import BLOCK

# Includes the sources themselves: the extensions may be built at the same time, and would write
# each other's object files.
cdef extern from "shm/reduce_16bit.c":
    pass

cdef extern from "shm/reduce.c":
    enum:
        SHM_MAX_INPUTS
    bint shm_reduce(int dtype, int op, size_t numel, const void *const *inputs, int n_inputs,
                    void *const *outputs, int n_outputs) nogil
    bint shm_reduce_weighted(int dtype, size_t numel, const void *const *inputs,
                             const double *factors, int n_inputs, void *const *outputs,
                             int n_outputs) nogil

CHUNK_NBYTES = 4 * 2**20  # of all ranks' shards
# largest payload that travels with the announcement: delays its packet hardly at all
PAYLOAD_NBYTES = 1024
# A frame: the packed call, how many calls wait behind it, whether this rank has begun to send its
# data, then what tells the calls behind from it (numel, label and step), or the payload.
_HEAD_NBYTES = 64
MOST_FUSED = PAYLOAD_NBYTES // 24  # calls behind, whose numbers lie where a payload would
_REST = struct.Struct("=II")  # of the head, behind the call


def tag_of(index, call):
    """The tag of what moves for a call; the next one is that of its results. At least 2**21.

    index: of the announcement, from 1. Calls whose shards differ in size, dtype or bucket have
    different tags, but for one pair in 2**20, so that nobody receives into a shard what was not
    meant for it.
    """
    return (1 + index % 511) << 21 | (zlib.crc32(repr(call.shard_key).encode()) & 0xFFFFF) << 1


class GroupPair:
    """Two groups of the same ranks, one for what goes to higher ranks, one for what goes to lower
    ones. A Gloo connection has one lock for both directions: who writes to it keeps its thread
    from reading, and that thread turns in circles meanwhile.
    """

    def __init__(self, rank, up, down):
        self._rank, self._up, self._down = rank, up, down

    def send(self, tensors, rank, tag):
        return (self._up if rank > self._rank else self._down).send(tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        return (self._up if rank < self._rank else self._down).recv(tensors, rank, tag)

    def broadcast(self, tensors, options):
        return self._up.broadcast(tensors, options)

    def close(self):
        """Drops the groups: transfers outlive them."""
        self._up = self._down = None


class _Announcement:
    """This rank's announcement of one call. gathering: Gloo's work, which puts those of all ranks
    into frames. begun: the transfer whose data was sent with it, or None. trouble: why that was not
    sent whole.
    """

    def __init__(self, index, gathering, frames, payload, begun):
        self.trouble = None
        self._index, self._begun = index, begun
        self._gathering, self._frames, self._payload = gathering, frames, payload

    def has_come(self):
        """Whether all ranks have announced theirs."""
        return self._gathering.is_completed()

    def wait(self):
        """Waits until all ranks have come. Equal calls have payloads of one size and dtype."""
        self._gathering.wait()
        if self.trouble is not None:
            raise self.trouble
        cdef const char *frames = <char *><size_t>self._frames.data_ptr()
        payload, (n_ranks, nbytes) = self._payload, self._frames.shape
        heads = [frames[r * nbytes:r * nbytes + _HEAD_NBYTES] for r in range(n_ranks)]
        calls = [_call_of(head[:-8], rank, n_ranks) for rank, head in enumerate(heads)]
        n_behind, have_begun = zip(*[_REST.unpack(head[-8:]) for head in heads])
        rest = [bool(has_begun) for has_begun in have_begun], self._index, self._begun
        if payload is not None:
            payloads = self._frames[:, _HEAD_NBYTES:_HEAD_NBYTES + payload.nbytes].contiguous()
            return GatheredCalls(calls, payloads.view(payload.dtype), 0, *rest)
        n = min(n_behind)
        if n == 0 or any([theirs != calls[0] for theirs in calls]):
            return GatheredCalls(calls, None, 0, *rest)
        following = self._frames[:, _HEAD_NBYTES:].view(torch.int64)[:, :3 * n].view(-1, n, 3)
        is_same = (following == following[0]).all(dim=2).all(dim=0)
        return GatheredCalls(calls, None, int(is_same.cumprod(0).sum()), *rest)


def _call_of(packed, rank, world_size):
    try:
        return Call.of(packed, world_size)
    except ValueError as error:
        raise FastcommError(f"rank {rank} has announced {error}") from None


class Announcer:
    """Announces this rank's calls to the others, and gathers theirs. Its length is the number of
    announcements that nobody has taken. group: over which the ranks announce, and nothing else
    travels.
    """

    def __init__(self, world_size):
        self.group = None
        self._world_size = world_size
        self._index = 0  # of the newest announcement
        self._untaken = collections.deque()  # oldest first

    def __len__(self):
        return len(self._untaken)

    def is_over(self):
        """Whether Gloo is done with all of them, one way or the other."""
        return all([one.has_come() for one in tuple(self._untaken)])

    def has_come(self):
        """Whether all ranks have announced the call with the index of the oldest one."""
        return self._untaken[0].has_come()

    def take(self):
        """Waits until all ranks have announced the call with the index of the oldest one. Returns
        their calls.
        """
        gathered = self._untaken[0].wait()
        self._untaken.popleft()
        return gathered

    def announce(self, work, behind=(), begun=None):
        """Tells the other ranks this one's call, and sends them its data if it is `begun`, a
        transfer that is prepared. Waits for nobody.

        behind: in place of a payload, calls that could be fused with this one. They differ from
            it in nothing but numel, label and step.
        """
        call, payload = work.call, work.payload
        head = call.packed() + _REST.pack(len(behind), begun is not None)
        for one in behind:
            head += struct.pack("=QQQ", one.numel, one.label, one.step)
        frame = torch.zeros(_HEAD_NBYTES + PAYLOAD_NBYTES, dtype=torch.uint8, device="cpu")
        frame[:len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if payload is not None:
            frame[_HEAD_NBYTES:_HEAD_NBYTES + payload.nbytes] = payload.view(-1).view(torch.uint8)
        frames = torch.empty(self._world_size, frame.numel(), dtype=torch.uint8, device="cpu")
        tag = tag_of(self._index + 1, call)
        gathering = self.group._allgather_base(frames.view(-1), frame)
        self._index += 1
        announcement = _Announcement(self._index, gathering, frames, payload, begun)
        self._untaken.append(announcement)
        work.is_announced = True
        if begun is not None:
            try:
                begun.begin(tag)
            except RuntimeError as trouble:  # a broken connection
                announcement.trouble = trouble
            except BaseException as error:
                announcement.trouble = RuntimeError(f"its data was not sent: {error!r}")
                raise


class Transfer:
    """How the data of a collective travels between ranks, again and again. This one can do nothing
    before all ranks have announced it. move: gets the op, the payloads or None and, where ranks do
    not count alike, the factors of their tensors.
    """

    def __init__(self, move):
        self._move = move

    def can_begin(self, op):
        """Whether prepare() and begin() may come before the ranks have announced it."""
        return False

    def prepare(self, op, factors=None):
        """Makes what begin() sends. May take long, and nothing else has to wait for it."""

    def begin(self, tag):
        """Sends what the other ranks need of this one. Waits for nobody."""

    def steps(self, op, payloads, factors):
        """Goes on after begin(), once all ranks have announced the same. Between two steps data is
        in flight, and other transfers may take steps of theirs.
        """
        self._move(op, payloads, factors)
        return iter(())

    def drain(self):
        """In place of steps(): waits for what begin() has begun, so that nothing is left behind."""


class CastTransfer(Transfer):
    """Reduces a copy in another dtype. rank: whose factor is applied before the copy, if the ranks
    have weights: the range of its dtype may be small.
    """

    def __init__(self, flat, wire, inner, rank):
        self._flat, self._wire, self._inner, self._rank = flat, wire, inner, rank

    def can_begin(self, op):
        return op not in WEIGHTED_OPS.values() and self._inner.can_begin(op)

    def prepare(self, op, factors=None):
        if op in WEIGHTED_OPS.values():
            torch.mul(self._flat, factors[self._rank], out=self._wire)
        else:
            self._wire.copy_(self._flat)

    def begin(self, tag):
        self._inner.begin(tag)

    def steps(self, op, payloads, factors):
        if op in WEIGHTED_OPS.values():
            op, factors = "sum", None
        yield from self._inner.steps(op, payloads, factors)
        cast(self._wire, self._flat)

    def drain(self):
        self._inner.drain()


class FusedTransfer(Transfer):
    """Reduces tensors by their copies, which lie one behind the other in `fused`."""

    def __init__(self, flats, fused, inner):
        self._flats, self.fused, self._inner = flats, fused, inner

    def begin(self, tag):
        self._inner.begin(tag)

    def steps(self, op, payloads, factors):
        yield from self._inner.steps(op, payloads, factors)
        parts = self.fused.split([flat.numel() for flat in self._flats])
        for flat, part in zip(self._flats, parts, strict=True):
            flat.copy_(part)


def chunks_of(flat, world_size):
    """Every rank's shard of each chunk of the tensor."""
    numel = max(world_size, CHUNK_NBYTES // flat.element_size())
    return [chunk.tensor_split(world_size) for chunk in flat.split(numel)]


class ShardTransfer(Transfer):
    """chunks: every rank's shard of each. group, wait: of the Exchange. Keeps memory for the other
    ranks' shards.
    """

    def __init__(self, rank, world_size, chunks, group, wait):
        self._rank, self._group, self._wait = rank, group, wait
        # Each begins with another peer, so that not all send to one.
        self._peers = [(rank + i) % world_size for i in range(1, world_size)]
        self._chunks = chunks
        with torch.inference_mode(False):  # buckets may be made under it
            self._rows = [
                [
                    shards[rank] if r == rank else torch.empty_like(shards[rank], device="cpu")
                    for r in range(world_size)
                ]
                for shards in self._chunks
            ]
        self._tag = 0
        self._receives = []  # by chunk
        self._sends = []

    def can_begin(self, op):
        return True

    def begin(self, tag):
        self.send(tag, self._peers)

    def send(self, tag, peers):
        """Begins the first exchange with these ranks."""
        recv, send = self._group.recv, self._group.send
        self._tag = tag
        self._receives = [[recv([rows[r]], r, tag) for r in peers] for rows in self._rows]
        self._sends = [send([shards[r]], r, tag) for shards in self._chunks for r in peers]

    def _reduce_chunk(self, index, op, factors):
        """Reduces what the ranks have sent of a chunk into this rank's shard."""
        _reduce_into(self._chunks[index][self._rank], self._rows[index], op, factors)

    def steps(self, op, payloads, factors):
        """The first step ends the first exchange, the second one the other."""
        recv, send, tag = self._group.recv, self._group.send, self._tag + 1
        # A shard comes back only when its rank has all that was sent there.
        results = [recv([shards[r]], r, tag) for shards in self._chunks for r in self._peers]
        for index, (shards, coming) in enumerate(zip(self._chunks, self._receives, strict=True)):
            for work in coming:
                self._wait(work)
            self._reduce_chunk(index, op, factors)
            self._sends += [send([shards[self._rank]], r, tag) for r in self._peers]
        self._receives = []
        yield
        for work in results:
            self._wait(work)
        self.drain()

    def drain(self):
        for works in self._receives:
            for work in works:
                self._wait(work)
        for work in self._sends:
            self._wait(work)
        self._receives, self._sends = [], []


def coded_spans(numel, world_size):
    """Cuts so many elements into chunks of a row for each rank, for a wire. Returns where each
    chunk begins, and how long its rows are: of whole blocks, so that the last ones are padded.
    """
    longest = max(1, CHUNK_NBYTES // 4 // world_size // BLOCK) * BLOCK
    return [
        (begin, min(longest, -(-(numel - begin) // (BLOCK * world_size)) * BLOCK))
        for begin in range(0, numel, longest * world_size)
    ]


class CodedTransfer(ShardTransfer):
    """Reduces the gradients of a bucket by the bytes that a wire makes of them. Each rank decodes
    the others' values of its shard, adds in float32, and encodes the result for all, itself
    included.

    gaps: the elements that are in no gradient, which stay 0: a NaN of their block's would spoil its
        scale in every later round.
    reduce_mask: reduces the used mask, which is behind the gradients and which no rounding may
        change. May block: all ranks call it in the order of announcements.
    begins_ahead: whether all that the mask needs comes with the announcement.
    """

    def __init__(self, rank, world_size, flat, numel, gaps, wire, group, wait, reduce_mask,
                 begins_ahead):
        """numel: of the gradients."""
        self._spans = coded_spans(flat.numel(), world_size)
        chunks = [list(wire.rows_for(world_size, n)) for _, n in self._spans]
        super().__init__(rank, world_size, chunks, group, wait)
        self._world_size, self._wire, self._gaps = world_size, wire, gaps
        self._gradients, self._reduce_mask = flat[:numel], reduce_mask
        # Else a round that is dropped would already have changed the residuals.
        self._begins_ahead = begins_ahead and not wire.feeds_back
        self._values = {}  # by chunk, in rows: the gradients themselves, or a copy

    def can_begin(self, op):
        return self._begins_ahead

    def prepare(self, op, factors=None):
        for index, shards in enumerate(self._chunks):
            piece, shape = self._gradients_of(index)
            if self._is_whole(piece, shape):
                values = piece.view(shape)
            else:
                values = torch.zeros(shape, dtype=torch.float32, device="cpu")
                values.view(-1)[:piece.numel()] = piece
            self._values[index] = values
            for r in self._peers:
                self._wire.encode((index, r), values[r], shards[r])

    def _reduce_chunk(self, index, op, factors):
        coded, values = self._rows[index], self._values[index]
        reduced = self._wire.reduce(coded, values, self._rank, op, factors)
        self._wire.encode((index, "result"), reduced, self._chunks[index][self._rank])

    def steps(self, op, payloads, factors):
        self._reduce_mask(op, payloads, factors)
        yield from ShardTransfer.steps(self, op, None, factors)
        for index, shards in enumerate(self._chunks):
            values = self._values.pop(index)
            for coded, row in zip(shards, values, strict=True):
                self._wire.decode(coded, row)
            piece, shape = self._gradients_of(index)
            if not self._is_whole(piece, shape):
                cast(values.view(-1)[:piece.numel()], piece)
        self._gradients.index_fill_(0, self._gaps, 0)

    def _gradients_of(self, index):
        """The gradients of a chunk, and the shape of its rows."""
        begin, n = self._spans[index]
        shape = self._world_size, n
        return self._gradients[begin:begin + self._world_size * n], shape

    def _is_whole(self, piece, shape):
        """Whether the gradients can be encoded and decoded where they lie."""
        return piece.dtype is torch.float32 and piece.numel() == shape[0] * shape[1]


def _reduce_into(own, rows, op, factors):
    """Reduces the rows, of which `own` is one, into it: in one pass, in rank order. 16-bit floats
    are added in float32 and rounded once. factors: of the rows, whose products are added then,
    whatever the op.
    """
    cdef const void *inputs[SHM_MAX_INPUTS]
    cdef double weights[SHM_MAX_INPUTS]
    cdef void *output = <void *><size_t>own.data_ptr()
    cdef int i, n = len(rows), dtype = CPU_DTYPES.index(own.dtype), code
    cdef size_t numel = own.numel()
    if n > SHM_MAX_INPUTS:
        own.copy_(reduce_rows(torch.stack(rows), op, factors))
        return
    for i in range(n):
        inputs[i] = <const void *><size_t>rows[i].data_ptr()
        weights[i] = 0.0 if factors is None else factors[i]
    if factors is None:
        code = OPS.index(op)
        with nogil:
            shm_reduce(dtype, code, numel, inputs, n, &output, 1)
    else:
        with nogil:
            shm_reduce_weighted(dtype, numel, inputs, weights, n, &output, 1)
