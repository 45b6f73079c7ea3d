"""Collectives over shared memory at the sizes where their way through it changes, and from every
place in memory.
"""

from __future__ import annotations

import pytest

from tests.support.collective_checks import CHECKS, with_every_op
from tests.support.ranks import on_ranks
from tests.support.reference import DTYPES, PLACES

# For float32 of these, 1024 elements are the most that travel in a mailbox, and 65536 fill a
# staging slot. With every operation when small: the operations differ in the arithmetic, the sizes
# in the way through memory.
CASES = [*with_every_op(0, 1, 37, 1023, 1024, 1025), (65_537, "mean"), (300_001, "sum")]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("collective", CHECKS)
@on_ranks(2, 3, 4)
def test_a_collective_of_any_size_gives_what_it_should(comm, collective, dtype, where):
    cases = CASES[:-1] if collective == "reduce_scatter_single" else CASES
    CHECKS[collective](comm, dtype, cases, [where])
