"""Which reducer reduces a parameter, and how the reducers of a communicator are numbered. Keeps
neither parameters, reducers nor communicators alive.
"""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.communicator import Communicator
from fastcomm.reducer.optimizer_steps import Steppable

# By parameter: two reducers would reduce its gradient twice.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
# How many models were attached to a communicator. Attaching is collective, so the count is the same
# on all ranks: it keeps the buckets of several reducers apart.
_n_attached: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def owner_of(parameter: Tensor) -> Steppable | None:
    """Which reducer reduces the parameter's gradients."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


def is_owned(parameter: Tensor) -> bool:
    """Whether some reducer reduces the parameter's gradients."""
    return owner_of(parameter) is not None


def own(parameter: Tensor, reducer: Steppable) -> None:
    _owners[parameter] = weakref.ref(reducer)


def disown(parameter: Tensor) -> None:
    _owners.pop(parameter, None)


def next_number(comm: Communicator) -> int:
    """The number of the reducer that attaches a model now."""
    number = _n_attached.get(comm, 0)
    _n_attached[comm] = number + 1
    return number
