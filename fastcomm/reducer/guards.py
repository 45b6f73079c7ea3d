"""Guards: guards the parameters of an attached model that no bucket holds, that is frozen ones
and those that came into the model after attach().

Their gradients would stay local, and the ranks would drift apart. So each of them gets a hook that
raises at its first gradient, in the backward that made it, before any optimizer steps. New
parameters and modules are found by torch's global registration hooks. A step costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from fastcomm.errors import FastcommError
from fastcomm.reducer.autograd import hook_gradient
from fastcomm.reducer.gradients import is_of_this_rank
from fastcomm.reducer.hooks import Untraced
from fastcomm.reducer.owners import is_owned
from fastcomm.reducer.validation import Model

# The modules of attached models, and the guards that watch them.
_watched: weakref.WeakKeyDictionary[nn.Module, Guards] = weakref.WeakKeyDictionary()
_registration_hooks: list[RemovableHandle] = []


class Guards:
    """The guards of one model. named_parameters: gives the parameters that it has now."""

    def __init__(
        self, named_parameters: weakref.WeakMethod[Callable[[], list[tuple[str, nn.Parameter]]]]
    ) -> None:
        self._named_parameters = named_parameters
        # Why no parameter of the model may get a gradient; None if those that are reduced may.
        self.refusal: str | None = None
        self._handles: list[RemovableHandle] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def guard(self, model: Model) -> None:
        """Guards the model's parameters that no reducer has: they must get no gradient."""
        if isinstance(model, nn.Module):
            self.watch(model)
        else:
            self.lay(parameter for _, parameter in model)

    def watch(self, module: nn.Module) -> None:
        """Guards the module, all modules in it, and those that will be added."""
        if not _registration_hooks:
            _registration_hooks.append(
                register_module_parameter_registration_hook(Untraced(_on_parameter))
            )
            _registration_hooks.append(
                register_module_module_registration_hook(Untraced(_on_module))
            )
        for one in module.modules():
            _watched[one] = self
            self._modules.add(one)
        self.lay(module.parameters())

    def lay(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if not is_owned(parameter) and _may_get_gradients(parameter):
                self._handles.append(_hook(parameter, Untraced(self._refuse)))

    def _refuse(self, parameter: Tensor) -> None:
        """A parameter that nobody reduces got a gradient. Raises if it belongs to the model."""
        named_parameters = self._named_parameters()
        named = [] if named_parameters is None else named_parameters()
        strangers = {p: name for name, p in named if p.requires_grad and not is_owned(p)}
        if parameter in strangers:
            raise FastcommError(
                self.refusal
                or "unfrozen, or new in the model, since attach(), and not reduced: "
                f"{', '.join(strangers.values())}. Call refresh() on every rank after such a "
                "change; and make a new optimizer if parameters were replaced, as "
                "load_state_dict(assign=True) does"
            )

    def find_gradient(self) -> str | None:
        """The name of a parameter that nobody reduces and that has a gradient of this rank's."""
        named_parameters = self._named_parameters()
        for name, parameter in [] if named_parameters is None else named_parameters():
            if not is_owned(parameter) and is_of_this_rank(parameter):
                return name
        return None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            if _watched.get(module) is self:
                del _watched[module]
        self._handles, self.refusal = [], None
        self._modules.clear()


def _may_get_gradients(parameter: Tensor) -> bool:
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return parameter.is_leaf and is_number and not parameter.is_inference()


def _hook(parameter: Tensor, hook: Untraced) -> RemovableHandle:
    """Hooks the gradient of a parameter, also of a frozen one, which may be unfrozen later."""
    is_frozen = not parameter.requires_grad
    with torch.inference_mode(False):
        if is_frozen:
            parameter.requires_grad_(True)
        try:
            return hook_gradient(parameter, hook)
        finally:
            if is_frozen:
                parameter.requires_grad_(False)


def _on_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    guards = _watched.get(module)
    if guards is not None and parameter is not None:
        guards.lay([parameter])


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    guards = _watched.get(module)
    if guards is not None and submodule is not None:
        guards.watch(submodule)
