"""Collectives over NCCL, from a tensor without elements to one that takes several blocks."""

from __future__ import annotations

import pytest

from tests.support.collective_checks import CHECKS, with_ops_in_turn
from tests.support.ranks import on_ranks
from tests.support.reference import DTYPES

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.transports("nccl")]


@pytest.mark.parametrize("where", ["comm.empty", "ordinary"])
@pytest.mark.parametrize("collective", CHECKS)
@on_ranks(2, 3)
def test_a_collective_of_any_size_gives_what_it_should(comm, collective, where):
    """contract/test_results.py has every dtype with every operation."""
    for i, dtype in enumerate(DTYPES):
        cases = with_ops_in_turn(0, 1, 37, 1024, 70_001, first=i)
        CHECKS[collective](comm, dtype, cases, [where])
