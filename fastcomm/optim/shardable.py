"""What a ShardedOptimizer can shard: which classes of optimizers, of whose model, in which
parameter groups. Also what ranks compare of the groups.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fastcomm.errors import FastcommError
from fastcomm.reducer import validation
from fastcomm.reducer.core import Core
from fastcomm.reducer.features.compatibility import Feature, check

# They look at each element by itself, so that a parameter may be cut. A class derived from one of
# these need not.
ELEMENTWISE = (
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


def refuse(optimizer_class: object, defaults: dict[str, Any], core: Core) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise misuse(optimizer_class)
    for refused, why in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(why)
    check(Feature.SHARDED, core.features())
    if defaults.get("differentiable"):
        raise ValueError("differentiable=True needs a graph through the step: it cannot be sharded")


def misuse(given: object) -> TypeError:
    """The error for what stands in place of a reducer, or of a class."""
    return TypeError(
        "ShardedOptimizer() takes a Reducer, the class of an optimizer, and options for it; got "
        f"{given if isinstance(given, type) else f'{type(given).__name__} object'}"
    )


# -- parameter groups ------------------------------------------------------------------------------


def refuse_groups(groups: list[dict[str, Any]], named: dict[str, Parameter]) -> None:
    given = {parameter for group in groups for parameter in group["params"]}
    for name, parameter in named.items():
        if parameter not in given:
            raise ValueError(
                f"parameter {name} is in no group: give it to the optimizer, or freeze it and call "
                "refresh()"
            )
        if parameter.is_complex():
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: ShardedOptimizer steps real parameters. "
                "Make it of pairs, by torch.view_as_real(), or use the plain optimizer"
            )
        if validation.grad_dtype(parameter) != parameter.dtype:
            raise ValueError(
                f"parameter {name} is {parameter.dtype} and its gradient is not: ShardedOptimizer "
                "takes gradients of the parameters' dtype"
            )
    known = set(named.values())
    for parameter in given:
        if parameter.requires_grad and parameter not in known:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is not in the reducer's model: "
                "attach() that model, and give only its parameters"
            )


def refuse_shared_memory(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a trainable parameter that lies where another tensor of the model does:
    a ShardedOptimizer moves parameters into memory of its own, each for itself.
    """
    placed = [(*_span(tensor), name, tensor) for name, tensor in tensors if tensor.numel()]
    before: list[tuple[int, str, Tensor]] = []  # those that reach into the next one
    for begin, end, name, tensor in sorted(placed, key=operator.itemgetter(0)):
        before = [one for one in before if one[0] > begin]
        for _, other, earlier in before:
            if other != name and (earlier.requires_grad or tensor.requires_grad):
                raise ValueError(
                    f"{other} and {name} lie in the same memory, and ShardedOptimizer would part "
                    "them: make them one parameter (b.weight = a.weight), or clone one of them"
                )
        before.append((end, name, tensor))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    begin = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def places(groups: list[dict[str, Any]], named: Iterable[tuple[str, Parameter]]) -> dict[str, Any]:
    """Where the named parameters stand in the groups, as ranks compare it: a parameter's number in
    a state means the same on all ranks only if that is equal.
    """
    names = {parameter: name for name, parameter in named}
    found: dict[str, Any] = {"the number of groups": len(groups)}
    for i, group in enumerate(groups):
        found[f"the number of parameters in group {i}"] = len(group["params"])
        for j, parameter in enumerate(group["params"]):
            if parameter in names:
                found[f"the place of parameter {names[parameter]}"] = f"group {i}, index {j}"
    return found


def identities(groups: list[dict[str, Any]]) -> list[list[int]]:
    """Which parameters the groups have, in their order."""
    return [list(map(id, group["params"])) for group in groups]


def refuse_unreduced(unowned: list[Parameter]) -> None:
    """Raises FastcommError if one of these, which no bucket has, is to be stepped."""
    for parameter in unowned:
        if parameter.requires_grad and parameter.grad is not None:
            raise FastcommError(
                f"a parameter of shape {tuple(parameter.shape)} in the groups of the "
                "ShardedOptimizer has a gradient that nobody reduces: it is not in the reducer's "
                "model, or came there after the last refresh()"
            )
