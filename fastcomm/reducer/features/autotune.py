"""Tuning: finds the size of a reducer's buckets in its first rounds, for bucket_cap_mb="auto".

The first rounds run with the default. Then every rank tells the others when its gradients are
ready, they measure together what an all-reduce costs, and each computes the same choice from the
same numbers, by the model of a step (fastcomm.insight). If the model promises enough, the buckets
are made anew; some rounds later the ranks compare what their steps have really taken, and go back
unless that is as much less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fastcomm.comm.objects import gather_objects, tellable
from fastcomm.insight.advice import WORTHWHILE, choose_cap, distinct_caps
from fastcomm.insight.collectives import MeasuredCosts
from fastcomm.insight.step_model import Gradient, LocalStep, Plan, predict
from fastcomm.insight.steps import Step
from fastcomm.insight.transport import measure_costs
from fastcomm.launching.cores import cores
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.replanning import Trace, all_or_none, hook_up_anew
from fastcomm.reducer.layout import kind_of, plan_buckets
from fastcomm.reducer.options import Options

if TYPE_CHECKING:
    from fastcomm.reducer.reducer import Reducer

WARM_UP_ROUNDS = 2  # with new buckets: memory is touched for the first time
MEASURED_ROUNDS = 5
_PATIENCE_ROUNDS = 20  # that a decision is put off at most, where no round ends between two steps
_LEAST_ROUNDS = 3  # that tell when gradients are ready; with fewer the default stays
# Of the step, on a GPU: the host does not see how long the device takes for the backward, which
# takes about twice what the forward does.
_BACKWARD_SHARE = 2 / 3


@tellable
class _Seen(NamedTuple):
    """What one rank tells the others. period_s: of its steps. step: of a step without
    communication, its gradients in the parameters' order; None if too little was seen. can_replan:
    no backward is under way, no step of an optimizer. overlap: an option that ranks need not share.
    """

    period_s: float
    step: LocalStep | None
    cores: int
    local_rank: int
    can_replan: bool
    overlap: bool


class Tuning:
    """The tuning of one reducer with bucket_cap_mb="auto", from its attach() on.

    options: with a size in place of "auto": the one that the next buckets are made with.
    is_over: nothing is left to be found.
    trace: of the rounds that tell when gradients are ready; ends with the buckets.
    """

    def __init__(self, options: Options, default_cap_mb: float) -> None:
        self.options, self._default_cap_mb = options, default_cap_mb
        self.trace = Trace()
        self.begin(0, 1)

    def begin(self, n_rounds: int, world_size: int) -> None:
        """A model is attached, when so many rounds have ended."""
        self.options = replace(self.options, bucket_cap_mb=self._default_cap_mb)
        self.is_over = world_size == 1
        self._began_at = n_rounds  # when the buckets of now were made
        self._ended_s = 0.0  # when the last round ended
        self._periods: list[float] = []
        self._default_s: float | None = None  # what a step takes with the default, once it was left

    def buckets_made(self, reducer: Reducer) -> None:
        """Begins to measure, also where it was somebody else who wanted other buckets."""
        self._began_at, self._periods = reducer.n_rounds, []

    def described(self) -> str:
        """For repr(): what was chosen."""
        so_far = "" if self.is_over else " so far"
        return f", bucket_cap_mb auto: {self.options.bucket_cap_mb:g}{so_far}"

    def after_round(self, reducer: Reducer, can_replan: bool) -> None:
        """A round has ended. Collective in the rounds that decide; all ranks end the same rounds,
        one by a backward, another without, as after skip_step(). can_replan: no backward is under
        way, and no step of an optimizer.
        """
        if self.is_over:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._stop(reducer)  # a graph will go on using the buckets there are
            return
        self._note_round(reducer)
        n_late = reducer.n_rounds - self._began_at - WARM_UP_ROUNDS - MEASURED_ROUNDS
        if n_late >= 0:
            with all_or_none(reducer, self._stop):
                self._decide(reducer, can_replan, is_last=n_late >= _PATIENCE_ROUNDS)
        self._ended_s = time.perf_counter()

    def _decide(self, reducer: Reducer, can_replan: bool, is_last: bool) -> None:
        """is_last: decides now, or stops."""
        seen = gather_objects(reducer.comm, self._seen(reducer, can_replan), "backward()")
        if all(one.can_replan for one in seen):
            decide = self._propose if self._default_s is None else self._judge
            decide(reducer, seen)
        elif is_last:
            self._stop(reducer)

    def _note_round(self, reducer: Reducer) -> None:
        now = time.perf_counter()
        n = reducer.n_rounds - self._began_at
        if n > WARM_UP_ROUNDS:
            self._periods.append(now - self._ended_s)
        elif n == WARM_UP_ROUNDS and self._default_s is None:
            self.trace.begin(reducer, MEASURED_ROUNDS)

    def _seen(self, reducer: Reducer, can_replan: bool) -> _Seen:
        period_s = statistics.median(self._periods) if self._periods else 0.0
        step = None
        if self._default_s is None and period_s:
            steps = self.trace.steps(reducer)
            if len(steps) >= _LEAST_ROUNDS:
                step = self._local_step(reducer, steps[-MEASURED_ROUNDS:], period_s)
        local_rank = reducer.comm.local_rank
        return _Seen(period_s, step, cores(), local_rank, can_replan, reducer.overlap)

    def _local_step(self, reducer: Reducer, steps: Sequence[Step], period_s: float) -> LocalStep:
        """What the steps would be without communication."""
        indices = [i for bucket in reducer.buckets for i in bucket.indices]
        ready = dict(zip(indices, _median_ready(steps), strict=True))
        backward_s = statistics.median(_own_ns(s, s.backward_end) for s in steps) / 1e9
        exposed_s = statistics.median(s.exposed_ns for s in steps) / 1e9
        rest_s = max(0.0, period_s - backward_s - exposed_s - _launching_s(steps))
        if reducer.comm.has_streams:  # the host's times: only their proportions are the device's
            stretch = _BACKWARD_SHARE * period_s / backward_s if backward_s else 0.0
            backward_s, rest_s = backward_s * stretch, (1 - _BACKWARD_SHARE) * period_s
            ready = {i: seconds * stretch for i, seconds in ready.items()}
        gradients = [
            Gradient(numel * self._wire_nbytes(itemsize), ready[i])
            for i, (numel, _, itemsize) in enumerate(_kinds(reducer.buckets))
        ]
        return LocalStep(tuple(gradients), backward_s, optimizer_s=rest_s)

    def _wire_nbytes(self, itemsize: int) -> int:
        wire = self.options.wire_dtype
        return itemsize if wire is None else wire.itemsize

    def _propose(self, reducer: Reducer, seen: Sequence[_Seen]) -> None:
        """Chooses by the model, and tries the choice if it is not the default."""
        steps = [one.step for one in seen if one.step is not None]
        if len(steps) < len(seen):
            self._stop(reducer)
            return
        planner = planner_of(_kinds(reducer.buckets), self.options, reducer.order)
        costs = measure_costs(reducer.comm)
        local_ranks = 1 + max(one.local_rank for one in seen)
        delays = not reducer.comm.has_streams and (
            not reducer.comm.progresses_itself or local_ranks >= min(one.cores for one in seen)
        )
        step, overlap = _median_step(steps), all(one.overlap for one in seen)
        default = self._default_cap_mb
        caps = distinct_caps(planner, default=default)
        choice = choose_cap(predict_caps(step, planner, costs, delays, overlap, caps), default)
        if choice.cap_mb == default:
            self._stop(reducer)
        else:
            self._replan(reducer, choice.cap_mb)
            self._default_s = max(one.period_s for one in seen)

    def _judge(self, reducer: Reducer, seen: Sequence[_Seen]) -> None:
        """Goes back to the default unless the steps take less than with it."""
        if self._default_s is not None and not pays([s.period_s for s in seen], self._default_s):
            self._replan(reducer, self._default_cap_mb)
        self._stop(reducer)

    def _replan(self, reducer: Reducer, cap_mb: float) -> None:
        self.options = replace(self.options, bucket_cap_mb=cap_mb)
        hook_up_anew(reducer)

    def _stop(self, reducer: Reducer) -> None:
        self.is_over = True
        self.trace.end(reducer)


def pays(periods_s: Sequence[float], default_s: float) -> bool:
    """Whether the slowest rank's steps take so much less than the slowest rank's did with the
    default that it is not noise.
    """
    return max(periods_s) < (1 - WORTHWHILE) * default_s


def _kinds(buckets: Sequence[Bucket]) -> list[tuple[int, torch.dtype, int]]:
    """The numel, dtype and itemsize of each parameter's gradient, by index."""
    kinds = {
        i: kind_of(view, view.dtype)
        for bucket in buckets
        for i, view in zip(bucket.indices, bucket.views, strict=True)
    }
    return [kinds[i] for i in range(len(kinds))]


