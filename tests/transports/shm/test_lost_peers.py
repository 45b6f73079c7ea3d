"""A peer that goes once all ranks have what it brought."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from fastcomm import PeerLostError
from tests.support.bodies import communicator, note
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks


def _abort_after_the_result(place):
    comm = communicator(place)
    comm.barrier()
    tensor = torch.ones(10)
    if place.rank == 1:
        comm.all_reduce(tensor)
        comm.abort()
        note(place, aborted=True)
        return None
    work = comm.all_reduce(tensor, async_op=True)
    while not Path(place.directory, "aborted").exists():
        time.sleep(0.01)
    work.wait()
    with pytest.raises(PeerLostError, match="rank 1 .*aborted"):
        comm.all_reduce(tensor)
    return tensor.tolist()


def test_a_result_that_all_ranks_have_is_good_though_a_peer_has_aborted_since():
    assert values_of(fresh_ranks(2, _abort_after_the_result))[0] == [2.0] * 10
