"""Makes one rank late, to find tests whose outcome depends on which rank is first. Off unless the
environment says which rank, and by how much:

    FASTCOMM_TESTS_DELAY=0:50 pytest tests/reducer    # rank 0 comes 50 ms late to everything
    FASTCOMM_TESTS_DELAY=1:10:finish pytest ...       # rank 1 before each wait alone

A point is where a bucket is launched, where a round waits for it (`finish`), where its gradients
are settled, and where a test's body begins.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any, NamedTuple

VARIABLE = "FASTCOMM_TESTS_DELAY"
POINTS = ("body", "launch", "finish", "settle")


class Delay(NamedTuple):
    rank: int
    seconds: float
    points: tuple[str, ...]


def asked_for() -> Delay | None:
    """What the environment asks for. Raises ValueError if that is no delay."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    rank, milliseconds, *points = text.split(":")
    if not set(points) <= set(POINTS):
        raise ValueError(f"{VARIABLE}={text}: a point is one of {', '.join(POINTS)}")
    return Delay(int(rank), float(milliseconds) / 1000, tuple(points) or POINTS)


def install(rank: int) -> None:
    """Makes this process, which is that rank, late where it is asked for."""
    delay = asked_for()
    if delay is None or delay.rank != rank:
        return
    from fastcomm.reducer.bucket import Bucket
    from tests.support import rank_process

    if "body" in delay.points:
        _put_off(rank_process, "carry_out", delay.seconds)
    for point in ("launch", "finish", "settle"):
        if point in delay.points:
            _put_off(Bucket, point, delay.seconds)


def _put_off(owner: Any, name: str, seconds: float) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    setattr(owner, name, late)
