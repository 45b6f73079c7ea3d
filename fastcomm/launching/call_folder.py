"""CallFolder: what a launcher and the ranks that it has started leave each other: the call, and
what each rank has returned or raised.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastcomm.comm import messages
from fastcomm.errors import FastcommError
from fastcomm.launching import launchers


class Raised(NamedTuple):
    """How a rank has failed. is_lost: only because of another one, which may say why."""

    at_s: float
    is_lost: bool
    exit_code: int
    text: str


class CallFolder:
    """The files of one launch() or `fastcomm run`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # -- in the launcher ---------------------------------------------------------------------------

    def write_call(self, preparation: dict[str, Any], packed: bytes) -> None:
        """For rank_process.py, which reads it before it has fastcomm."""
        with _in_folder():
            (self.path / "call").write_bytes(pickle.dumps((preparation, packed)))

    def answer(self, rank: int) -> bytes | None:
        """What the rank has returned, as it has written it."""
        path = self.path / f"answer-{rank}"
        return path.read_bytes() if path.exists() else None

    def raised(self) -> dict[int, Raised]:
        """By rank, as rank_process.py has written it."""
        return {rank: _raised(rank, path) for rank, path in self._left("raised").items()}

    def ended(self) -> list[int]:
        """The ranks that have come to their end in good order."""
        return sorted(self._left("ended"))

    def _left(self, what: str) -> dict[int, Path]:
        """By rank, the files of that name."""
        named = ((path.name.partition("-")[2], path) for path in self.path.glob(f"{what}-*"))
        return {int(rank): path for rank, path in named if rank.isdecimal()}

    def forget(self, rank: int) -> None:
        """Another process takes the rank's place."""
        (self.path / f"raised-{rank}").unlink(missing_ok=True)

    # -- in a rank ---------------------------------------------------------------------------------

    def write_answer(self, rank: int, value: bytes) -> None:
        with _in_folder():
            (self.path / f"answer-{rank}").write_bytes(value)


@contextlib.contextmanager
def _in_folder() -> Iterator[None]:
    """Says what to do where something cannot be written there. Raises InitError."""
    try:
        yield
    except OSError as error:
        raise launchers.no_folder(error) from error


def _raised(rank: int, path: Path) -> Raised:
    """What the rank has left of its failure. One that cannot be read is a failure all the same."""
    what = f"what rank {rank} has left of its failure"
    try:
        raised = messages.read(path.read_bytes(), (float, bool, int, str), what)
    except FastcommError as unreadable:
        return Raised(0.0, False, 1, f"rank {rank} failed; {unreadable}")
    return Raised(*raised)


@contextlib.contextmanager
def new_folder() -> Iterator[CallFolder]:
    """A folder for one launcher, which no other user can open, removed at the end of the block.
    Raises InitError where there is no place for it.
    """
    with _in_folder():
        path = Path(tempfile.mkdtemp(prefix="fastcomm-launch-"))
    try:
        yield CallFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
