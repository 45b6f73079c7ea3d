"""Which features of a reducer do not go together, why, and what to do instead: one table, which
docs/guarantees.md shows.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Feature(enum.Enum):
    """What a reducer may be asked for. The value is its name in documents."""

    OTHER_OP = 'an op other than "mean"'
    NOT_LINEAR = 'an op other than "sum" and "mean"'
    ROUNDING = "wire_dtype, narrower than the parameters"
    EIGHT_BITS = "wire_dtype of 8 bits"
    ERROR_FEEDBACK = "error_feedback"
    AUTO = 'bucket_cap_mb="auto"'
    MEASURING = 'bucket_cap_mb="auto", while it measures'
    SKIP_NONFINITE = "skip_nonfinite"
    AUDIT = "audit"
    SPARSE = "sparse gradients"
    SHARDED = "ShardedOptimizer"
    LOCAL_STEPS = "LocalSGD, DiLoCo"
    LOCAL_SGD = "LocalSGD"
    JOIN = "join()"
    WEIGHTS = "set_weight()"
    REBUILD = "rebuild(), elastic()"


# The features that are there, and of each a word for messages: the op, a parameter, a class.
Present = Mapping[Feature, str]

_BY_HAND = "agree on the number of steps, and let a rank without data set_weight(0) and reduce()"

# (what is asked for, what is there): the message. {} is the word of what is there.
REFUSALS: dict[tuple[Feature, Feature], str] = {
    (Feature.ERROR_FEEDBACK, Feature.NOT_LINEAR): (
        "error_feedback=True supports only op sum and mean; got {}"
    ),
    (Feature.SPARSE, Feature.NOT_LINEAR): "rows that a rank lacks have no {}; use op mean or sum",
    (Feature.SPARSE, Feature.ERROR_FEEDBACK): (
        "its rows travel without error_feedback; leave that out"
    ),
    (Feature.SPARSE, Feature.EIGHT_BITS): (
        "its rows travel in 16 bits or more; choose another wire_dtype"
    ),
    (Feature.SPARSE, Feature.AUTO): 'bucket_cap_mb="auto" knows dense ones; choose a number',
    (Feature.SPARSE, Feature.SHARDED): (
        "ShardedOptimizer steps dense ones; use sparse=False, or the plain optimizer"
    ),
    (Feature.WEIGHTS, Feature.OTHER_OP): (
        "set_weight() makes a weighted mean: use op mean; got {}"
    ),
    (Feature.WEIGHTS, Feature.ERROR_FEEDBACK): (
        "set_weight() cannot be combined with error_feedback=True, which adds what one round has "
        "dropped to the next, of other weights: leave one of them out"
    ),
    (Feature.JOIN, Feature.OTHER_OP): ('op="{}": join() makes means over the ranks with data'),
    (Feature.JOIN, Feature.ERROR_FEEDBACK): (
        "error_feedback=True, which counts on the same ranks in every round: leave it out"
    ),
    (Feature.JOIN, Feature.MEASURING): (
        'bucket_cap_mb="auto" while the ranks still measure together: give a size, or call '
        "join() after the first steps"
    ),
    (Feature.JOIN, Feature.SHARDED): (
        "a ShardedOptimizer, of which a rank without data would have to make its part of every "
        f"step: use a torch.optim optimizer, or {_BY_HAND}"
    ),
    (Feature.JOIN, Feature.LOCAL_STEPS): (
        "a {}, whose ranks sync after the same number of steps: call its finish() first, on every "
        "rank"
    ),
    (Feature.JOIN, Feature.SPARSE): (
        "the sparse gradient of parameter {}, whose rows all ranks gather, with data or without: "
        f"use sparse=False, or {_BY_HAND}"
    ),
    (Feature.LOCAL_STEPS, Feature.OTHER_OP): "syncs average over the ranks: use op mean; got {}",
    (Feature.LOCAL_STEPS, Feature.SKIP_NONFINITE): (
        "skip_nonfinite=True looks at reduced gradients, of which there are none between two "
        "syncs: leave it out"
    ),
    (Feature.LOCAL_STEPS, Feature.AUDIT): (
        "audit compares the ranks' parameters, which differ between two syncs: leave it out"
    ),
    (Feature.LOCAL_STEPS, Feature.SHARDED): (
        "a ShardedOptimizer steps this rank's shard of the reduced gradients: with steps of each "
        "rank's own use the plain optimizer"
    ),
    (Feature.LOCAL_STEPS, Feature.LOCAL_STEPS): (
        "the reducer has a {} already: call its finish() first"
    ),
    (Feature.LOCAL_STEPS, Feature.JOIN): (
        "join() ends with the parameters of one rank on all: let ranks step alone outside of it"
    ),
    (Feature.LOCAL_STEPS, Feature.SPARSE): (
        "the gradient of parameter {} is sparse, and syncs average whole parameters: use "
        "sparse=False"
    ),
    (Feature.LOCAL_SGD, Feature.ROUNDING): (
        "wire_dtype {} would round the parameters that LocalSGD averages: leave it out, or send "
        "differences, by DiLoCo(reducer, torch.optim.SGD, every=..., lr=1.0)"
    ),
    (Feature.REBUILD, Feature.SHARDED): (
        "a ShardedOptimizer cannot go on with the remaining ranks, as a lost rank's shards are "
        "gone: use the plain optimizer, or make a Reducer and a ShardedOptimizer on every rank "
        "after a loss, and load a checkpoint"
    ),
    (Feature.REBUILD, Feature.LOCAL_STEPS): (
        "ranks under {} have parameters of their own between two syncs, and none can go on with "
        "another's: load a checkpoint after a loss"
    ),
    (Feature.REBUILD, Feature.JOIN): (
        "join() ends with the ranks with which it began: let reducer.elastic() take its place"
    ),
    (Feature.SHARDED, Feature.SPARSE): (
        "the gradient of parameter {} is sparse: ShardedOptimizer steps dense ones; use "
        "sparse=False, or the plain optimizer"
    ),
    (Feature.SHARDED, Feature.SHARDED): (
        "the reducer has a ShardedOptimizer already: give that one more groups, or call detach() "
        "and attach(model) first"
    ),
    (Feature.SHARDED, Feature.REBUILD): (
        "a ShardedOptimizer takes no part in elastic(), as a lost rank's shards are gone: use the "
        "plain optimizer there. After rebuild() call catch_up(reducer) before you make it, and "
        "load a checkpoint after that"
    ),
    (Feature.SHARDED, Feature.LOCAL_STEPS): (
        "a ShardedOptimizer needs reduced gradients, and the reducer's {} lets each rank step with "
        "its own: call its finish() first"
    ),
    (Feature.SHARDED, Feature.AUTO): (
        'bucket_cap_mb="auto" plans other buckets while the optimizer has its shards of them: '
        "choose a number"
    ),
}


def why_not(asked: Feature, present: Present) -> str | None:
    """Return why a feature does not go with what is there, and what to do; or None."""
    for (one, other), sentence in REFUSALS.items():
        if one is asked and other in present:
            return sentence.format(present[other])
    return None


def check(asked: Feature, present: Present) -> None:
    """Raise ValueError where a feature does not go with what is there."""
    trouble = why_not(asked, present)
    if trouble is not None:
        raise ValueError(trouble)
