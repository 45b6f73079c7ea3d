"""The model a reducer is attached to: what may be one, and a reference that does not keep it alive.

Owns nothing. agreement.py compares the models of the ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter

Model = nn.Module | list[tuple[str, Parameter]]


def model_of(given: nn.Module | Iterable[tuple[str, Parameter]]) -> Model:
    """A module as it is, named parameters as a list. Raises TypeError, and ValueError for a module
    that reduces by itself.
    """
    if isinstance(given, DistributedDataParallel):
        raise ValueError("attach(ddp.module): DistributedDataParallel reduces gradients itself")
    if isinstance(given, nn.Module):
        return given
    if not isinstance(given, Iterable):
        raise TypeError(
            f"attach(): expected a module or named parameters; got {type(given).__name__}"
        )
    return list(given)


def unsynced_batch_norm(model: Model, world_size: int) -> ValueError | None:
    """An error if the model has a SyncBatchNorm that would see its own rank's batch alone."""
    if world_size == 1 or not isinstance(model, nn.Module) or dist.is_initialized():
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            return ValueError(
                f"module {name} is a SyncBatchNorm, which is a plain BatchNorm of each rank's own "
                "batch where there is no process group: call "
                "torch.distributed.init_process_group(...) before attach(), or make it a BatchNorm"
            )
    return None


def renormalised_embedding(model: Model, world_size: int) -> ValueError | None:
    """An error if the model has an embedding that each rank would change by itself in forward."""
    if world_size == 1 or not isinstance(model, nn.Module):
        return None
    for name, module in model.named_modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and module.max_norm is not None:
            return ValueError(
                f"module {name} is an {type(module).__name__} with max_norm, whose forward changes "
                "the rows that this rank looks up: the ranks would drift apart. Make it without "
                "max_norm, and renormalise all rows after each step, on every rank: "
                "weight.data.copy_(torch.renorm(weight.data, 2, 0, max_norm))"
            )
    return None


def named_parameters(model: Model) -> list[tuple[str, Parameter]]:
    return list(model.named_parameters()) if isinstance(model, nn.Module) else model


def reference_to(model: Model) -> Callable[[], Model | None]:
    """A function that returns the model, or None once the module or a named parameter is gone."""
    if isinstance(model, nn.Module):
        return weakref.ref(model)
    references = [(name, weakref.ref(parameter)) for name, parameter in model]

    def recall() -> list[tuple[str, Parameter]] | None:
        recalled = [(name, reference()) for name, reference in references]
        alive = [(name, parameter) for name, parameter in recalled if parameter is not None]
        return alive if len(alive) == len(references) else None

    return recall
