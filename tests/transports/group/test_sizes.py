"""Collectives over a group at the sizes where their way through it changes."""

from __future__ import annotations

import pytest
import torch

from fastcomm.transports.group.exchange import SMALL_NBYTES
from fastcomm.transports.group.shards import PAYLOAD_NBYTES
from tests.support.collective_checks import CHECKS, with_ops_in_turn
from tests.support.ranks import on_ranks
from tests.support.reference import DTYPES

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("group")]

# Of float32: empty; what travels with the announcement, and one more; what takes one exchange, and
# one more; of two, and no multiple of any number of ranks here.
SIZES = (
    *(0, 1, 37, PAYLOAD_NBYTES // 4, PAYLOAD_NBYTES // 4 + 1),
    *(SMALL_NBYTES // 4, SMALL_NBYTES // 4 + 1, 65_537),
)


CASES = [
    *(("all_reduce", dtype) for dtype in DTYPES),
    ("reduce_scatter_single", torch.bfloat16),
    ("all_gather_single", torch.int32),
    ("broadcast", torch.float64),
]


@pytest.mark.parametrize("collective, dtype", CASES, ids=str)
@on_ranks(2, 3)
def test_a_collective_of_any_size_gives_what_it_should(comm, collective, dtype):
    cases = with_ops_in_turn(*SIZES, first=DTYPES.index(dtype))
    CHECKS[collective](comm, dtype, cases, ["comm.empty"])
