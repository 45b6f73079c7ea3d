"""Audit: every so many rounds, whether parameters have the same bits on all ranks, and whether some
gradients have the same sum when other ranks add them.

Ranks that have the same parameters and reduce the same gradients keep the same parameters. A rank
whose memory, processor or link has flipped a bit has others from then on, and so does one whose
script has changed a parameter by itself. Nothing else notices all of it: what each bucket carries
are a few elements (collective.steps_made), and over NCCL nothing. A sum that is wrong reaches all
ranks alike, so a piece of one bucket is reduced twice, another one in each audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.join import is_joining
from fastcomm.reducer.features.replanning import all_or_none

if TYPE_CHECKING:
    from fastcomm.comm.transport import BucketWork
    from fastcomm.reducer.options import Options
    from fastcomm.reducer.reducer import Reducer
    from fastcomm.reducer.round import Round

PIECE_NBYTES = 2**20  # of a bucket, that is reduced twice
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Audit(RoundExtension):
    """Compares the parameters of a reducer after every round whose number is a multiple of `every`,
    before anybody uses its gradients, and reduces a piece of a bucket again.
    """

    def __init__(self, comm: Transport, options: Options) -> None:
        assert options.audit is not None  # for the type checker
        self._comm, self._every = comm, options.audit
        is_plain = options.wire_dtype is None and not options.hooks
        self._reduces_twice = is_plain and comm.adds_in_one_order
        self._piece: Piece | None = None  # of the newest round that is audited
        self._compared = 0  # the round that was compared last
        self._trouble: str | None = None  # what it has found, until that is raised

    def before_launch(self, round: Round, number: int) -> None:
        """Choose what is reduced twice. Not before the first launch, when all know the weights."""
        if number == 0:
            self._piece = None
            if self._reduces_twice and round.weight is None and not round.number % self._every:
                self._piece = piece_of(round.buckets, round.number // self._every)

    def after_wait(self, round: Round, number: int, work: BucketWork) -> None:
        """Keep the sum before the optimizer, or what the bucket had before, takes its place."""
        piece = self._piece
        if piece is not None and round.buckets[number] is piece.bucket:
            piece.reduced = piece.bucket.flat[piece.elements].clone()

    def after_round(self, round: Round) -> None:
        """A round that was voted down has reduced nothing."""
        if self._piece is not None and round.was_voted_down:
            self._piece.reduced = None

    def compare(self, reducer: Reducer) -> None:
        """A round has ended. Collective if it is one of those. Where something differs, drops its
        gradients on every rank.
        """
        if self._comm.has_streams:
            self._comm.refuse_capture("audit")
        is_done = self._compared == reducer.n_rounds
        if is_done or reducer.n_rounds % self._every or is_joining(self._comm):
            return
        with all_or_none(reducer, lambda _: None):
            self._trouble = self._compare(reducer)
            self._compared = reducer.n_rounds
            if self._trouble is not None:  # here, as a signal may raise where the block ends
                reducer.drop_step()

    def raise_trouble(self) -> None:
        """Raises MismatchError for what the comparison has found, once: after all that the ranks do
        together.
        """
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise MismatchError(trouble)

    def _compare(self, reducer: Reducer) -> str | None:
        """What is wrong, in words, the same on all ranks."""
        named = [pair for bucket in reducer.buckets for pair in bucket.named_parameters()]
        piece, self._piece = self._piece, None
        # an interruption may have kept a rank from it
        has_both = piece is not None and piece.reduced is not None
        own = torch.stack([checksum(parameter) for _, parameter in named])
        own = torch.cat([own, own.new_tensor([has_both])])
        ranks = self._tell(own)
        differing = (ranks[:, :-1] != ranks[0, :-1]).any(0).nonzero().flatten().tolist()
        if differing:
            names = [named[i][0] for i in differing]
            return _in_words(names, ranks[:, differing], reducer.n_rounds)
        if piece is not None and ranks[:, -1].all():
            found = piece.reduce_again(self._comm, reducer.op)
            return piece.in_words(self._tell(found), reducer.n_rounds)
        return None

    def _tell(self, own: Tensor) -> Tensor:
        """What all ranks say, a row each, on the host."""
        told = own.new_empty(self._comm.world_size * own.numel())
        self._comm.all_gather_single(told, own)
        return on_host(self._comm, told).view(-1, own.numel())


class Piece:
    """Consecutive elements of a bucket, which the ranks reduce once more.

    turn: how many ranks further each part lies then, so that others add it.
    reduced: the sum that the round has come to, once it is there.
    """

    def __init__(self, bucket: Bucket, elements: slice, turn: int) -> None:
        self.bucket, self.elements, self._turn = bucket, elements, turn
        self.reduced: Tensor | None = None
        bucket.copied, bucket.copy = elements, None

    def reduce_again(self, comm: Transport, op: str) -> Tensor:
        """How many elements have other bits on this rank now, and the first of them, in the bucket.
        Collective.
        """
        reduced, before, self.bucket.copy = self.reduced, self.bucket.copy, None
        assert reduced is not None and before is not None  # for the type checker
        by = self._turn % comm.world_size * before.numel() // comm.world_size
        again = before.roll(by)
        comm.all_reduce(again, op)
        again = again.roll(-by)
        word = _WORDS[again.element_size()]
        is_nan = again.isnan() & reduced.isnan()
        wrong = ((again.view(word) != reduced.view(word)) & ~is_nan).nonzero().flatten()
        n = wrong.numel()
        return torch.tensor([n, self.elements.start + int(wrong[0]) if n else 0])

    def in_words(self, ranks: Tensor, number: int) -> str | None:
        """ranks: what reduce_again() has found, a row for each. None: nothing."""
        told = ranks.tolist()
        finders = [rank for rank, (n, _) in enumerate(told) if n]
        if not finders:
            return None
        n, element = told[finders[0]]
        where = "all ranks" if len(finders) == len(told) else f"rank {finders[0]}"
        return (
            f"audit in round {number}: the reduced gradient of parameter "
            f"{self.bucket.name_at(element)} had other bits on {where} when it was reduced once "
            f"more, in {n} elements. A processor, memory or a link has erred, the first time or "
            "the second, or the ranks round differently (other processors, threads or torch). All "
            "ranks drop this round's gradients. If it comes again, look for the host that errs, "
            "and load an earlier checkpoint"
        )


def piece_of(buckets: Sequence[Bucket], turn: int) -> Piece | None:
    """The one whose turn it is. None where all buckets are sharded or sparse: no rank has a whole
    sum of those.
    """
    whole = [one for one in buckets if type(one) is Bucket and one.shard is None]
    pieces = [
        (bucket, slice(begin, min(begin + n, bucket.numel)))
        for bucket in whole
        for n in [PIECE_NBYTES // bucket.flat.element_size()]
        for begin in range(0, bucket.numel, n)
    ]
    return Piece(*pieces[turn % len(pieces)], turn) if pieces else None


def checksum(tensor: Tensor) -> Tensor:
    """The wrapping sum of a tensor's words, of its elements' size: any single flipped bit changes
    it. One pass over memory.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().contiguous().view(_WORDS[real.element_size()]).sum(dtype=torch.int64)


def _in_words(names: Sequence[str], ranks: Tensor, number: int) -> str:
    """names: of what differs. ranks: its checksums, one row a rank."""
    rows = [tuple(row) for row in ranks.tolist()]
    ((most, n_most),) = Counter(rows).most_common(1)
    others = [rank for rank, row in enumerate(rows) if row != most]
    who = (
        f"and {n_most} of {len(rows)} ranks agree, all but {', '.join(map(str, others))}"
        if n_most > len(rows) / 2
        else "and no majority of ranks agrees"
    )
    more = f" (nor are {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"audit in round {number}: parameter {names[0]} is not the same on all ranks{more}, {who}. "
        "A bit flipped (in memory, on a processor or on a link), the script changed it on some "
        "ranks only, or the ranks round differently (other processors, threads or torch). All "
        "ranks drop this round's gradients. Load an earlier checkpoint, or call refresh() on every "
        "rank if rank 0's values are right"
    )
