"""Which features of a reducer do not go together, why, and what to do instead: one table, which
docs/compatibility.md shows.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Feature(enum.Enum):
    """What a reducer may be asked for. The value is its name in documents and messages."""

    OTHER_OP = 'an op other than "mean"'
    NOT_LINEAR = 'an op other than "sum" and "mean"'
    ROUNDING = "wire_dtype, narrower than the parameters"
    ERROR_FEEDBACK = "error_feedback=True"
    AUTO = 'bucket_cap_mb="auto"'
    MEASURING = 'bucket_cap_mb="auto", while it measures'
    SKIP_NONFINITE = "skip_nonfinite=True"
    AUDIT = "audit"
    SPARSE = "sparse gradients"
    SHARDED = "ShardedOptimizer"
    LOCAL_STEPS = "LocalSGD, DiLoCo"
    LOCAL_SGD = "LocalSGD"
    JOIN = "join()"
    WEIGHTS = "set_weight()"
    REBUILD = "rebuild(), elastic()"
    VIRTUAL = "virtual()"


# The features that are there, and of each a word for messages: the op, a parameter, a class.
Present = Mapping[Feature, str]

# A feature, those that it does not go with, whichever is asked for first, and why.
REFUSALS: tuple[tuple[Feature, tuple[Feature, ...], str], ...] = (
    (
        Feature.OTHER_OP,
        (Feature.WEIGHTS, Feature.JOIN, Feature.LOCAL_STEPS),
        "weights, join() and syncs make means: use op mean",
    ),
    (
        Feature.NOT_LINEAR,
        (Feature.ERROR_FEEDBACK, Feature.SPARSE),
        "only sums can be made up for in the next round, or of the rows that some ranks have: use "
        "op mean or sum",
    ),
    (
        Feature.ERROR_FEEDBACK,
        (Feature.WEIGHTS, Feature.JOIN, Feature.SPARSE),
        "what one round has dropped is added to the next, of the same ranks, weights and rows: "
        "leave error_feedback out",
    ),
    (
        Feature.AUTO,
        (Feature.SPARSE, Feature.SHARDED),
        "other buckets are tried, which must be of dense gradients that nobody has shards of: "
        "choose a number",
    ),
    (
        Feature.MEASURING,
        (Feature.JOIN,),
        "the ranks still measure together: give a size, or call join() after the first steps",
    ),
    (
        Feature.SPARSE,
        (Feature.SHARDED, Feature.LOCAL_STEPS),
        "rows of gradients travel, and no whole ones: use sparse=False",
    ),
    (
        Feature.JOIN,
        (Feature.SPARSE, Feature.SHARDED),
        "a rank without data would have to gather rows, or step its shard: use sparse=False, or a "
        "torch.optim optimizer; or agree on the number of steps, and let a rank without data "
        "set_weight(0) and reduce()",
    ),
    (
        Feature.LOCAL_STEPS,
        (
            Feature.LOCAL_STEPS,
            Feature.SKIP_NONFINITE,
            Feature.AUDIT,
            Feature.JOIN,
            Feature.SHARDED,
            Feature.REBUILD,
        ),
        "ranks have gradients and parameters of their own between two syncs: leave it out, or call "
        "finish() first, on every rank",
    ),
    (
        Feature.LOCAL_SGD,
        (Feature.ROUNDING,),
        "it would round the parameters that are averaged: leave it out, or send differences, by "
        "DiLoCo(reducer, torch.optim.SGD, every=..., lr=1.0)",
    ),
    (
        Feature.SHARDED,
        (Feature.SHARDED,),
        "give the one that is there more groups, or call detach() and attach(model) first",
    ),
    (
        Feature.SHARDED,
        (Feature.REBUILD,),
        "a lost rank's shards are gone: use the plain optimizer in elastic(). After rebuild() make "
        "a new Reducer, or call catch_up(reducer), then make the ShardedOptimizer and load a "
        "checkpoint, on every rank",
    ),
    (
        Feature.JOIN,
        (Feature.REBUILD,),
        "join() ends with the ranks with which it began: let reducer.elastic() take its place",
    ),
    (
        Feature.VIRTUAL,
        (
            Feature.VIRTUAL,
            Feature.OTHER_OP,
            Feature.ROUNDING,
            Feature.ERROR_FEEDBACK,
            Feature.AUTO,
            Feature.SPARSE,
            Feature.SHARDED,
            Feature.LOCAL_STEPS,
            Feature.JOIN,
            Feature.WEIGHTS,
        ),
        "the steps of virtual() have the same bits on any number of ranks, and all microbatches "
        "count alike: leave it out",
    ),
)


def why_not(asked: Feature, present: Present) -> str | None:
    """Return why a feature does not go with what is there, and what to do; or None."""
    for one, others, why in REFUSALS:
        if asked is one:
            found = others
        elif asked in others:
            found = (one,)
        else:
            continue
        for other in found:
            if other in present:
                return f"{asked.value} cannot be combined with {present[other]}: {why}"
    return None


def check(asked: Feature, present: Present) -> None:
    """Raise ValueError where a feature does not go with what is there."""
    trouble = why_not(asked, present)
    if trouble is not None:
        raise ValueError(trouble)
