"""For bodies: what memory this process occupies, and where a tensor lies."""

from __future__ import annotations

import ctypes

from torch import Tensor


def resident_bytes() -> int:
    """Memory this rank occupies, without what malloc keeps for later. Memory that n ranks share
    counts as 1/n in each; what it has in common with the process that it was forked from counts
    whole, so that it does not matter which other processes end meanwhile.
    """
    ctypes.CDLL(None).malloc_trim(0)
    total, counts = 0, "Anonymous:"
    with open("/proc/self/smaps") as maps:
        for line in maps:
            key, *values = line.split()
            if not key.endswith(":"):  # the head of a mapping, which ends with the path
                counts = "Pss:" if "/memfd:" in line else "Anonymous:"
            elif key == counts:
                total += int(values[0]) * 1024
    return total


def lies_in_shared_memory(tensor: Tensor) -> bool:
    """Whether the tensor lies in a segment of a communicator."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return "/memfd:fastcomm" in line
    return False
