"""Plan: makes the buckets in which a model's gradients are reduced, and between two steps others
that are better.

Over a network that is the order in which gradients really arrive, which need not be the reverse of
their registration: a norm that is registered behind a large layer and used before it keeps the
first bucket open until that layer is through. So two rounds are traced, and the buckets follow if
all ranks have seen the same order twice.

With bucket_cap_mb="auto" it is the size, too. The ranks make some steps with each of a few sizes,
and keep the one with which the slowest rank's steps have taken least.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from fastcomm.comm.collective import bucket_label
from fastcomm.comm.objects import gather_objects, on_host, tellable
from fastcomm.comm.transport import Transport
from fastcomm.insight.recorder import Recorder
from fastcomm.insight.steps import Step, read_steps
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.defer_signals import all_or_none
from fastcomm.reducer.features.compatibility import Feature
from fastcomm.reducer.layout import BucketLayout, kind_of, plan_buckets
from fastcomm.reducer.options import AUTO, DEFAULT_CAP_MB, NETWORK_CAP_MB, Options
from fastcomm.reducer.validation import NamedParameters, grad_dtype

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

_MB = 1024 * 1024
TRACED_ROUNDS = 2
WARM_UP_ROUNDS = 2  # with buckets of another size: memory is touched for the first time
MEASURED_ROUNDS = 5
_PATIENCE_ROUNDS = 20  # that a decision is put off at most, where no round ends between two steps
CAPS_MB = (5.0, NETWORK_CAP_MB, DEFAULT_CAP_MB, 100.0)  # what "auto" tries
WORTHWHILE = 0.02  # of a step: what another size must save, since noise saves less
# What goes with buckets in another order: all else keeps something of each of them.
_GOES_WITH = {
    *(Feature.OTHER_OP, Feature.NOT_LINEAR, Feature.ROUNDING, Feature.SKIP_NONFINITE),
    *(Feature.AUDIT, Feature.AUTO, Feature.MEASURING, Feature.REBUILD),
}


@tellable
class _Seen(NamedTuple):
    """What one rank tells the others. order: the parameters' indices as their gradients have
    arrived; None where rounds differ, or somebody counts on the buckets. period_s: of its steps.
    can_replan: no backward is under way, no step of an optimizer.
    """

    order: tuple[int, ...] | None
    period_s: float
    can_replan: bool


class Planner:
    """Looks for better buckets of one reducer, from its attach() on.

    looks_for: what it looks for, if anything.
    cap_mb, order: the size of the next buckets, and the order in which they are filled, by the
        parameters' indices; None: the reverse of registration.
    """

    def __init__(self, options: Options, comm: Transport) -> None:
        self._follows_arrival = comm.crosses_network
        self._is_auto = options.bucket_cap_mb == AUTO
        asked = None if self._is_auto else options.bucket_cap_mb
        default_mb = NETWORK_CAP_MB if comm.crosses_network else DEFAULT_CAP_MB
        self._begins_with_mb = default_mb if asked is None else float(asked)
        self._recorder: Recorder | None = None
        self.begin(1)

    def begin(self, world_size: int) -> None:
        """A model is attached."""
        self.cap_mb = self._begins_with_mb
        self.order: tuple[int, ...] | None = None
        self._to_try: list[float] = []  # sizes; those of the first are measured now
        self.seconds: dict[float, float] = {}  # what a step takes, by size
        self.looks_for: Literal["order", "size"] | None = None
        if world_size > 1:
            self.looks_for = "order" if self._follows_arrival else "size"

    @property
    def is_measuring(self) -> bool:
        """Whether "auto" has not chosen yet."""
        return self._is_auto and self.looks_for is not None

    def described(self) -> str:
        """For repr()."""
        by_arrival = "" if self.order is None else ", by arrival"
        if not self._is_auto:
            return by_arrival
        so_far = " so far" if self.is_measuring else ""
        return f", bucket_cap_mb auto: {self.cap_mb:g}{so_far}{by_arrival}"

    def buckets_made(self, core: Core) -> None:
        """Begins to look at the rounds of the buckets there are now."""
        self._began_at = self._decided_at = core.n_rounds
        self._ended_s = 0.0  # when the last round ended
        self._periods: list[float] = []
        if self.looks_for == "order" and len(core.buckets) > 1:
            if core.recorder is None:
                sizes = [len(bucket.indices) for bucket in core.buckets]
                core.recorder = Recorder(TRACED_ROUNDS, sum(sizes), len(sizes))
                self._recorder = core.recorder
        elif self.looks_for is not None and not self._to_try:
            self._to_try = self._sizes() if self._is_auto else []
            self.looks_for = "size" if self._to_try else None

    def layouts(self, kinds: Sequence[tuple[int, torch.dtype, int]]) -> tuple[BucketLayout, ...]:
        """The next buckets. kinds: the numel, dtype and itemsize of each gradient."""
        self._kinds = kinds
        return self._layouts_of(self.cap_mb)

    def _layouts_of(self, cap_mb: float) -> tuple[BucketLayout, ...]:
        cap_bytes = int(cap_mb * _MB)
        # The first bucket is small, so that communication starts early.
        first_cap_bytes = min(cap_bytes, _MB)
        return plan_buckets(
            self._kinds, cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes, order=self.order
        )

    def _sizes(self) -> list[float]:
        """Those that give other buckets; and once more the default, with which the first steps are
        made: steps become quicker while a process warms up.
        """
        found: dict[tuple[BucketLayout, ...], float] = {}
        for cap_mb in (self.cap_mb, *CAPS_MB):
            found.setdefault(self._layouts_of(cap_mb), cap_mb)
        return [*found.values(), self.cap_mb] if len(found) > 1 else []

    def stop(self, core: Core) -> None:
        """The buckets stay as they are."""
        self.looks_for = None
        self.end_trace(core)

    def end_trace(self, core: Core) -> None:
        """The rounds that were traced are of no use any more."""
        if self._recorder is not None and core.recorder is self._recorder:
            core.recorder = None
        self._recorder = None

    # -- after a round -----------------------------------------------------------------------------

    def after_round(self, core: Core, can_replan: bool) -> None:
        """A round has ended, and this looks for something. Collective in the rounds that decide.
        All ranks end the same rounds, one by a backward, another without, as after skip_step().
        Inside a join() the ranks without data end none, and the others decide later. can_replan: no
        backward is under way, and no step of an optimizer.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.stop(core)  # a graph will go on using the buckets there are
            return
        if self._decided_at == core.n_rounds:
            return  # called again
        n = core.n_rounds - self._began_at
        is_size = self.looks_for == "size"
        if is_size:
            self._note_round(core, n)
        due = WARM_UP_ROUNDS + MEASURED_ROUNDS if is_size else TRACED_ROUNDS
        is_last = n >= due + _PATIENCE_ROUNDS
        if n >= due and core.comm.open_join:
            if is_last:
                self.end_trace(core)  # the decision will be to leave the buckets
        elif n >= due:
            with all_or_none(core.comm, lambda: self.stop(core)):
                self._decided_at = core.n_rounds
                self._decide(core, can_replan, is_last)
        self._ended_s = time.perf_counter()

    def _note_round(self, core: Core, n: int) -> None:
        if core.comm.has_streams:  # else the host is far ahead of the device
            on_host(core.comm, core.buckets[-1].flat[:1])
        if n > WARM_UP_ROUNDS:
            self._periods.append(time.perf_counter() - self._ended_s)

    def _decide(self, core: Core, can_replan: bool, is_last: bool) -> None:
        """is_last: decides now, or stops."""
        order = self._seen_order(core) if self.looks_for == "order" else None
        period_s = statistics.median(self._periods) if self._periods else math.inf
        own = _Seen(order, period_s, can_replan)
        seen = gather_objects(core.comm, own, "backward()")
        can_replan = all(one.can_replan for one in seen)
        if self.looks_for == "order":
            orders = {one.order for one in seen}
            if can_replan or is_last or None in orders:
                self._follow(core, orders if can_replan else {None})
        elif can_replan:
            self._try_next(core, max(one.period_s for one in seen))
        elif is_last:
            self.stop(core)

    def _seen_order(self, core: Core) -> tuple[int, ...] | None:
        """None where rounds differ, or where the buckets must stay."""
        if not core.features().keys() <= _GOES_WITH or core.recorder is None:
            return None
        steps = [step for step in read_steps(core.recorder) if step.kind == "reduced"]
        orders = {_order_of(step, core.buckets) for step in steps[-TRACED_ROUNDS:]}
        return orders.pop() if len(steps) >= TRACED_ROUNDS and len(orders) == 1 else None

    def _follow(self, core: Core, orders: set[tuple[int, ...] | None]) -> None:
        """orders: what the ranks have seen."""
        self.end_trace(core)
        self.looks_for = "size"
        order = orders.pop()
        if order is not None and not orders and order != tuple(sorted(order, reverse=True)):
            self.order = order
            core.remake_buckets()
        else:
            self.buckets_made(core)

    def _try_next(self, core: Core, seconds: float) -> None:
        """seconds: what the slowest rank's steps take with the buckets there are."""
        cap_mb = self._to_try.pop(0)
        self.seconds[cap_mb] = min(seconds, self.seconds.get(cap_mb, math.inf))
        if self._to_try:
            cap_mb = self._to_try[0]
        else:
            cap_mb = fastest(self.seconds, self._begins_with_mb)
            self.stop(core)
        if cap_mb != self.cap_mb:
            self.cap_mb = cap_mb
            core.remake_buckets()


