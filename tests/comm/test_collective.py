"""The tables of ops and dtypes are what the C core, the kernels for GPUs, and the stand-in for NCCL
number and name. The tests' lists of collectives are the interface's. Reads sources only; that
results are right is tested elsewhere.
"""

from __future__ import annotations

import inspect

import torch
from torch.distributed import ReduceOp

from fastcomm.comm.collective import REDUCTIONS, canonical_op
from fastcomm.comm.communicator import Communicator
from tests.support.collective_checks import CALLS, CHECKS


def test_every_collective_is_called_and_checked() -> None:
    methods = inspect.getmembers(Communicator, inspect.isfunction)
    found = {name for name, one in methods if "async_op" in inspect.signature(one).parameters}
    assert CALLS.keys() == CHECKS.keys() == found - {"barrier", "send", "recv"}


def test_every_op_has_the_names_that_torch_gives_it() -> None:
    for one in REDUCTIONS:
        assert canonical_op(one.name) == one.name
        assert canonical_op(one.of_torch.lower()) == one.name
        assert canonical_op(getattr(ReduceOp, one.of_torch)) == one.name


def test_the_used_mask_that_an_op_reduces_says_whether_a_rank_has_a_gradient() -> None:
    for one in REDUCTIONS:
        absent, present = map(torch.tensor, one.used_values)
        for values in ((absent, absent), (absent, present), (present, absent), (present, present)):
            is_absent = bool(one.combine(*values) == absent)
            assert is_absent == all(value is absent for value in values), one.name
