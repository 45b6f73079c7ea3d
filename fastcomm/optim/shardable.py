"""What a ShardedOptimizer can shard: which classes of optimizers, and of whose model."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from fastcomm.reducer.features.compatibility import Feature, check
from fastcomm.reducer.features.shards import Sharding
from fastcomm.reducer.reducer import Reducer

# They look at each element by itself, so that a parameter may be cut.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_REFUSED = {
    torch.optim.LBFGS: "LBFGS looks at all parameters together: use another optimizer",
    torch.optim.SparseAdam: "SparseAdam steps sparse gradients: use it without sharding",
}


def is_elementwise(optimizer_class: object) -> bool:
    """Whether it is known to look at each element by itself. A class derived from such a one need
    not.
    """
    return optimizer_class in _ELEMENTWISE


def has_known_state(optimizer_class: type[Optimizer], sharding: Sharding) -> bool:
    """Whether it is known how its state's tensors are shaped; else that is as the class likes."""
    is_torchs = f"{optimizer_class.__module__}.".startswith("torch.optim.")  # Adafactor, Muon
    return sharding.cuts or is_torchs


def refuse(
    optimizer_class: object, defaults: dict[str, Any], reducer: Reducer, sharding: Sharding
) -> None:
    """Raises TypeError or ValueError for what cannot be sharded."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise misuse(optimizer_class)
    for refused, why in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(why)
    check(Feature.SHARDED, reducer.features())
    if defaults.get("differentiable"):
        raise ValueError("differentiable=True needs a graph through the step: it cannot be sharded")
    if sharding.shares_parameters and not reducer.comm.has_common_memory:
        raise ValueError(f"share_parameters=True needs backend shm; this is {reducer.comm.backend}")


def misuse(given: object) -> TypeError:
    """The error for what stands in place of a reducer, or of a class."""
    return TypeError(
        "ShardedOptimizer() takes a Reducer, the class of an optimizer, and options for it; got "
        f"{given if isinstance(given, type) else f'{type(given).__name__} object'}"
    )
