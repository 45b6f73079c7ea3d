"""Schedule: after how many steps ranks that step by themselves sync, and which buckets do. Also
which reducers and numbers LocalSGD and DiLoCo cannot take.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.reducer import Reducer


@dataclass(frozen=True)
class Schedule:
    """When which fragment syncs.

    every: each fragment syncs once in so many steps; the fragments take turns, at equal distances.
    """

    every: int
    n_fragments: int = 1

    def check(self) -> None:
        """Raises TypeError or ValueError."""
        for name, value in (("every", self.every), ("fragments", self.n_fragments)):
            if not isinstance(value, int):
                raise TypeError(f"{name} must be an int; got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if self.every % self.n_fragments:
            raise ValueError(
                "every must be a multiple of fragments, which sync at equal distances; got "
                f"{self.every} and {self.n_fragments}"
            )

    def fragment_at(self, n_steps: int) -> int | None:
        """Which fragment syncs after so many steps."""
        number, rest = divmod(n_steps, self.every // self.n_fragments)
        return None if rest else (number - 1) % self.n_fragments


def fragments_of(buckets: list[Bucket], n: int) -> list[list[Bucket]]:
    """The buckets in n parts of about one size: each goes, the largest first, to the part that is
    smallest so far.
    """
    fragments: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for i in sorted(range(len(buckets)), key=lambda i: -buckets[i].flat.nbytes):
        lightest = loads.index(min(loads))
        fragments[lightest].append(i)
        loads[lightest] += buckets[i].flat.nbytes
    return [[buckets[i] for i in sorted(fragment)] for fragment in fragments]


def require_reducer(kind: type, given: object) -> None:
    """Raises TypeError for anything but a reducer."""
    if not isinstance(given, Reducer):
        raise TypeError(f"{kind.__name__}() takes a Reducer; got {type(given).__name__}")


def refuse(reducer: Reducer, schedule: Schedule) -> None:
    """Raises TypeError or ValueError for what no sync can be made of."""
    reducer.attached_model()
    schedule.check()
    check(Feature.LOCAL_STEPS, reducer.features())
    _refuse_moment(reducer)
    if schedule.n_fragments > len(reducer.buckets):
        raise ValueError(
            f"{schedule.n_fragments} fragments need as many buckets, and the reducer has "
            f"{len(reducer.buckets)}: choose a smaller bucket_cap_mb, or fewer fragments"
        )
    for bucket in reducer.buckets:
        _refuse_bucket(bucket)


def _refuse_moment(reducer: Reducer) -> None:
    """Raises ValueError unless it is between two steps."""
    is_between_steps = reducer.round is None and reducer.reduces_backwards
    if not is_between_steps or reducer.awaits_round:
        raise ValueError(
            "ranks begin to step alone between two steps: outside backward() and no_sync(), and "
            "not after a set_weight() or skip_step() whose reduction has not come"
        )


def _refuse_bucket(bucket: Bucket) -> None:
    """Raises ValueError if the bucket's views cannot hold its parameters."""
    for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
        if parameter is not None and parameter.dtype != view.dtype:
            raise ValueError(
                f"parameter {name} is {parameter.dtype} and its gradient {view.dtype}: syncs "
                "take gradients of the parameters' dtype"
            )


def refuse_rounding(reducer: Reducer) -> None:
    """Raises ValueError for a wire that rounds parameters."""
    wire = reducer.options.wire_dtype
    if any(wire not in (None, bucket.dtype) for bucket in reducer.buckets):
        check(Feature.LOCAL_SGD, {Feature.ROUNDING: str(wire)})
