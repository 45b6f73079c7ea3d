"""NcclCommunicator beyond the contract: 8-bit floats, lanes, many communicators."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.stand_ins import loaded
from tests.support.ranks import on_ranks
from tests.transports.nccl import communicator, stand_in_values

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("nccl")]


@on_ranks(2)
def test_8_bit_floats_are_summed_and_have_no_mean(comm):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.ones(100, device=comm.device).to(dtype)
        comm.all_reduce(tensor)
        assert (tensor.float() == 2).all()
        with pytest.raises(TypeError, match="mean"):
            comm.all_reduce(tensor, "mean")


def _use_many(place):
    comms = [communicator(place) for _ in range(5)]
    for i, comm in enumerate(comms):
        tensor = torch.full((10,), float(i))
        comm.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * i] * 10
    for i, comm in enumerate(comms):
        comm.close()
        assert loaded("nccl").stand_in_live_comms() == len(comms) - 1 - i


def test_a_process_may_have_many_communicators():
    stand_in_values(2, _use_many)