def planner_of(
    kinds: Sequence[tuple[int, torch.dtype, int]],
    options: Options,
    order: Sequence[int] | None = None,
) -> Callable[[float], Plan]:
    """The buckets that a reducer would make with another size."""

    def plan(cap_mb: float) -> Plan:
        sized = replace(options, bucket_cap_mb=cap_mb)
        layouts = plan_buckets(
            kinds,
            cap_bytes=sized.cap_bytes,
            first_cap_bytes=sized.first_cap_bytes,
            order=order,
        )
        return [[slot.index for slot in layout.slots] for layout in layouts]

    return plan


def predict_caps(
    step: LocalStep,
    planner: Callable[[float], Plan],
    costs: MeasuredCosts,
    delays: bool,
    overlap: bool,
    caps: Iterable[float],
) -> dict[float, float]:
    """Seconds of a step by size, of these. delays, overlap: see step_model.predict."""
    return {
        cap: predict(step, planner(cap), costs, delays_compute=delays, overlap=overlap).seconds
        for cap in caps
    }


def _median_ready(steps: Sequence[Step]) -> list[float]:
    """Seconds after the backward's begin, less what was spent on launching until then."""
    columns = zip(*([_own_ns(s, ready) for ready in s.ready] for s in steps), strict=True)
    return [statistics.median(column) / 1e9 for column in columns]


def _own_ns(step: Step, until: int) -> int:
    """How long the backward has computed until then. A gradient that never came is ready at the
    end.
    """
    until = min(until or step.backward_end, step.backward_end)
    launching = sum(b.launched - b.launch for b in step.buckets if b.launched <= until)
    return max(0, until - step.backward_begin - launching)


def _launching_s(steps: Sequence[Step]) -> float:
    """What launching has taken from the backward."""
    early = (
        sum(b.launched - b.launch for b in s.buckets if b.launched <= s.backward_end) for s in steps
    )
    return statistics.median(early) / 1e9


def _median_step(steps: Sequence[LocalStep]) -> LocalStep:
    """The median over all ranks. Bytes are equal on all."""
    ready = zip(*([g.ready_s for g in step.gradients] for step in steps), strict=True)
    gradients = (
        Gradient(gradient.nbytes, statistics.median(seconds))
        for gradient, seconds in zip(steps[0].gradients, ready, strict=True)
    )
    return LocalStep(
        tuple(gradients),
        statistics.median(step.backward_s for step in steps),
        optimizer_s=statistics.median(step.optimizer_s for step in steps),
    )
