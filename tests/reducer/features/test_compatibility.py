"""What does not go together is refused, whichever is asked for first: every pair of the table of
docs/compatibility.md.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from unittest import mock

import pytest
import torch
from torch.optim import SGD

import fastcomm
from fastcomm.reducer import plan
from fastcomm.reducer.features.compatibility import REFUSALS, Feature
from tests.support.models import mlp
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("group")]

OPTIONS = {
    Feature.OTHER_OP: {"op": "sum"},
    Feature.NOT_LINEAR: {"op": "max"},
    Feature.ROUNDING: {"wire_dtype": torch.bfloat16},
    Feature.ERROR_FEEDBACK: {"wire_dtype": torch.bfloat16, "error_feedback": True},
    Feature.AUTO: {"bucket_cap_mb": "auto"},
    Feature.MEASURING: {"bucket_cap_mb": "auto"},
    Feature.SKIP_NONFINITE: {"skip_nonfinite": True},
    Feature.AUDIT: {"audit": 1},
    Feature.SPARSE: {"sparse_parameters": ["0.weight"]},
}
# They last until the stack unwinds.
CALLS = {
    Feature.SHARDED: lambda reducer, stack: fastcomm.ShardedOptimizer(reducer, SGD, lr=0.1),
    Feature.LOCAL_STEPS: lambda reducer, stack: fastcomm.DiLoCo(reducer, SGD, every=2, lr=1.0),
    Feature.LOCAL_SGD: lambda reducer, stack: fastcomm.LocalSGD(reducer, every=2),
    Feature.JOIN: lambda reducer, stack: stack.enter_context(reducer.join()),
    Feature.WEIGHTS: lambda reducer, stack: reducer.set_weight(1),
    Feature.REBUILD: lambda reducer, stack: begun(reducer.elastic([0]), stack),
    Feature.VIRTUAL: lambda reducer, stack: begun(reducer.virtual(loader()), stack),
}


def begun(loop, stack):
    next(stack.enter_context(closing(loop)))


def loader():
    rows = torch.utils.data.TensorDataset(torch.randn(8, 8))
    return fastcomm.VirtualLoader(rows, virtual_ranks=2, batch_size=2)


def pairs():
    """What is there, and what is then asked for. A weight is there for its round only."""
    for one, others, _ in REFUSALS:
        for other in others:
            both = {(one, other), (other, one)}
            yield from (pair for pair in sorted(both, key=str) if pair[0] is not Feature.WEIGHTS)


@pytest.mark.parametrize("there, asked", list(pairs()), ids=lambda one: one.name)
@on_ranks(2)
def test_each_refuses_the_other(comm, there, asked):
    model = mlp()
    options = OPTIONS.get(there, {}) | OPTIONS.get(asked, {})
    with ExitStack() as stack:
        # gives a small model other buckets
        stack.enter_context(mock.patch.object(plan, "CAPS_MB", (0.0001,)))
        with pytest.raises(ValueError, match="cannot be combined with"):
            reducer = fastcomm.Reducer(comm, **options).attach(model)
            stack.callback(reducer.detach)
            kept = CALLS[there](reducer, stack) if there in CALLS else None
            CALLS[asked](reducer, stack) if asked in CALLS else None
            del kept
