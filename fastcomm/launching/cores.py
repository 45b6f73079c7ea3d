"""How many cores this process may use. A core counts once, however many threads the hardware makes
of it: a second rank on a core slows down the first.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_NO_LIMIT = 1e9


def cores() -> int:
    """The physical cores that this process may run on, less what a container's quota of CPU time
    takes away: at least 1.
    """
    return count(os.sched_getaffinity(0), Path("/sys"), Path("/proc/self/cgroup"))


def count(usable: Collection[int], sys: Path, cgroup: Path) -> int:
    """usable: the logical CPUs. sys, cgroup: where the kernel describes the machine, and the groups
    that limit this process.
    """
    physical = len({_siblings(cpu, sys) for cpu in usable})
    quotas = map(_quota, _groups(sys / "fs/cgroup", cgroup))
    return max(1, min([physical, *map(int, quotas)]))


def _siblings(cpu: int, sys: Path) -> str:
    """A text that is the same for the logical CPUs of one core, as far as the kernel says."""
    path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(path) or str(cpu)


def _groups(root: Path, cgroup: Path) -> list[Path]:
    """The folders of the groups of version 2 that this process is in, up to the root. A container
    may see its own group as the root.
    """
    folders = []
    for line in _read(cgroup).splitlines():
        if line.startswith("0::"):
            group = root / line.removeprefix("0::").lstrip("/")
            folders += [group, *(one for one in group.parents if one.is_relative_to(root))]
    return folders


def _quota(folder: Path) -> float:
    """How many CPUs' time the group may use."""
    limit, _, period = _read(folder / "cpu.max").partition(" ")  # of "max": no limit
    return int(limit) / int(period) if limit.isdecimal() else _NO_LIMIT


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
