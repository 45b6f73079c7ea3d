"""For a process that others are forked from: its memory in huge pages."""

from __future__ import annotations

import ctypes

_NBYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1


def gather_memory() -> None:
    """Moves the memory of this process into huge pages where it can, as the kernel would in time. A
    fork copies the page table, and an exit takes it down: a hundred entries instead of fifty
    thousand halve what a rank costs.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        ranges = [line.split() for line in maps]
    for addresses, access, _, _, _, *name in ranges:
        if access == "rw-p" and (not name or name == ["[heap]"]):
            begin, end = (int(address, 16) // _NBYTES * _NBYTES for address in addresses.split("-"))
            for page in range(begin + _NBYTES, end, _NBYTES):
                madvise(page, _NBYTES, _COLLAPSE)
