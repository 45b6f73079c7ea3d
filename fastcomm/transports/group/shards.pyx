# cython: language_level=3
"""What a rank sends before the others have come: its announcement of a collective, and the shards
that they reduce. And what becomes of these.

Compiled, so that no signal handler runs between two statements: what a rank has sent half, the
others would wait for.
"""

import collections
import itertools
import struct
import zlib

import torch

from fastcomm.comm.collective import (
    CPU_DTYPES,
    OPS,
    WEIGHTED_OPS,
    addends_of_mean,
    as_pairs,
    mean_of_addends,
)
from fastcomm.control.announcement import Call
from fastcomm.errors import FastcommError
from fastcomm.transports.group.call import cast, reduce_rows
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

# Large enough that a chunk takes much longer on a fast network (10 Gbit/s: 3 ms) than the calls
# that move it, small enough that filling and draining a pipeline costs little.
CHUNK_NBYTES = 4 * 2**20
# How many chunks are sent before the first of them is waited for, where hosts have several ranks:
# the network has work while ranks are late.
AHEAD = 2
# largest payload that travels with the announcement: delays its packet hardly at all
PAYLOAD_NBYTES = 1024
# A frame: the packed call, how many calls wait behind it, whether this rank has begun to send its
# data, then what tells the calls behind from it (numel, label and fingerprint), or the payload.
_REST = struct.Struct("=II")  # of the head, behind the call
_HEAD_NBYTES = len(Call("barrier").packed()) + _REST.size
MOST_FUSED = PAYLOAD_NBYTES // 24  # calls behind, whose numbers lie where a payload would


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


class Announcement:
    """This rank's announcement of one call and, after wait(), those of all ranks.

    index: of the announcement, from 1.
    begun: this rank's transfer, if it has begun to send its data, else None. trouble: why that was
        not sent whole.
    gathering: Gloo's work, which puts the announcements into frames.
    calls: by rank.
    payloads: a row for each rank, or None.
    n_fused: of the calls behind, from the first on, all ranks have so many: they are fused.
    have_begun: by rank, whether it has begun to send its data.
    """

    def __init__(self, index, gathering, frames, payload, begun):
        self.index, self.begun, self.trouble = index, begun, None
        self.payloads, self.n_fused = None, 0
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
        n_ranks, nbytes = self._frames.shape
        heads = [frames[r * nbytes:r * nbytes + _HEAD_NBYTES] for r in range(n_ranks)]
        self.calls = [_call_of(head[:-_REST.size], r, n_ranks) for r, head in enumerate(heads)]
        n_behind, self.have_begun = zip(*[_REST.unpack(head[-_REST.size:]) for head in heads])
        rest, payload, n = self._frames[:, _HEAD_NBYTES:], self._payload, min(n_behind)
        if payload is not None:
            self.payloads = rest[:, :payload.nbytes].contiguous().view(payload.dtype)
        elif n > 0 and all([theirs == self.calls[0] for theirs in self.calls]):
            following = rest.view(torch.int64)[:, :3 * n].view(-1, n, 3)
            is_same = (following == following[0]).all(dim=2).all(dim=0)
            self.n_fused = int(is_same.cumprod(0).sum())


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
        that announcement.
        """
        self._untaken[0].wait()
        return self._untaken.popleft()

    def announce(self, work, behind=()):
        """Tells the other ranks this one's call, and sends them its data if that is prepared and
        nothing is behind it. Waits for nobody.

        behind: in place of a payload, calls that could be fused with this one. They differ from
            it in nothing but numel, label and fingerprint.
        """
        call, payload = work.call, work.payload
        begun = work.transfer if work.is_prepared and not behind else None
        head = call.packed() + _REST.pack(len(behind), begun is not None)
        for one in behind:
            head += struct.pack("=QQQ", one.numel, one.label, one.fingerprint)
        frame = torch.zeros(_HEAD_NBYTES + PAYLOAD_NBYTES, dtype=torch.uint8, device="cpu")
        frame[:len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if payload is not None:
            frame[_HEAD_NBYTES:_HEAD_NBYTES + payload.nbytes] = payload.view(-1).view(torch.uint8)
        frames = torch.empty(self._world_size, frame.numel(), dtype=torch.uint8, device="cpu")
        tag = tag_of(self._index + 1, call)
        gathering = self.group._allgather_base(frames.view(-1), frame)
        self._index += 1
        announcement = Announcement(self._index, gathering, frames, payload, begun)
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

    payload: what travels with the announcement if it is small, or None.
    fusable: the tensor that it reduces, if others can be reduced with it; else None.
    """

    payload = fusable = None

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

    def run(self, tag, op, payloads, factors):
        """All of it, in one step."""
        self.prepare(op, factors)
        self.begin(tag)
        for _ in self.steps(op, payloads, factors):
            pass


