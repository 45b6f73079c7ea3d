"""Who takes part: the process of a rank, and how messages name it."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fastcomm.comm import forms

PROCESS = forms.PID, str  # the form of a process, as others tell of it: pid and host


class Process(NamedTuple):
    """The process of a rank. host: where messages name it, too."""

    rank: int
    pid: int
    host: str = ""

    def in_words(self) -> str:
        """As messages name it: "rank 3 (pid 41)", or with its host: "rank 3 (pid 41, b)"."""
        return f"rank {self.rank} (pid {self.pid}{f', {self.host}' if self.host else ''})"


def own_process() -> tuple[int, str]:
    """What a rank tells the others of its process: the pid and the host."""
    return os.getpid(), socket.gethostname()


def processes_of(pids: Iterable[int], hosts: Sequence[str] = ()) -> tuple[Process, ...]:
    """pids, hosts: by rank. Messages name hosts where there are several."""
    named = hosts if len(set(hosts)) > 1 else itertools.repeat("")
    return tuple(map(Process, itertools.count(), pids, named))


def in_words(processes: Iterable[Process]) -> str:
    """Several, as messages name them."""
    return ", ".join(one.in_words() for one in processes)


def stat_of(pid: int) -> list[str]:
    """What /proc/PID/stat says behind the name, which may hold anything: first the letter by which
    ps shows the state. Raises OSError.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
