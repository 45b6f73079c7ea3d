"""ShardedBy: what a reducer knows of the ShardedOptimizer that steps its model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fastcomm.errors import FastcommError
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.extension import RoundExtension
from fastcomm.reducer.features.shards import Sharding
from fastcomm.reducer.round import Round, State

if TYPE_CHECKING:
    from fastcomm.reducer.reducer import Reducer


class Stepper(Protocol):
    """A ShardedOptimizer, as the reducer sees it."""

    reducer: Reducer
    sharding: Sharding
    is_torn: bool  # a step has failed, and the ranks' parameters may differ

    def places_at_refresh(self) -> dict[str, Any]:
        """The parameters' places in its groups, which the ranks compare. Raises FastcommError if
        this rank holds gradients that would be lost, or a state that would not fit.
        """

    def gather_state(self) -> None:
        """The buckets are about to go: gathers the optimizer's state. Collective."""

    def compare_state(self) -> None:
        """For check_in_sync(). Collective. Raises MismatchError, on every rank, where ranks that
        step one parameter have states of different steps.
        """

    def take_buckets(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on: takes back the state. Collective. Raises ValueError
        for a trainable parameter without a group, or of another shape than its state;
        FastcommError on the other ranks.
        """


class ShardedBy(RoundExtension):
    """The ShardedOptimizer that steps a reducer's model. That holds the reducer, and so is not
    held here.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._reference = weakref.ref(stepper)

    @property
    def is_gone(self) -> bool:
        return self._reference() is None

    def stepper(self) -> Stepper:
        """Raises FastcommError if the optimizer is gone."""
        stepper = self._reference()
        if stepper is None:
            raise FastcommError(
                "the ShardedOptimizer of this model is gone: keep it, or call detach() and "
                "attach(model), on every rank, before you make another optimizer"
            )
        return stepper

    # -- a round -----------------------------------------------------------------------------------

    def before_round(self, round: Round) -> None:
        """Raises FastcommError where a round would overwrite gradients, or its gradients be of
        different parameters.
        """
        stepper = self.stepper()
        if stepper.is_torn:
            raise FastcommError(
                "a step of the ShardedOptimizer has failed, after which the ranks' parameters "
                "differ: call refresh() on every rank, which copies rank 0's"
            )
        for bucket in round.buckets:
            if bucket.shard is not None:
                bucket.shard.begin_round()

    def after_round(self, round: Round) -> None:
        """Lets the shards take the reduced gradients, or drop those they hold."""
        for bucket in round.buckets:
            if bucket.shard is None:
                continue
            if round.state is State.SETTLED:
                bucket.shard.take_round(bucket)
            else:
                bucket.shard.drop()

    def before_step(self, optimizer: object) -> None:
        """Raises FastcommError for another optimizer."""
        if optimizer is not self.stepper():
            raise FastcommError(
                f"this {type(optimizer).__name__} has parameters that a ShardedOptimizer steps: "
                "give each parameter to one optimizer"
            )

    # -- whether the ranks are in sync -------------------------------------------------------------

    def described(self, optimizer: object) -> str:
        """Returns the optimizer in words that ranks compare, as compare_state() is collective for
        this one alone.
        """
        kind = type(optimizer).__qualname__
        return f"this model's {kind}" if self._reference() is optimizer else kind

    def compare_state(self, optimizer: object) -> None:
        """Compares the state over the ranks; does nothing for another optimizer."""
        stepper = self._reference()
        if stepper is not None and stepper is optimizer:
            stepper.compare_state()
