"""Collectives over shared memory at the sizes where their way through it changes, and from every
place in memory.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.collective_checks import CHECKS, with_ops_in_turn
from tests.support.ranks import on_ranks
from tests.support.reference import DTYPES, PLACES

# As in kernels/shm/core.h: the most that travels in a mailbox, and among two ranks in one hop
# (twice as much where ranks share cores, as three mostly do here);
# what an all_reduce takes of a staging slot, and the slot.
MAILBOX_NBYTES, ONE_HOP_NBYTES, CHUNK_NBYTES, SLOT_NBYTES = 512, 4096, 2**16, 2**18


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("collective", CHECKS)
@on_ranks(2, 3)
def test_a_collective_of_any_size_gives_what_it_should(comm, collective, where):
    """The way through memory depends on the number of bytes alone; contract/test_results.py has
    every dtype with every operation, and test_core.py the arithmetic.
    """
    for i, dtype in enumerate(DTYPES):
        inline = MAILBOX_NBYTES // dtype.itemsize
        one_hop = (2 if comm.world_size == 2 else 4) * ONE_HOP_NBYTES
        one_hop = one_hop // dtype.itemsize // comm.world_size
        sizes = (0, 1, 37, inline - 1, inline, inline + 1, one_hop, one_hop + 1)
        cases = with_ops_in_turn(*sizes, first=i)
        if dtype in (torch.float32, torch.float16):
            cases.append((CHUNK_NBYTES // dtype.itemsize + 1, "sum"))
            cases.append((SLOT_NBYTES // dtype.itemsize + 1, "mean"))
            if collective != "reduce_scatter_single":
                cases.append((300_001, "sum"))
        CHECKS[collective](comm, dtype, cases, [where])
