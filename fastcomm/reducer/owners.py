"""Which reducer reduces a parameter, and how the reducers of a communicator are numbered. Keeps
neither parameters, reducers nor communicators alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fastcomm.comm.standing import Standing, when_abandoned
from fastcomm.comm.transport import Transport
from fastcomm.reducer.autograd import hook_gradient
from fastcomm.reducer.bucket import Bucket
from fastcomm.reducer.hooks import CoreFlags, GradientHook

if TYPE_CHECKING:
    from fastcomm.reducer.core import Core

# By parameter: two reducers would reduce its gradient twice.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
# How many models were attached to a communicator. Attaching is collective, so the count is the same
# on all ranks: it keeps the buckets of several reducers apart.
_n_attached: weakref.WeakKeyDictionary[Transport, int] = weakref.WeakKeyDictionary()


def owner_of(parameter: Tensor) -> Core | None:
    """Which reducer reduces the parameter's gradients."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


def is_owned(parameter: Tensor) -> bool:
    """Whether some reducer reduces the parameter's gradients."""
    return owner_of(parameter) is not None


def reducers_on(standing: Standing) -> list[Core]:
    """Those of the communicator that have a model, in the order of their numbers, which is the same
    on all ranks. standing: the communicator's.
    """
    found = {reference() for reference in _owners.values()}
    mine = [one for one in found if one is not None and one.comm.standing is standing]
    return sorted(mine, key=lambda one: one.number)


def attached_names() -> WeakIdKeyDictionary:
    """The names of all parameters that attached models have now, by parameter."""
    found = WeakIdKeyDictionary()
    for reducer in {reference() for reference in _owners.values()}:
        for name, parameter in [] if reducer is None else reducer.named_parameters():
            found[parameter] = name
    return found


def take_over(core: CoreFlags, buckets: Sequence[Bucket]) -> list[RemovableHandle]:
    """Makes the reducer the owner of the buckets' parameters, and hangs its hooks on them. Returns
    the hooks' handles.
    """
    handles = []
    for bucket in buckets:
        for i, parameter in enumerate(bucket.parameters):
            assert parameter is not None  # for the type checker: attach() holds the model
            _owners[parameter] = weakref.ref(core)
            hook = GradientHook(core, bucket, i, bucket.note_stream)
            handles.append(hook_gradient(parameter, hook))
    return handles


def disown(buckets: Sequence[Bucket]) -> None:
    """The buckets' parameters have no owner any more."""
    for bucket in buckets:
        for parameter in bucket.parameters:
            if parameter is not None:
                _owners.pop(parameter, None)


def next_number(comm: Transport) -> int:
    """The number of the reducer that attaches a model now."""
    number = _n_attached.get(comm, 0)
    _n_attached[comm] = number + 1
    return number


@when_abandoned
def _drop_steps(standing: Standing) -> None:
    """No rank knows which reducers the others had come to: all of the communicator drop the step,
    on every rank.
    """
    for reducer in reducers_on(standing):
        reducer.drop_step()
