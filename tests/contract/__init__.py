"""The contract of communicator.py, over every transport: one suite, through public names.

`over` says where a test runs. What needs one size, one shape of data or one rank's refusal runs on
two ranks; what is special to a transport stands in its own folder. Two things differ by contract,
and are said here once: results (reference.assert_reduced), and over NCCL on a GPU, where no call
waits, the moment at which an error is raised (bodies.hear_of_it).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fastcomm.comm.communicator import Communicator
from tests.fakes.stand_ins import assert_all_ended
from tests.support.outcomes import Outcome
from tests.support.ranks import fresh_ranks, stand_in_ranks


def new_ranks(
    transport: str, world_size: int, body: Callable[..., Any], *args: Any, **options: Any
) -> list[Outcome]:
    """New processes for one test, whose places are of that transport. NCCL's faults are those of
    the stand-in, also where there is a GPU.
    """
    if transport == "nccl":
        return stand_in_ranks(world_size, body, *args, **options)
    return fresh_ranks(world_size, body, *args, transport=transport, **options)


def assert_ended(comm: Communicator) -> None:
    """For bodies, after an error that has ended the communicator: NCCL's own have gone, too, as far
    as its stand-in can tell.
    """
    if comm.backend == "nccl" and "FASTCOMM_STAND_IN_KERNELS" in os.environ:
        assert_all_ended()
