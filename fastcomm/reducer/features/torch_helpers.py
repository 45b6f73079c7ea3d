"""torch's own helpers for gradients, where .grad is None because a ShardedOptimizer holds the
gradients, or because the ranks have dropped them. In the first case clipping would silently do
nothing, and GradScaler find nothing. watch() mends both: clipping raises FastcommError, and
GradScaler unscales each rank's shards and agrees over the ranks. In the second case GradScaler
raises an error; watch_scalers() mends that, and notes which scaler goes with which optimizer.

The functions are replaced where torch looks them up, so it does not matter how clip_grad_norm_ was
imported. clip_grads_with_norm_ and clip_grad_value_ have to be imported after the first
ShardedOptimizer was made.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from fastcomm.comm.objects import called_by
from fastcomm.errors import FastcommError
from fastcomm.reducer.optimizer_hooks import skipped_nonfinite

if TYPE_CHECKING:
    from fastcomm.reducer.features.sharded_by import Stepper

# What clips in clip_grad, and its name in torch.nn.utils.
_CLIPPING = {
    "_clip_grads_with_norm_": "clip_grads_with_norm_",
    "clip_grad_value_": "clip_grad_value_",
}


_is_watching = _are_scalers_watched = False
# What has last unscaled an optimizer's gradients.
_scalers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[GradScaler]]
_scalers = weakref.WeakKeyDictionary()


def watch_scalers() -> None:
    """Call it before ranks drop a step, or make different numbers of them. GradScaler finds no
    gradients in a step that is dropped, and lowers its scale if some were not finite; scaler_of()
    knows whose it is.
    """
    global _are_scalers_watched
    if not _are_scalers_watched:
        GradScaler._unscale_grads_ = _noticing(  # type: ignore[method-assign]
            GradScaler._unscale_grads_
        )
        _are_scalers_watched = True


def scaler_of(optimizer: Optimizer) -> GradScaler | None:
    """The scaler that has last unscaled the optimizer's gradients, since watch_scalers()."""
    reference = _scalers.get(optimizer)
    return None if reference is None else reference()


def _noticing(unscale: Callable[..., Any]) -> Callable[..., Any]:
    """GradScaler._unscale_grads_, which returns by device whether it has found infinities."""

    @functools.wraps(unscale)
    def noticing(
        scaler: GradScaler, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any
    ) -> dict[torch.device, Tensor]:
        is_optimizer = isinstance(optimizer, Optimizer)  # and not a list of what one holds
        if is_optimizer:
            _scalers[optimizer] = weakref.ref(scaler)
        is_nonfinite = skipped_nonfinite(optimizer) if is_optimizer else None
        if is_nonfinite is not None:
            return {found_inf.device: torch.full_like(found_inf, float(is_nonfinite))}
        found: dict[torch.device, Tensor] = unscale(scaler, optimizer, inv_scale, found_inf, *args)
        return found

    return noticing


def watch(kind: type[Stepper], is_held: Callable[[Tensor], bool]) -> None:
    """Call it when an optimizer of this kind is made. is_held: whether one of them takes a
    parameter's gradients.
    """
    global _is_watching
    if _is_watching:
        return
    for name, public in _CLIPPING.items():
        checked = _refusing(getattr(clip_grad, name), is_held)
        setattr(clip_grad, name, checked)
        setattr(torch.nn.utils, public, checked)
    GradScaler._unscale_grads_ = _agreeing(  # type: ignore[method-assign]
        GradScaler._unscale_grads_, kind
    )
    _is_watching = True


def asking_recipe() -> str | None:
    """The function of torch.distributed.checkpoint.state_dict that has called this one's caller, or
    None if it was none of them. They take the keys of Optimizer.state for the model's parameters,
    and a state that is empty for one to be made by a step of zero gradients.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_name if _is_of_recipes(frame) else None


def is_whole_wanted() -> bool:
    """Whether a recipe has called this one's caller for StateDictOptions(full_state_dict=True): it
    gathers DTensors, and takes any other tensor for whole.
    """
    frame = sys._getframe(2)
    if not _is_of_recipes(frame):
        return False
    if not hasattr(frame.f_locals.get("info"), "full_state_dict"):
        raise FastcommError(
            f"with torch {torch.__version__} fastcomm cannot tell what {frame.f_code.co_name}() of "
            "torch.distributed.checkpoint wants: use state_dict() or full_state_dict() directly"
        )
    return bool(frame.f_locals["info"].full_state_dict)


def _is_of_recipes(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return bool(name == "torch.distributed.checkpoint.state_dict")


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


def _agreeing(unscale: Callable[..., Any], kind: type[Stepper]) -> Callable[..., Any]:
    """GradScaler._unscale_grads_, which returns by device whether it has found infinities."""

    @functools.wraps(unscale)
    def agreed(scaler: GradScaler, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        held = optimizer.held() if isinstance(optimizer, kind) else None
        if held is None or skipped_nonfinite(optimizer) is not None:
            found: dict[torch.device, Tensor] = unscale(scaler, optimizer, *args)
            return found
        found = unscale(scaler, SimpleNamespace(param_groups=[{"params": held}]), *args)
        device = optimizer.comm.device
        number = found.get(device, torch.zeros((), device=device))
        try:
            with called_by("GradScaler.unscale_()"):
                optimizer.comm.all_reduce(number, "max")
        except FastcommError as error:
            if not optimizer.reducer.outlives_step(error):
                raise
            number = torch.zeros_like(number)  # as of every step that is dropped
        return {device: number}

    return agreed
