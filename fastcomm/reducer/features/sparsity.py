"""Sparsity: which parameters of a model get sparse gradients, and what does not go with these.
Makes the buckets of a model, with one for all of its sparse gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn import Parameter

from fastcomm.comm.collective import WIRE_DTYPES
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.features.shards import Sharding
from fastcomm.reducer.features.sparse_bucket import SparseBucket
from fastcomm.reducer.options import AUTO, Options
from fastcomm.reducer.validation import Model

Named = Sequence[tuple[str, Parameter]]

_NOT_SHARDED = "ShardedOptimizer steps dense ones; use sparse=False, or the plain optimizer"


def find(model: Model, named: Named, declared: Sequence[str]) -> set[str]:
    """The names of the trainable parameters whose gradients may be sparse: those of embeddings made
    with sparse=True, and the declared ones. named: all of the model's.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    embeddings = (m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    found = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
    return {name for name, p in named if p.requires_grad and (id(p) in found or name in declared)}


def find_problem(
    sparse: set[str], named: Named, options: Options, sharding: Sharding | None
) -> ValueError | None:
    """Why these parameters cannot be attached with such options, or None."""
    known = {name for name, _ in named}
    for name in options.sparse_parameters:
        if name not in known:
            return ValueError(f"sparse_parameters: the model has no parameter {name}")
    trouble = _trouble_with(options)
    if trouble is None and sharding is not None:
        trouble = _NOT_SHARDED
    if not sparse or trouble is None:
        return None
    return _refusal(min(sparse), trouble)


def refuse_sharding(buckets: Sequence[Bucket]) -> None:
    """Raises ValueError for a reducer of sparse gradients."""
    for one in buckets:
        if isinstance(one, SparseBucket):
            raise _refusal(min(one.names), _NOT_SHARDED)


def _refusal(name: str, trouble: str) -> ValueError:
    return ValueError(f"the gradient of parameter {name} is sparse: {trouble}")


def _trouble_with(options: Options) -> str | None:
    """Why a reducer of such options cannot reduce sparse gradients, or None."""
    if options.hooks:
        return "hooks written for DDP get dense ones; use sparse=False, or leave the hook out"
    if options.op not in ("sum", "mean"):
        return f"rows that a rank lacks have no {options.op}; use op mean or sum"
    if options.error_feedback or options.wire_dtype not in (None, *WIRE_DTYPES):
        return (
            "its rows travel in 16 bits or more, without error feedback; choose another wire_dtype"
        )
    if options.bucket_cap_mb == AUTO:
        return 'bucket_cap_mb="auto" knows dense ones; choose a number'
    return None
