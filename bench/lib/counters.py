"""What a stretch of a program costs beside time: instructions, cycles and cache misses as the
kernel's perf counts them in user mode, page faults and context switches as getrusage does. Counts
all threads that begin after a Counters was made. Where perf is not to be had (most containers), its
three counters are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct

# of struct perf_event_attr in linux/perf_event.h, and of its hardware events
PERF_TYPE_HARDWARE = 0
EVENTS = {"cycles": 0, "instructions": 1, "cache_misses": 3}
INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
SYSTEM_CALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open


class Counters:
    """Counts from when it was made on; close() or the end of the process ends that."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        for name, event in EVENTS.items():
            with contextlib.suppress(OSError):
                self._files[name] = _open(event)

    def read(self) -> dict[str, float]:
        """All that were counted so far, by name."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counts = {
            name: float(struct.unpack("=Q", os.read(file, 8))[0])
            for name, file in self._files.items()
        }
        counts["page_faults"] = float(usage.ru_minflt + usage.ru_majflt)
        counts["context_switches"] = float(usage.ru_nvcsw + usage.ru_nivcsw)
        counts["cpu_ms"] = 1e3 * (usage.ru_utime + usage.ru_stime)
        return counts

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _open(event: int) -> int:
    """A file that counts the event on this process. Raises OSError."""
    number = SYSTEM_CALLS.get(platform.machine())
    if number is None:
        raise OSError("perf_event_open has no known number on this machine")
    flags = INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
    attributes = ATTRIBUTES.pack(
        PERF_TYPE_HARDWARE, ATTRIBUTES.size, event, 0, 0, 0, flags, 0, 0, 0
    )
    libc = ctypes.CDLL(None, use_errno=True)
    file: int = libc.syscall(number, attributes, 0, -1, -1, 0)
    if file < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open")
    return file
