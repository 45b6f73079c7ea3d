"""Parameters on their way: after a step with overlap_gather=True the ranks gather them while the
next forward runs, and whatever uses one of a bucket first orders the current stream after that
bucket's gather. The host does not wait.

A use that is not ordered would be silently wrong. So there are three nets:
- the parameters of a module, and of all modules in it, are waited for before its forward; a module
  without parameters of its own waits for none, as its forward runs those of others;
- until then a parameter's class is Arriving, which sees what Python does to it with torch;
- a gradient of a parameter that neither has seen is refused: BucketShard.refuse_unseen.

They do not see code in C++ that is handed the parameter itself outside its module's forward and
gives it no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.comm.autograd_stack import is_inside_backward
from fastcomm.comm.communicator import Work
from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from fastcomm.reducer.features.sharded_by import Stepper

# What may be asked of a parameter without its values.
_GRAD: Any = vars(torch._C.TensorBase)["grad"]
_PROPERTIES = ("grad", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim")
_METADATA: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(_GRAD.__set__, _GRAD.__delete__),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
    )
)


class Arriving(Parameter):
    """What a parameter is while it is on its way: the first use waits for it, and makes it a
    Parameter again.

    Only a tensor's class can see its use, as torch asks it in __torch_function__. And it must stay
    the same tensor: optimizers, tied modules and the user hold it. So its class changes, for as
    long as it is on its way.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        used = [one for one in tree_leaves((args, kwargs)) if type(one) is Arriving]
        for one in used or list(_arrivals):  # all, if they are hidden in some container
            _wait_for(one)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for(self)
        return self.__deepcopy__(memo)  # now a Parameter's


_arrivals: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter that is Arriving


def _wait_for(parameter: Parameter) -> None:
    arrival: Arrival | None = _arrivals.get(parameter)
    if arrival is not None:
        arrival.wait()


class Arrival:
    """One bucket's parameters, which `work` gathers. optimizer: is torn if that fails."""

    def __init__(
        self, work: Work, parameters: Iterable[Parameter | None], optimizer: Stepper
    ) -> None:
        self._work: Work | None = work
        self._optimizer = weakref.ref(optimizer)
        self.was_late = False  # nobody had waited before a backward did
        present: list[Any] = [parameter for parameter in parameters if parameter is not None]
        self._parameters = [weakref.ref(parameter) for parameter in present]
        for parameter in present:
            if type(parameter) is not Parameter:  # another class sees to its own uses
                self.wait()
                return
            parameter.__class__ = Arriving
            _arrivals[parameter] = self

    @property
    def is_over(self) -> bool:
        """Whether somebody has waited."""
        return self._work is None

    def wait(self) -> None:
        """Orders the current stream after the gather, at the first call. Raises what has ended the
        gathers of a step, once; then the parameters are what they are.
        """
        if self._work is None:
            return
        # a parameter that is used in a backward was used before it
        self.was_late = is_inside_backward()
        try:
            self._work.wait()
        except FastcommError:
            self._let_go()
            optimizer = self._optimizer()
            if optimizer is None or not optimizer.is_torn:  # else it has been raised
                if optimizer is not None:
                    optimizer.is_torn = True
                raise
        self._let_go()

    def _let_go(self) -> None:
        for reference in self._parameters:
            parameter: Any = reference()
            if type(parameter) is Arriving:
                parameter.__class__ = Parameter  # type: ignore[assignment]
                del _arrivals[parameter]
        self._work = None


class Arrivals:
    """Makes a model's modules wait for what they use.

    buckets: the parameters of each.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Sequence[Parameter | None]]) -> None:
        number_of = {parameter: i for i, bucket in enumerate(buckets) for parameter in bucket}
        # by module, the numbers of the buckets it uses
        self._used: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        for one in module.modules():
            has_own = next(one.parameters(recurse=False), None) is not None
            known = [p for p in one.parameters() if p in number_of] if has_own else []
            self._used[one] = {number_of[parameter] for parameter in known}
        self._under_way: dict[int, Arrival] = {}
        self._handle: RemovableHandle | None = None

    def begin(self, arrivals: dict[int, Arrival]) -> None:
        """These are under way, by their buckets' numbers."""
        self._under_way = arrivals
        if self._handle is None:
            # of all modules, while it is needed: so that the model's own hold nothing to be copied
            self._handle = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        used = self._used.get(module)
        if used is None:  # another model's
            return
        if not torch.is_grad_enabled():  # torch's fast paths read the parameters of inner modules
            used = set(self._under_way)
        for number in used & self._under_way.keys():
            self._under_way[number].wait()
        self._under_way = {i: one for i, one in self._under_way.items() if not one.is_over}
        if not self._under_way:
            self.end()

    def end(self) -> None:
        """No module waits any more."""
        self._under_way = {}
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def refuse(model: object) -> None:
    """Raises ValueError for a model of which the uses are not seen."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            "overlap_gather=True waits for parameters before the forward of their module: "
            "attach() the module, not its parameters"
        )
    for name, module in model.named_modules():
        is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"module {name or type(module).__name__} is compiled, and uses parameters unseen: "
                "leave overlap_gather out"
            )
