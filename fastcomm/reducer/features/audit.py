"""Audit: every so many rounds, whether parameters have the same bits on all ranks, and whether some
gradients have the same sum when every rank adds them for itself.

Ranks that have the same parameters and reduce the same gradients keep the same parameters. A rank
whose memory, processor or link has flipped a bit has others from then on, and so does one whose
script has changed a parameter by itself. Nothing else notices all of it: what each bucket carries
are a few elements (collective.steps_made), and over NCCL nothing. A sum that is wrong reaches all
ranks alike. So an excerpt of one bucket is added up again, another one in each audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastcomm.comm.collective import LINEAR_OPS
from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import Transport
from fastcomm.errors import MismatchError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.join import is_joining
from fastcomm.reducer.features.replanning import all_or_none
from fastcomm.transports.group.call import reduce_rows

if TYPE_CHECKING:
    from fastcomm.comm.transport import BucketWork
    from fastcomm.reducer.options import Options
    from fastcomm.reducer.reducer import Reducer
    from fastcomm.reducer.round import Round

EXCERPT_NBYTES = 2**22  # of all ranks together
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Audit(RoundExtension):
    """Compares the parameters of a reducer after every round whose number is a multiple of `every`,
    before anybody uses its gradients, and adds up an excerpt of a bucket again.
    """

    def __init__(self, comm: Transport, options: Options) -> None:
        assert options.audit is not None  # for the type checker
        self._comm, self._every = comm, options.audit
        is_plain = options.wire_dtype is None
        self._adds_again = is_plain and comm.adds_in_rank_order
        self._excerpt: Excerpt | None = None  # of the round that is audited
        self._compared = 0  # the round that was compared last
        self._trouble: str | None = None  # what it has found, until that is raised

    def before_launch(self, round: Round, number: int) -> None:
        """Choose the excerpt at the first launch: by then the round's op and weights are known."""
        if number or round.number % self._every or not self._adds_again:
            return
        self._excerpt = None
        if round.op in LINEAR_OPS and not is_joining(self._comm):
            turn = round.number // self._every
            self._excerpt = excerpt_of(round.buckets, turn, self._comm.world_size)

    def after_wait(self, round: Round, number: int, work: BucketWork) -> None:
        """Keep the sum before the optimizer, or what the bucket had before, takes its place."""
        if self._excerpt is not None and round.buckets[number] is self._excerpt.bucket:
            self._excerpt.take()

    def dropped(self) -> None:
        """Let go of the bucket."""
        self._excerpt = None

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
        excerpt, self._excerpt = self._excerpt, None
        # A vote, or an interruption, may have kept a rank from it.
        has_both = excerpt is not None and excerpt.given is not None
        own = torch.stack([checksum(parameter) for _, parameter in named])
        own = torch.cat([own, own.new_tensor([has_both])])
        ranks = self._tell(own)
        differing = (ranks[:, :-1] != ranks[0, :-1]).any(0).nonzero().flatten().tolist()
        if differing:
            names = [named[i][0] for i in differing]
            return _in_words(names, ranks[:, differing], reducer.n_rounds)
        if excerpt is not None and ranks[:, -1].all():
            found = excerpt.add_again(self._comm, reducer.op)
            return excerpt.in_words(self._tell(found), reducer.n_rounds)
        return None

    def _tell(self, own: Tensor) -> Tensor:
        """Returns every rank's numbers, a row each, on the host. Collective."""
        told = own.new_empty(self._comm.world_size * own.numel())
        self._comm.all_gather_single(told, own)
        return on_host(self._comm, told).view(-1, own.numel())


class Excerpt:
    """Consecutive elements of a bucket, in a round that is audited.

    given: what this rank has contributed to their reduction. reduced: what came of it. Both are
    None until take().
    """

    def __init__(self, bucket: Bucket, elements: slice) -> None:
        self.bucket, self._elements = bucket, elements
        self.given: Tensor | None = None
        self.reduced: Tensor | None = None
        bucket.audited = elements

    def take(self) -> None:
        """The bucket is reduced. A second call, after an interruption, finds it settled."""
        if self.reduced is None:
            self.reduced = self.bucket.flat[self._elements].clone()
            self.given = self.bucket.given

    def add_again(self, comm: Transport, op: str) -> Tensor:
        """Adds up what all ranks have contributed. Returns how many elements have other bits now,
        and the first of them, in the bucket. Collective.
        """
        given, reduced = self.given, self.reduced
        assert given is not None and reduced is not None  # for the type checker
        rows = given.new_empty(comm.world_size, given.numel())
        comm.all_gather_single(rows.view(-1), given)
        again = reduce_rows(rows, op)
        word = _WORDS[again.element_size()]
        is_nan = again.isnan() & reduced.isnan()
        wrong = ((again.view(word) != reduced.view(word)) & ~is_nan).nonzero().flatten()
        n = wrong.numel()
        return torch.tensor([n, self._elements.start + int(wrong[0]) if n else 0])

    def in_words(self, ranks: Tensor, number: int) -> str | None:
        """ranks: what add_again() has found, a row for each. None: nothing."""
        told = ranks.tolist()
        finders = [rank for rank, (n, _) in enumerate(told) if n]
        if not finders:
            return None
        n, element = told[finders[0]]
        who = "all ranks have" if len(finders) == len(told) else f"rank {finders[0]} has"
        if 1 < len(finders) < len(told):
            who = f"ranks {', '.join(map(str, finders))} have"
        more = f" (nor are {n - 1} more elements)" if n > 1 else ""
        return (
            f"audit in round {number}: the reduced gradient of parameter "
            f"{self.bucket.name_at(element)} is not the sum that {who} made once more{more}. A "
            "processor, memory or a link has erred, or the ranks round differently (other "
            "processors, threads or torch). All ranks drop this round's gradients. If it comes "
            "again, look for the host that errs, and load an earlier checkpoint"
        )


def excerpt_of(buckets: Sequence[Bucket], turn: int, world_size: int) -> Excerpt | None:
    """The one whose turn it is. None where every bucket is sparse or sharded."""
    found = []
    for bucket in buckets:
        if type(bucket) is Bucket and bucket.shard is None:
            n = max(1, EXCERPT_NBYTES // world_size // bucket.flat.element_size())
            begins = range(0, bucket.numel, n)
            found += [(bucket, slice(i, min(i + n, bucket.numel))) for i in begins]
    return Excerpt(*found[turn % len(found)]) if found else None


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
