"""How many cores this process may use. A core counts once, however many threads the hardware makes
of it: a second rank on a core slows down the first.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def cores() -> int:
    """The physical cores that this process may use, within a container's quota: at least 1."""
    return count(os.sched_getaffinity(0), Path("/sys"), Path("/proc/self/cgroup"))


def count(usable: Collection[int], sys: Path, cgroup: Path) -> int:
    """usable: the logical CPUs. sys: the kernel's /sys. cgroup: the file with this one's groups."""
    cpus = sys / "devices/system/cpu"
    siblings = {_read(cpus / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in usable}
    limits = [len(siblings)]
    for group in _groups(sys / "fs/cgroup", cgroup):
        limit, _, period = _read(group / "cpu.max").partition(" ")  # of "max": no limit
        if limit.isdecimal():
            limits.append(int(limit) // int(period))
    return max(1, min(limits))


def _groups(root: Path, cgroup: Path) -> list[Path]:
    """The folders of this process's groups, up to the root, which may be a container's own."""
    folders = []
    for line in _read(cgroup).splitlines():
        if line.startswith("0::"):
            group = root / line.removeprefix("0::").lstrip("/")
            folders += [group, *(one for one in group.parents if one.is_relative_to(root))]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
