"""For bodies: what memory this process occupies, and where a tensor lies."""

from __future__ import annotations

import ctypes

from torch import Tensor


def resident_bytes() -> int:
    """Memory this rank occupies, without what malloc keeps for later. Memory that n ranks share
    counts as 1/n in each.
    """
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def lies_in_shared_memory(tensor: Tensor) -> bool:
    """Whether the tensor lies in a segment of a communicator."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return "/memfd:fastcomm" in line
    return False
