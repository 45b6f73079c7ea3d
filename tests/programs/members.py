"""The ranks of a program, of which some meet anew."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from fastcomm import PeerLostError
from tests.programs.data import Leave, Rebuild
from tests.support.bodies import communicator, meeting_place, my_place
from tests.support.skips import logged

HEARD_WITHIN_S = 20.0
# How long the others wait for the rank that has left, as it lives on; they come together.
LEFT_ALONE_S = 3.0
_numbers = itertools.count()


@contextlib.contextmanager
def members_of(comm: Any, operations: Iterable[object]) -> Iterator[Members]:
    """The ranks of `comm`; if they meet anew, on a communicator of their own, so that this one
    stays for the next program."""
    folder = meeting_place() / f"members-{next(_numbers)}"
    if not any(isinstance(one, Rebuild | Leave) for one in operations):
        yield Members(comm, folder)
        return
    folder.mkdir(exist_ok=True)
    members = Members(communicator(my_place(), init_method=f"file://{folder}/store"), folder)
    try:
        yield members
    except BaseException:
        members.comm.abort()  # nobody is to wait for this rank
        raise
    members.comm.close()


class Members:
    """comm: the communicator that they have now. folder: of these ranks alone."""

    def __init__(self, comm: Any, folder: Path) -> None:
        self.comm = comm
        self._folder = folder

    def rebuild(self) -> None:
        self._meet_anew(self.comm.world_size, timeout=None)

    def part(self) -> None:
        """Before one leaves: after an abandonment all have met. They would miss it there."""
        self.comm.barrier()

    def rebuild_without_one(self, lose: Callable[[], None]) -> None:
        """lose: does what raises PeerLostError, over NCCL at once or later."""
        deadline = time.monotonic() + HEARD_WITHIN_S
        try:
            lose()
            while time.monotonic() < deadline:
                self.comm.check()
                os.sched_yield()
        except PeerLostError:
            pass
        else:
            raise AssertionError("this rank has not heard that another one has left")
        n_left = self.comm.world_size - 1
        self._wait_for_all(n_left)
        self._meet_anew(n_left, timedelta(seconds=LEFT_ALONE_S))

    def _wait_for_all(self, n: int) -> None:
        (self._folder / f"{n}-{self.comm.rank}").touch()
        deadline = time.monotonic() + HEARD_WITHIN_S
        while len([*self._folder.glob(f"{n}-*")]) < n:
            assert time.monotonic() < deadline, "not all ranks have heard that one has left"
            time.sleep(0.001)

    def _meet_anew(self, n: int, timeout: timedelta | None) -> None:
        before = self.comm
        with logged() as lines:
            self.comm = before.rebuild(timeout=timeout)
        assert before.rebuild() is self.comm
        assert (self.comm.world_size, self.comm.timeout) == (n, before.timeout)
        said = f"the ranks have met anew: {n} in place of {before.world_size}"
        told = [line.partition(";")[0] for line in lines]
        assert told == [said] * (self.comm.rank == 0), lines
