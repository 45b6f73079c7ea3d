"""Sparsity: which parameters of a model get sparse gradients, and what does not go with these."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fastcomm.reducer.features.compatibility import Feature, why_not
from fastcomm.reducer.features.shards import Sharding
from fastcomm.reducer.options import Options
from fastcomm.reducer.validation import Model, NamedParameters


def find(model: Model, named: NamedParameters, declared: Sequence[str]) -> set[str]:
    """The names of the trainable parameters whose gradients may be sparse: those of embeddings made
    with sparse=True, and the declared ones. named: all of the model's.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    embeddings = (m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    found = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
    return {name for name, p in named if p.requires_grad and (id(p) in found or name in declared)}


def refuse(
    model: Model, named: NamedParameters, options: Options, sharding: Sharding | None
) -> None:
    """Raises ValueError for sparse gradients of this model that cannot be reduced."""
    known = {name for name, _ in named}
    for name in options.sparse_parameters:
        if name not in known:
            raise ValueError(f"sparse_parameters: the model has no parameter {name}")
    present = options.features()
    if sharding is not None:
        present[Feature.SHARDED] = Feature.SHARDED.value
    sparse = find(model, named, options.sparse_parameters)
    trouble = why_not(Feature.SPARSE, present)
    if sparse and trouble is not None:
        raise ValueError(f"the gradient of parameter {min(sparse)} is sparse: {trouble}")
