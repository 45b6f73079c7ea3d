"""UnevenData: what a rank says of its data where others have more or less: its weight, and that it
has ended. Base class of Reducer.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, Literal, overload

from torch import Tensor

from fastcomm.reducer.join import Join, T
from fastcomm.reducer.options import Options
from fastcomm.reducer.progress import Stateful
from fastcomm.reducer.reduced import ReducedGradients
from fastcomm.reducer.tuning import Tuning
from fastcomm.reducer.weights import Weighting, refuse_weights


class UnevenData(ReducedGradients):
    """The part of a reducer by which ranks with different data train together."""

    # Whether this rank's data has ended, in the join() that is under way or was the last.
    data_exhausted: bool
    _deferred: BaseException | None
    _options: Options
    _tuning: Tuning
    _weighting: Weighting

    @abc.abstractmethod
    def _refuse_inside_backward(self, what: str) -> None:
        """Raises FastcommError inside a backward."""

    def set_weight(self, weight: float | Tensor, *, of: Literal["mean", "sum"] = "mean") -> None:
        """What this rank's gradients count in the next reduction, which becomes sum(w g) / sum(w)
        over the ranks. If weights are numbers of tokens, and losses are means over tokens, these
        are the gradients of one process on all ranks' data. Call it on every rank, or on none: else
        MismatchError.

        weight: a number, or a tensor of one, which is waited for. 0: a rank without data, whose
            gradients count nothing, not even NaNs. If all are 0, gradients are None, or what an
            earlier reduction has left.
        of: "sum" if losses are sums over the data: sum(g) / sum(w).

        Holds until the reduction is over: for one backward outside no_sync(), and for those inside
        before it. After that ranks count alike until the next call. With several calls in one
        reduction, each before the backwards of its data in no_sync(), weights add up and each batch
        counts with its own; zero_grad() drops gradients and weights.

        Gradients that an earlier reduction has left in .grad stay there, and the mean is added.
        With several weights, or of="sum", the backward raises FastcommError, on every rank.

        Raises before any rank is involved: ValueError for a negative or infinite number, NaN, and
        reducers with a hook, with error_feedback, or with another op than "mean"; TypeError;
        FastcommError inside a backward, and for gradients accumulated without a weight.
        """
        model = self._attached_model()
        self._refuse_inside_backward("set_weight()")
        self.local_steps.refuse("set_weight()")
        refuse_weights(self._options)
        self._weighting.follow(model)
        self._weighting.set(weight, of, self._buckets, self._n_unsynced)

    @overload
    def join(
        self,
        batches: None = None,
        *,
        strategy: Literal["wait", "stop"] = "wait",
        state: Iterable[Stateful] = (),
    ) -> Join[None]: ...
    @overload
    def join(
        self,
        batches: Iterable[T],
        *,
        strategy: Literal["wait", "stop"] = "wait",
        state: Iterable[Stateful] = (),
    ) -> Join[T]: ...
    def join(
        self,
        batches: Iterable[T] | None = None,
        *,
        strategy: Literal["wait", "stop"] = "wait",
        state: Iterable[Stateful] = (),
    ) -> Join[Any]:
        """For ranks with different numbers of batches: `with reducer.join():` around a loop, or
        `for batch in reducer.join(batches):`. Every rank calls it. It is for all reducers of the
        communicator.

        strategy: "wait": a rank whose data has ended takes part in the others' reductions without
            any, until all are done. Means are over the ranks with data. "stop": all end with the
            first.
        state: optimizers, schedulers and the like: ranks that ended earlier load the others'.

        In the end all ranks have the parameters and buffers of a rank that went furthest; if some
        have ended earlier, gradients are None. An exception that leaves the block aborts the
        communicator.

        Raises ValueError for reducers with a hook, error_feedback, another op than "mean", sparse
        gradients, sizes still being tuned, a ShardedOptimizer, LocalSGD or DiLoCo; TypeError for a
        state without state_dict() and load_state_dict(). At the end of the block or loop,
        MismatchError if ranks give different states, and FastcommError for gradients accumulated
        under no_sync() that nothing has reduced.
        """
        return Join(self, batches, strategy, state)