class FusedTransfer(Transfer):
    """Reduces tensors by their copies, which lie one behind the other in `fused`."""

    def __init__(self, flats, fused, inner):
        self._flats, self.payload, self._inner = flats, fused, inner

    def begin(self, tag):
        self._inner.begin(tag)

    def steps(self, op, payloads, factors):
        yield from self._inner.steps(op, payloads, factors)
        parts = self.payload.split([flat.numel() for flat in self._flats])
        for flat, part in zip(self._flats, parts, strict=True):
            flat.copy_(part)


class TwoExchanges(Transfer):
    """Reduces a tensor between hosts, in chunks, so that one is reduced while others travel.

    Where each host has one rank, begin() sends all chunks: the others receive once they are there.
    Their memory is kept for the next time.

    Where ranks of a host reduce first, they wait for each other. So all of them must come to the
    same transfer next: nothing begins before all ranks have announced it, and it has one step, as
    the thread chooses the next step by what has come here. The memory is of a few chunks.

    dtype: in which the tensor travels.
    """

    def __init__(self, exchange, flat, dtype, numel=None):
        """numel: by which it is cut into chunks, if it is not all that its call announces."""
        self._exchange, self._flat, self._dtype = exchange, flat, dtype
        self._numel = flat.numel() if numel is None else numel
        self._tag = 0
        self._chunks = [] if exchange.in_hosts else list(self._all_chunks())

    def _all_chunks(self):
        """Others, too, know from the announcement how the tensor is cut."""
        quantum = self._quantum()
        longest = max(1, CHUNK_NBYTES // self._dtype.itemsize // quantum) * quantum
        for begin in range(0, self._numel, longest):
            numel = min(longest, -(-(self._numel - begin) // quantum) * quantum)
            yield self._chunk_of(begin, numel)

    def _quantum(self):
        """Chunks are padded to a multiple of it."""
        return self._exchange.layout.n_units

    def _chunk_of(self, begin, numel):
        return Chunk(self._exchange, self._flat[begin:begin + numel], numel, self._dtype)

    def _scales(self, op):
        """Whether each rank multiplies by its factor before it sends, as the range of another dtype
        may be small. Else those who add do so.
        """
        return self._dtype != self._flat.dtype and op in WEIGHTED_OPS.values()

    def can_begin(self, op):
        return not self._exchange.in_hosts and not self._scales(op)

    def prepare(self, op, factors=None):
        factor = factors[self._exchange.rank] if self._scales(op) else None
        for chunk in self._chunks:
            chunk.prepare("sum", factor)

    def begin(self, tag, to=None):
        """to: the only host to exchange with."""
        self._tag = tag
        for chunk in self._chunks:
            chunk.send(tag, to)

    def steps(self, op, payloads, factors):
        """The first step ends the first exchange, the second one the other."""
        if payloads is not None:
            self._exchange.all_reduce(self._flat, op, payloads, factors)
        elif self._exchange.in_hosts:
            self._reduce_in_hosts(op, factors)
        else:
            if self._scales(op):
                op, factors = "sum", None
            for chunk in self._chunks:
                chunk.reduce(self._tag + 1, op, factors)
            yield
            for chunk in self._chunks:
                chunk.finish()

    def drain(self):
        for chunk in self._chunks:
            chunk.drain()

    def _reduce_in_hosts(self, op, factors):
        """Each rank multiplies by its factor before anything is added."""
        exchange, flat = self._exchange, self._flat
        factor = None if factors is None else factors[exchange.rank]
        op = op if factor is None else "sum"
        if exchange.layout.n_hosts == 1:
            for piece in flat.split(CHUNK_NBYTES // flat.element_size()):
                self._reduce_in_one_host(piece, op, factor)
        elif op == "mean" and not flat.dtype.is_floating_point:  # of sums that do not wrap around
            sums = addends_of_mean(flat, exchange.world_size)
            TwoExchanges(exchange, sums.view(-1), sums.dtype).run(self._tag, "sum", None, None)
            flat.copy_(mean_of_addends(sums, exchange.world_size))
        else:
            self._run_pipeline(op, factor)

    def _reduce_in_one_host(self, piece, op, factor):
        exchange, whole = self._exchange, piece
        if factor is not None:
            wide = exchange.sent_dtype_of(piece.dtype, None)
            whole = exchange.empty(piece.numel(), wide).copy_(piece).mul_(factor)
        exchange.in_host("all_reduce", whole, op)
        if whole is not piece:
            cast(whole, piece)

    def _run_pipeline(self, op, factor):
        """Takes chunks through both exchanges, several at a time: the newest first, so that the
        network has something to carry while older ones are reduced.
        """
        in_flight = collections.deque([None] * (2 * AHEAD), maxlen=2 * AHEAD + 1)
        for newest in itertools.chain(self._all_chunks(), [None] * (2 * AHEAD)):
            in_flight.append(newest)  # drops the oldest, which is done
            if newest is not None:
                newest.prepare(op, factor)
                newest.send(self._tag)
            if in_flight[AHEAD] is not None:
                in_flight[AHEAD].reduce(self._tag + 1, "sum" if op == "mean" else op, None)
            if in_flight[0] is not None:
                in_flight[0].finish()


class Chunk:
    """Reduces a piece of a tensor between hosts in two exchanges: a rank sends every other host the
    shard that is reduced there, then its own reduced shard to all. Where hosts have several ranks,
    a reduce-scatter in the host comes before these, and an all-gather behind them.

    Of these several may be the same memory:
        piece, then whole: padded so that the host's ranks have equal parts; in the host in float32
            for halves, so that nothing is rounded there.
        part: this rank's of the whole.
        sent, in the dtype in which it travels, then result.
    """

    def __init__(self, exchange, piece, numel, dtype):
        """numel: with the padding."""
        self._exchange, self._layout, self._piece = exchange, exchange.layout, piece
        self._group, self._own = exchange.group, exchange.layout.place
        self._receives, self._results, self._sends = [], [], []
        self._whole, wide = piece, exchange.sent_dtype_of(piece.dtype, None)
        n_local = len(self._layout.neighbours)
        with torch.inference_mode(False):  # buckets may be made under it
            if numel > piece.numel() or wide != piece.dtype:
                self._whole = exchange.empty(numel, wide)
            self._part = self._whole
            if n_local > 1:
                self._part = exchange.empty(numel // n_local, wide)
            self._sent = self._part
            # By what a mean over all ranks is divided; first, where what travels has another range.
            self._divisor, self._divides_first = 1, dtype != wide
            if dtype != wide:
                self._sent = torch.empty_like(self._part, dtype=dtype)
            self._lay_out()

    def _lay_out(self):
        """Makes lists by segment and host: `shards`, to be sent; `received`, which others have of
        this rank's shard; `reduced`, of the result.
        """
        self._shards = self._shards_of(self._sent)
        self._result, self._reduced = self._sent, self._shards
        # One rank rounds to the piece's dtype for all, unless what travels cannot hold that.
        rounded = self._piece.dtype
        if rounded != self._sent.dtype == torch.promote_types(rounded, self._sent.dtype):
            self._result = self._exchange.empty(self._sent.numel(), rounded)
            self._reduced = self._shards_of(self._result)
        self._received = []
        for shards in self._shards:
            own = shards[self._own]
            self._received.append([own if one is own else torch.empty_like(own) for one in shards])

    def _shards_of(self, part):
        return [one.tensor_split(self._layout.n_hosts) for one in self._layout.cut(part)]

    def prepare(self, op, factor):
        """op: in the host. factor: of this rank's piece, or None."""
        n = self._piece.numel()
        if self._whole is not self._piece:
            self._whole[:n] = self._piece
            self._whole[n:] = 0
        if factor is not None:
            self._whole.mul_(factor)
        if self._part is not self._whole:
            in_host = "sum" if op == "mean" else op
            self._exchange.in_host("reduce_scatter_single", self._part, self._whole, in_host)
        self._divisor = self._exchange.world_size if op == "mean" else 1
        if self._divisor > 1 and self._divides_first:
            self._part.mul_(1 / self._divisor)
        if self._sent is not self._part:
            self._sent.copy_(self._part)

    def send(self, tag, to=None):
        """Begins the first exchange. to: the only host to exchange with."""
        peers = [peer for peer in self._layout.peers if to is None or peer[1] == to]
        self._receives = [self._group.recv([self._received[i][h]], r, tag) for i, h, r in peers]
        self._sends = [self._group.send([self._shards[i][h]], r, tag) for i, h, r in peers]

    def reduce(self, tag, op, factors):
        """Ends the first exchange, and begins the second one."""
        own, peers = self._own, self._layout.peers
        # A shard comes back only when its rank has all that was sent there.
        self._results = [self._group.recv([self._reduced[i][h]], r, tag) for i, h, r in peers]
        self._wait_for_all(self._receives)
        for i in range(len(self._shards)):
            self._reduce_shard(i, op, factors)
        self._sends += [self._group.send([self._reduced[i][own]], r, tag) for i, _, r in peers]

    def _reduce_shard(self, i, op, factors):
        """Reduces what the hosts have of this rank's shard of a segment."""
        shard = self._shards[i][self._own]
        _reduce_into(shard, self._received[i], op, factors)
        if self._divisor > 1 and not self._divides_first:
            shard.div_(self._divisor)
        if self._result is not self._sent:
            cast(shard, self._reduced[i][self._own])

    def finish(self):
        self._wait_for_all(self._results)
        self.drain()
        self._read_result()
        result, piece, empty = self._result, self._piece, self._exchange.empty
        if self._part is not self._whole:  # join the results of the host's ranks
            if result.dtype != piece.dtype:
                result = cast(result, empty(result.numel(), piece.dtype))
            is_padded = self._whole.numel() > piece.numel()
            whole = empty(self._whole.numel(), piece.dtype) if is_padded else piece
            self._exchange.in_host("all_gather_single", whole, result)
            result = whole
        if result is not piece:
            cast(result[:piece.numel()], piece)

    def _read_result(self):
        """Makes `result` of what has come."""

    def drain(self):
        self._wait_for_all(self._receives)
        self._wait_for_all(self._sends)

    def _wait_for_all(self, works):
        for work in works:
            self._exchange.wait(work)
        works.clear()


class CodedExchanges(TwoExchanges):
    """Reduces the gradients of a bucket by the bytes that a wire makes of them: see CodedChunk.

    The used mask is behind the gradients, and no rounding may change it: it travels apart. The
    payloads are of that. views, offsets: see bind_bucket. What lies between them stays 0: a NaN of
    their block's would spoil its scale in every later round.
    """

    def __init__(self, exchange, flat, views, offsets, wire):
        n = flat.numel() - len(views)
        mask = self.payload = flat[n:]
        self._wire, self._gaps = wire, _gaps_of(n, views, offsets)
        self._mask = exchange.transfer_of(mask, None)
        # Else a round that is dropped would already have changed the residuals, and the mask would
        # come behind the gradients.
        self._begins_ahead = not wire.feeds_back and mask.nbytes <= PAYLOAD_NBYTES
        # Others, who may have to drain it, do not know how long the mask is.
        numel = n if exchange.in_hosts else flat.numel()
        TwoExchanges.__init__(self, exchange, flat[:n], torch.float32, numel)

    def _quantum(self):
        return self._exchange.layout.n_units * self._exchange.layout.n_hosts * BLOCK

    def _chunk_of(self, begin, numel):
        piece = self._flat[begin:begin + numel]
        return CodedChunk(self._exchange, piece, numel, self._wire, begin)

    def _scales(self, op):
        return False

    def can_begin(self, op):
        return self._begins_ahead and TwoExchanges.can_begin(self, op)

    def steps(self, op, payloads, factors):
        self._mask.run(self._tag, op, payloads, factors)
        yield from TwoExchanges.steps(self, op, None, factors)
        self._flat.index_fill_(0, self._gaps, 0)


class CodedChunk(Chunk):
    """What travels are bytes, which a wire makes of float32. Each rank decodes the others' versions
    of its shard, adds in float32, and encodes the result for all, itself included. In a host
    nothing is encoded. begin: where the piece begins in its bucket.
    """

    def __init__(self, exchange, piece, numel, wire, begin):
        self._wire, self._begin = wire, begin
        Chunk.__init__(self, exchange, piece, numel, torch.float32)

    def _lay_out(self):
        self._result = self._sent
        self._values = [one.view(self._layout.n_hosts, -1) for one in self._layout.cut(self._sent)]
        self._shards = [list(self._wire.rows_for(*rows.shape)) for rows in self._values]
        self._received = [list(self._wire.rows_for(*rows.shape)) for rows in self._values]
        self._reduced = self._shards

    def prepare(self, op, factor):
        Chunk.prepare(self, op, factor)
        for i, host, _ in self._layout.peers:
            key = self._begin, i, host
            self._wire.encode(key, self._values[i][host], self._shards[i][host])

    def _reduce_shard(self, i, op, factors):
        reduced = self._wire.reduce(self._received[i], self._values[i], self._own, op, factors)
        self._wire.encode((self._begin, i, "result"), reduced, self._shards[i][self._own])

    def _read_result(self):
        for shards, rows in zip(self._shards, self._values, strict=True):
            for coded, row in zip(shards, rows, strict=True):
                self._wire.decode(coded, row)


def _gaps_of(numel, views, offsets):
    """The elements of a flat buffer that are in no view."""
    with torch.inference_mode(False):  # buckets may be made under it
        is_gap = torch.ones(numel, dtype=torch.bool, device="cpu")
        for view, offset in zip(map(as_pairs, views), offsets, strict=True):
            is_gap.as_strided(view.size(), view.stride(), offset).fill_(False)
        return is_gap.nonzero().view(-1)


def _reduce_into(own, rows, op, factors):
    """Reduces the rows, of which `own` is one, into it: in one pass, by the tree. 16-bit floats
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
