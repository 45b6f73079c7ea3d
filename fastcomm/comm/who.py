"""Who takes part: the process of a rank, and how messages name it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """The process of a rank. host: where messages name it, too."""

    rank: int
    pid: int
    host: str = ""

    def in_words(self) -> str:
        """As messages name it: "rank 3 (pid 41)", or with its host: "rank 3 (pid 41, b)"."""
        return f"rank {self.rank} (pid {self.pid}{f', {self.host}' if self.host else ''})"


def processes_of(pids: Iterable[int]) -> tuple[Process, ...]:
    """pids: by rank."""
    return tuple(Process(rank, pid) for rank, pid in enumerate(pids))


def in_words(processes: Iterable[Process]) -> str:
    """Several, as messages name them."""
    return ", ".join(one.in_words() for one in processes)


def stat_of(pid: int) -> list[str]:
    """What /proc/PID/stat says behind the name, which may hold anything: first the letter by which
    ps shows the state. Raises OSError.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
