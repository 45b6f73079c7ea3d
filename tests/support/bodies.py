"""What the bodies of tests use, each on its rank: where they stand, a communicator there, notes to
the other ranks and to the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Place:
    """Where a rank stands, before any communicator exists. `init_method` is a file:// address that
    only these ranks share.
    """

    rank: int
    world_size: int
    init_method: str
    directory: str
    transport: str


def stand_at(place: Place) -> None:
    """This process is that rank from now on."""
    global _place
    _place = place


def my_place() -> Place:
    return _place


def communicator(place: Place, **options: Any) -> Any:
    """A communicator over the place's transport; over NCCL's stand-in on the CPU, also where there
    is a GPU. What the body makes from then on is made on its device.
    """
    import torch

    import fastcomm

    if place.transport == "nccl" and "FASTCOMM_STAND_IN_KERNELS" in os.environ:
        options = {"device": "cpu", **options}
    options = {"init_method": place.init_method, **options}
    options = {"rank": place.rank, "world_size": place.world_size, **options}
    comm = fastcomm.init(place.transport, **options)
    if comm.device.type != "cpu":
        torch.set_default_device(comm.device)
    return comm


class Interrupted(BaseException):
    """What a signal handler raises."""


def note(place: Place, **facts: Any) -> None:
    """For bodies: leaves facts that other ranks, and the test, can read, each whole or not
    at all.
    """
    for name, value in facts.items():
        path = Path(place.directory, name)
        path.with_suffix(".new").write_text(str(value))
        path.with_suffix(".new").rename(path)


def noted(place: Place, name: str) -> str:
    return Path(place.directory, name).read_text()


def wait_for_note(place: Place, name: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(place.directory, name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finish_together(comm: Any) -> None:
    """For bodies, before a rank abandons a round. Over NCCL the host does not wait, and one that
    abandons a round ends what the others are still about to finish of the round before: here they
    have all finished it.
    """
    if comm.backend == "nccl":
        gloo().barrier().wait()


def hear_of_it(comm: Any) -> None:
    """For bodies, after a backward that fails on another rank. Over NCCL, where backward does not
    wait, this raises the error."""
    deadline = time.monotonic() + 60
    while comm.backend == "nccl" and time.monotonic() < deadline:
        comm.check()


@contextlib.contextmanager
def raises_on_each(comm: Any, kind: type[Exception], words: str) -> Iterator[None]:
    """For bodies, around what fails on every rank by itself. Over NCCL a late rank may hear of
    another's error before it comes to its own: one rank at least says the words.
    """
    import torch

    from fastcomm import FastcommError

    is_nccl = comm.backend == "nccl"
    heard = rf"{words}|^rank \d abandoned" if is_nccl else words
    with pytest.raises(FastcommError if is_nccl else kind, match=heard) as caught:
        yield
    has_own = isinstance(caught.value, kind) and re.search(words, str(caught.value)) is not None
    n_own = torch.tensor([int(has_own)], device=comm.device)
    comm.all_reduce(n_own)
    assert n_own.item() >= 1


_of_script: list[Any] = []  # a script's variables, which live until its process has ended


def leave(place: Place, comm: Any, how: str) -> None:
    """This rank goes away, having noted its pid and the time."""
    if how.startswith("exits"):
        _of_script.append(comm)
    note(place, pid=os.getpid(), left_at=time.monotonic())
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exits":
        sys.exit(0)
    elif how == "exits by an exception":
        sys.last_value = RuntimeError("of the user's own making")  # as Python notes what has
        sys.exit(1)
    elif how == "exits at once":
        os._exit(0)
    elif how == "closes":
        comm.close()
    elif how == "aborts":
        comm.abort()
    else:
        raise RuntimeError("of the user's own making")


def left(place: Place) -> tuple[int, float]:
    """The pid of the rank that went away, and how many seconds ago that was."""
    return int(noted(place, "pid")), time.monotonic() - float(noted(place, "left_at"))


def raised(error: type[BaseException], call: Callable[[], object]) -> tuple[str, float]:
    """What the call raised, as text, and after how many seconds."""
    before = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    return str(caught.value), time.monotonic() - before


def gloo() -> Any:
    """For bodies: torch.distributed's default group over Gloo among the same ranks, made at the
    first call and kept.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        # Ranks of one host: the name of the host may not resolve where the tests run.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{_place.directory}/gloo",
            rank=_place.rank,
            world_size=_place.world_size,
        )
    return dist.group.WORLD


def meeting_place() -> Path:
    """For bodies: a directory of these ranks alone, which goes with them."""
    return Path(_place.directory)


_place: Place
