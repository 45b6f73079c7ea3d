"""torch's clipping, where .grad is None because a ShardedOptimizer holds the gradients: it would
silently do nothing. refuse_clipping() makes it raise FastcommError.

The functions are replaced where torch looks them up, so it does not matter how clip_grad_norm_ was
imported. clip_grads_with_norm_ and clip_grad_value_ have to be imported after the first
ShardedOptimizer was made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from fastcomm.errors import FastcommError

# What clips in clip_grad, and its name in torch.nn.utils.
_CLIPPING = {
    "_clip_grads_with_norm_": "clip_grads_with_norm_",
    "clip_grad_value_": "clip_grad_value_",
}


@functools.cache  # once is enough
def refuse_clipping(is_held: Callable[[Tensor], bool]) -> None:
    """Call it when a ShardedOptimizer is made. is_held: whether one of them takes a parameter's
    gradients.
    """
    for name, public in _CLIPPING.items():
        checked = _refusing(getattr(clip_grad, name), is_held)
        setattr(clip_grad, name, checked)
        setattr(torch.nn.utils, public, checked)


def _refusing(clip: Callable[..., Any], is_held: Callable[[Tensor], bool]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked(parameters: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(map(is_held, parameters)):
            raise FastcommError(
                "torch's clipping finds no gradients: a ShardedOptimizer holds them, each rank its "
                "shard. Call reducer.clip_grad_norm_(max_norm) on every rank, or make the "
                "optimizer with keep_gradients=True"
            )
        return clip(parameters, *args, **options)

    return checked
