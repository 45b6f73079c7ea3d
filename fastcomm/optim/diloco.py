"""DiLoCo: each rank steps by itself, and where ranks sync, an outer optimizer steps with what they
have done since (arXiv 2311.08105), in fragments if asked to (arXiv 2501.18512).

Keeps an outer copy of the parameters, equal on all ranks. What travels are pseudo-gradients: outer
parameters minus this rank's. Schedule, syncs and checkpoints are local_sgd.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from fastcomm.errors import FastcommError
from fastcomm.optim import checkpoints
from fastcomm.optim.checkpoints import options_of
from fastcomm.optim.local_sgd import LocalSGD, views_and_parameters
from fastcomm.optim.schedule import Schedule, refuse, require_reducer
from fastcomm.reducer import validation
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.reducer import Reducer


class DiLoCo(LocalSGD):
    """Lets each rank of a reducer step with its own gradients. Every `every` steps the ranks
    average how far they have come since, and an outer optimizer steps with it.

        reducer = fastcomm.Reducer(wire_dtype=torch.bfloat16).attach(model)
        outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        with fastcomm.DiLoCo(reducer, torch.optim.SGD, every=50, **outer):
            ...  # the loop as it is: see LocalSGD

    Pseudo-gradients travel in the reducer's wire_dtype, with its error_feedback. With SGD, lr=1.0
    and no momentum the result is LocalSGD's, up to rounding. Memory: one copy of the parameters,
    and the outer optimizer's state.

    reducer, every: see LocalSGD; wire_dtype may be any.
    outer_optimizer: a class of torch.optim, or any function that makes an optimizer of a list of
        parameters and `defaults`; not LBFGS. The attribute of this name is the optimizer itself,
        for schedulers, say.
    fragments: the reducer's buckets are dealt out to so many fragments of about one size, which
        sync one after the other, every / fragments steps apart. `every` is a multiple of it.
    defaults: for outer_optimizer.

    Raises as LocalSGD, and TypeError for an outer_optimizer that makes no optimizer.
    """

    outer_optimizer: Optimizer

    def __init__(
        self,
        reducer: Reducer,
        outer_optimizer: Callable[..., Optimizer],
        *,
        every: int,
        fragments: int = 1,
        **defaults: Any,
    ) -> None:
        require_reducer(type(self), reducer)
        schedule, problem = Schedule(every, fragments), None
        options: dict[str, Any] = {}
        try:
            refuse(reducer, schedule)
            self._make_outer(reducer, outer_optimizer, defaults)
            for i, group in enumerate(self.outer_optimizer.param_groups):
                for key, value in options_of(group).items():
                    options[f"{key} of the outer optimizer's group {i}"] = validation.shown(value)
            options["outer_optimizer"] = type(self.outer_optimizer).__qualname__
        except (TypeError, ValueError) as error:
            problem = error
        self._begin(reducer, schedule, problem, options)

    def _make_outer(
        self, reducer: Reducer, make: Callable[..., Optimizer], defaults: dict[str, Any]
    ) -> None:
        """Copies the parameters, and makes the optimizer of the copies."""
        # in the model's order, which does not depend on the buckets
        trainable = [(name, p) for name, p in reducer.named_parameters() if p.requires_grad]
        frozen = {name for bucket in reducer.buckets for name in bucket.names}
        frozen -= {name for name, _ in trainable}
        if frozen:
            raise ValueError(
                f"parameter {min(frozen)} was frozen after attach(): call refresh() first"
            )
        self._outer = {name: Parameter(p.detach().clone()) for name, p in trainable}
        self._versions = {name: p._version for name, p in trainable}  # until the first step
        self.outer_optimizer = make(list(self._outer.values()), **defaults)
        if not isinstance(self.outer_optimizer, Optimizer):
            raise TypeError(
                "outer_optimizer must make an optimizer of torch.optim; got "
                f"{self.outer_optimizer!r}"
            )
        if isinstance(self.outer_optimizer, LBFGS):
            raise ValueError("LBFGS asks for losses, and an outer step has none: use another")

    def before_step(self, optimizer: Optimizer) -> None:
        """For the reducer: raises FastcommError before the first step if a parameter is not what
        was copied.
        """
        versions, self._versions = self._versions, {}
        for name, parameter in self.reducer.named_parameters() if versions else ():
            is_written_to = versions.get(name, parameter._version) != parameter._version
            if is_written_to and not torch.equal(parameter, self._outer[name]):
                self._versions = versions
                raise FastcommError(
                    f"parameter {name} was changed after DiLoCo() had copied it, and syncs "
                    "would pull it back: load or change parameters first, and then make the "
                    "DiLoCo, on every rank; or load a checkpoint of both"
                )

    def _fill(self, bucket: Bucket) -> None:
        """Writes the pseudo-gradients into the bucket's views."""
        views, parameters = views_and_parameters(bucket)
        with torch.no_grad():
            torch._foreach_copy_(views, self._outer_of(bucket))
            torch._foreach_sub_(views, parameters)

    def _outer_of(self, bucket: Bucket) -> list[Tensor]:
        return [self._outer[name] for name, _ in bucket.named_parameters()]

    def _apply(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            views, _ = views_and_parameters(bucket)
            for outer, view in zip(self._outer_of(bucket), views, strict=True):
                outer.grad = view
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        for bucket in buckets:
            _, parameters = views_and_parameters(bucket)
            torch._foreach_copy_(parameters, self._outer_of(bucket))

    def state_dict(self) -> dict[str, Any]:
        """Returns LocalSGD's state, with the outer parameters and the outer optimizer's state,
        which are equal on all ranks.
        """
        outer = {name: parameter.detach() for name, parameter in self._outer.items()}
        return super().state_dict() | {
            "outer_parameters": outer,
            "outer_optimizer": self.outer_optimizer.state_dict(),
        }

    def _described(self, state_dict: dict[str, Any]) -> dict[str, str]:
        saved: dict[str, Tensor] = state_dict["outer_parameters"]
        _refuse_other_model(saved, self._outer)
        optimizer = state_dict["outer_optimizer"]
        name_of = {parameter: name for name, parameter in self._outer.items()}
        own = [p for group in self.outer_optimizer.param_groups for p in group["params"]]
        names = {
            number: name_of[parameter]
            for number, parameter in zip(_numbers(optimizer), own, strict=False)
        }
        states = checkpoints.states_by_number(optimizer, _numbers(optimizer))
        tensors, values = validation.optimizer_contents(optimizer["param_groups"], states, names)
        outer = [(f"outer parameter {name}", tensor) for name, tensor in saved.items()]
        contents = validation.contents_in_words([*outer, *tensors], values)
        return super()._described(state_dict) | contents

    def _load(self, state_dict: dict[str, Any]) -> None:
        super()._load(state_dict)
        self._versions = {}
        optimizer = state_dict["outer_optimizer"]
        states = checkpoints.states_by_number(optimizer, _numbers(optimizer))
        self.outer_optimizer.load_state_dict({**optimizer, "state": states})
        with torch.no_grad():
            for name, outer in self._outer.items():
                outer.copy_(state_dict["outer_parameters"][name])


def _refuse_other_model(saved: dict[str, Tensor], present: Mapping[str, Tensor]) -> None:
    """Raises ValueError, naming a parameter, unless both have the same names and shapes."""
    for name in [*present, *saved]:
        if name not in saved or name not in present:
            where = "the state" if name not in saved else "the model"
            raise ValueError(
                f"{where} has no parameter {name}: load the state of the same model, with the same "
                "frozen parameters, buckets and fragments"
            )
        if saved[name].shape != present[name].shape:
            raise ValueError(
                f"parameter {name} was saved with shape {tuple(saved[name].shape)}, and has "
                f"{tuple(present[name].shape)}"
            )


def _numbers(saved: dict[str, Any]) -> list[Any]:
    """Lists the numbers of the parameters in an optimizer's saved state."""
    return [number for group in saved["param_groups"] for number in group["params"]]
