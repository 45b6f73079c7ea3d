"""The memory that comm.empty hands out."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.contract import new_ranks
from tests.support.bodies import communicator
from tests.support.outcomes import values_of
from tests.support.ranks import on_ranks
from tests.support.reference import DTYPES
from tests.support.transports import over

pytestmark = pytest.mark.usefixtures("transport")


@over(2)
@on_ranks()
def test_comm_empty_gives_flat_tensors_on_the_communicators_device(comm):
    for dtype in DTYPES:
        for numel in (0, 1, 1000):
            tensor = comm.empty(numel, dtype=dtype)
            assert (tensor.shape, tensor.dtype, tensor.device) == ((numel,), dtype, comm.device)
            assert tensor.is_contiguous() and not tensor.requires_grad
            assert tensor.data_ptr() % 64 == 0


def _tensor_after_close(place):
    comm = communicator(place)
    tensor = comm.empty(100_000, dtype=torch.float32).fill_(comm.rank)
    part = comm.empty(1000, dtype=torch.float32).fill_(2)[10:20]
    comm.all_reduce(tensor, "max")
    comm.close()
    del comm
    gc.collect()
    tensor.add_(1)
    return tensor.sum().item(), part.tolist() == [2.0] * 10


@over(2)
def test_a_tensor_outlives_its_communicator(transport, world_size):
    outcomes = values_of(new_ranks(transport, world_size, _tensor_after_close))
    assert outcomes == [(200_000, True)] * 2