def fastest(seconds: dict[float, float], default_mb: float) -> float:
    """The size with which a step takes least; the default unless another one saves more than noise.
    seconds: of a step, by size.
    """
    best = min(seconds, key=lambda cap_mb: (seconds[cap_mb], abs(cap_mb - default_mb)))
    return best if seconds[best] < (1 - WORTHWHILE) * seconds[default_mb] else default_mb


def _order_of(step: Step, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """What has never arrived comes last."""
    indices = [i for bucket in buckets for i in bucket.indices]
    arrived = zip(step.ready, indices, strict=True)
    return tuple(i for *_, i in sorted((not ready, ready, -i, i) for ready, i in arrived))


# ---- making them ---------------------------------------------------------------------------------


def make_buckets(core: Core, named: NamedParameters, sparse: set[str]) -> list[Bucket]:
    """Make the buckets for these parameters' gradients, in the order in which they will be full.
    The one of sparse gradients is the last but one, since the launch of the last one must not wait.

    sparse: names of parameters with sparse gradients.
    """
    comm = core.comm
    buckets = _dense_buckets(core, [pair for pair in named if pair[0] not in sparse])
    if sparse:
        from fastcomm.reducer.features.sparse_bucket import SparseBucket

        own = [pair for pair in named if pair[0] in sparse]
        label = bucket_label(core.number, len(buckets))
        one = SparseBucket(label, own, comm)
        comm.flight.names[label] = _in_words(one.names)
        buckets.insert(max(len(buckets) - 1, 0), one)
    for before, bucket in itertools.pairwise(buckets):
        bucket.first = before.first + len(before.names)
    return buckets


def _dense_buckets(core: Core, named: NamedParameters) -> list[Bucket]:
    comm, options, sharding = core.comm, core.options, core.sharding()
    layouts = core.planner.layouts([kind_of(p, grad_dtype(p)) for _, p in named])
    all_bounds = None if sharding is None else sharding.bounds(layouts, comm.world_size)
    buckets: list[Bucket] = []
    for i, layout in enumerate(layouts):
        label = bucket_label(core.number, i)
        bounds = None if all_bounds is None else all_bounds[i]
        needs_all = sharding is None or sharding.keeps_gradients
        bind = functools.partial(
            comm.bind_bucket,
            wire_dtype=options.wire_dtype,
            label=label,
            lane=i % options.streams,
            bounds=None if needs_all else bounds,
            error_feedback=options.error_feedback,
        )
        bucket = Bucket(
            comm,
            layout,
            named,
            bind,
            numel=layout.numel if bounds is None else bounds[-1],
            is_copied=options.wire_dtype not in (None, layout.dtype),
        )
        if options.skip_nonfinite:
            bucket.start_counting()
        if sharding is not None and bounds is not None:
            from fastcomm.reducer.features.shards import BucketShard

            bucket.shard = BucketShard(comm, sharding, bounds, bucket, label)
        comm.flight.names[label] = _in_words(bucket.names)
        buckets.append(bucket)
    return buckets


def _in_words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
