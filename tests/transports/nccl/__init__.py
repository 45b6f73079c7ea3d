"""The NCCL transport, in what only it promises: over the stand-ins for NCCL and for the driver, as
most tests here look into their logs or order faults.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fastcomm import FastcommError, NcclError, PeerLostError
from tests.support import bodies
from tests.support.bodies import Place
from tests.support.outcomes import Outcome, values_of
from tests.support.ranks import stand_in_ranks

# What NCCL's functions return: from ncclUnhandledCudaError to ncclRemoteError.
CODES = {
    1: "unhandled cuda error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process exited or there was a network error",
}
ERRORS = {code: PeerLostError if code == 6 else NcclError for code in CODES}
LAUNCH_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED
# A rank looks for its peers' notes several times a second.
SOON = 2.5


def communicator(place: Place, **options: Any) -> Any:
    """With a deadline that is over before the test is."""
    return bodies.communicator(place, **{"timeout": timedelta(seconds=10), **options})


def abandon_on_last_rank(place: Place, comm: Any) -> None:
    """The other ranks hear of it."""
    bodies.finish_together(comm)
    if place.rank == place.world_size - 1:
        comm.abandon()
    else:
        bodies.raised(FastcommError, comm.barrier)


def outcomes_of(
    world_size: int, body: Callable[..., Any], *args: Any, **options: Any
) -> list[Outcome]:
    return stand_in_ranks(world_size, body, *args, **{"timeout": 40, **options})


def stand_in_values(
    world_size: int, body: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """What the body returned, by rank."""
    return values_of(outcomes_of(world_size, body, *args, **options))
