"""Ordering: plans the buckets anew in the order in which gradients really arrive.

Buckets are first planned from the registration of parameters, which a backward need not follow: a
norm that is registered behind a large layer and used before it keeps the first bucket open until
that layer is through. Over a network that decides how much of the reduction hides behind the
backward. So the order is traced in two rounds, the ranks compare what they have seen, and where
all have seen the same twice, the buckets are made once more. Not where graphs differ from round to
round or from rank to rank, nor where somebody counts on the buckets there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastcomm.comm.objects import gather_objects, tellable
from fastcomm.insight.steps import Step
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.compatibility import Feature
from fastcomm.reducer.features.join import is_joining
from fastcomm.reducer.features.replanning import Trace, all_or_none, hook_up_anew

if TYPE_CHECKING:
    from fastcomm.reducer.reducer import Reducer

TRACED_ROUNDS = 2
_PATIENCE_ROUNDS = 20  # that a decision is put off at most
# What goes with buckets that are made anew: all else keeps something of each of them.
_GOES_WITH = {
    *(Feature.OTHER_OP, Feature.NOT_LINEAR, Feature.SKIP_NONFINITE, Feature.AUDIT),
    *(Feature.EIGHT_BITS, Feature.AUTO, Feature.MEASURING),
}


@tellable
class _Seen(NamedTuple):
    """What one rank tells the others. order: the parameters' indices as their gradients have
    arrived; None where rounds differ, or somebody counts on the buckets. can_replan: see
    Tuning.after_round.
    """

    order: tuple[int, ...] | None
    can_replan: bool


class Ordering:
    """The order of one reducer's gradients, from its attach() on.

    order: in which the next buckets are filled; None: the reverse of registration.
    trace: of the rounds that show it; ends with the buckets.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self.begin(0, 1)

    def begin(self, n_rounds: int, world_size: int) -> None:
        """A model is attached, when so many rounds have ended."""
        self.order: tuple[int, ...] | None = None
        self._decides_at = n_rounds + TRACED_ROUNDS
        self._is_over = world_size == 1

    def buckets_made(self, reducer: Reducer) -> None:
        """Begins to trace."""
        self._is_over = self._is_over or len(reducer.buckets) == 1
        if not self._is_over:
            self.trace.begin(reducer, TRACED_ROUNDS)

    def described(self) -> str:
        """For repr()."""
        return "" if self.order is None else ", by arrival"

    def after_round(self, reducer: Reducer, can_replan: bool) -> None:
        """A round has ended: see Tuning.after_round. Inside a join() the ranks without data end
        none, and the others decide later.
        """
        if self._is_over or reducer.n_rounds < self._decides_at:
            return
        is_last = reducer.n_rounds >= self._decides_at + _PATIENCE_ROUNDS
        if is_joining(reducer.comm):
            if is_last:
                self.trace.end(reducer)  # the decision will be to leave the buckets
            return
        with all_or_none(reducer, self._stop):
            own = _Seen(self._seen_order(reducer), can_replan)
            seen = gather_objects(reducer.comm, own, "backward()")
            if all(one.can_replan for one in seen):
                self._decide(reducer, {one.order for one in seen})
            elif is_last or any(one.order is None for one in seen):
                self._stop(reducer)

    def _seen_order(self, reducer: Reducer) -> tuple[int, ...] | None:
        """None where rounds differ, or where the buckets must stay."""
        if not reducer.features().keys() <= _GOES_WITH:
            return None
        steps = self.trace.steps(reducer)[-TRACED_ROUNDS:]
        orders = {_order_of(step, reducer.buckets) for step in steps}
        return orders.pop() if len(steps) == TRACED_ROUNDS and len(orders) == 1 else None

    def _decide(self, reducer: Reducer, orders: set[tuple[int, ...] | None]) -> None:
        """orders: what the ranks have seen."""
        self._stop(reducer)
        order = orders.pop()
        if order is not None and not orders and order != tuple(sorted(order, reverse=True)):
            self.order = order
            hook_up_anew(reducer)

    def _stop(self, reducer: Reducer) -> None:
        self._is_over = True
        self.trace.end(reducer)


def _order_of(step: Step, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """What has never arrived comes last."""
    indices = [i for bucket in buckets for i in bucket.indices]
    arrived = zip(step.ready, indices, strict=True)
    return tuple(i for *_, i in sorted((not ready, ready, -i, i) for ready, i in arrived))
