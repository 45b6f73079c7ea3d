"""The ranks' clocks: what to add to a rank's times so that they are times of rank 0.

CLOCK_MONOTONIC is one clock for all ranks of a host. Between hosts the differences are estimated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from fastcomm.comm.objects import gather_objects, on_host
from fastcomm.comm.transport import Transport

_N_ROUNDS = 16


def offsets_to_rank_0(comm: Transport, call: str) -> list[int]:
    """By rank, in ns. Collective; costs one exchange, and some more where there are several
    hosts. call: the user's, for messages.
    """
    hosts = gather_objects(comm, _clock_identity(), call)
    if len(set(hosts)) == 1:
        return [0] * comm.world_size
    spans = gather_objects(comm, [_meet(comm) for _ in range(_N_ROUNDS)], call)
    return [
        0 if host == hosts[0] else offset(spans[0], own)
        for host, own in zip(hosts, spans, strict=True)
    ]


def _clock_identity() -> str:
    """Equal where ranks read the same clock: under one kernel. FASTCOMM_HOST_ID overrides it."""
    override = os.environ.get("FASTCOMM_HOST_ID")
    if override is not None:
        return override
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return boot_id.read().strip()


def _meet(comm: Transport) -> tuple[int, int]:
    """When this rank came to a meeting of all ranks, and when it left."""
    came = torch.tensor([time.monotonic_ns()], dtype=torch.int64, device=comm.device)
    all_came = torch.empty(comm.world_size, dtype=torch.int64, device=comm.device)
    before = time.monotonic_ns()
    comm.all_gather_single(all_came, came)
    on_host(comm, all_came)
    return before, time.monotonic_ns()


def offset(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> int:
    """What to add to the second rank's clock to get the first one's. Both have noted when they came
    to the same meetings and left them: nobody leaves before the other has come, which bounds the
    difference from both sides. The tightest bounds count.
    """
    least = max(a[0] - b[1] for a, b in zip(first, second, strict=True))
    most = min(a[1] - b[0] for a, b in zip(first, second, strict=True))
    return (least + most) // 2
