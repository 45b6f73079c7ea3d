"""Checks what the ranks must agree on before they connect over NCCL: its version, and a card for
each rank. Only compares; the bootstrap exchanges what the ranks have found.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TypedDict

import torch

from fastcomm.comm import messages
from fastcomm.errors import InitError
from fastcomm.transports.nccl.library import load, version_text

FIRST_TO_SHARE_CARDS = 23000


class Facts(TypedDict):
    """What a rank has found. card: the GPU's UUID. may_share: other ranks may use it, too."""

    pid: int
    host: str
    version: int
    path: str
    card: str | None
    device: str
    may_share: bool


FACTS = {
    "pid": messages.PID,
    "host": str,
    "version": int,
    "path": str,
    "card": {str, None},
    "device": str,
    "may_share": bool,
}


def facts_of_this_rank(device: torch.device) -> Facts:
    """Opens NCCL. Raises InitError where there is none."""
    version, path = load()
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return {
        "pid": os.getpid(),
        "host": os.environ.get("NCCL_HOSTID", socket.gethostname()),
        "version": version,
        "path": path,
        "card": card,
        "device": str(device),
        "may_share": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
    }


def refuse_different_versions(facts: Sequence[Facts]) -> None:
    """Raises InitError, on every rank, when the ranks have found different versions of NCCL, which
    would not understand each other.
    """
    if len({theirs["version"] for theirs in facts}) > 1:
        found = "; ".join(
            f"rank {rank}: {version_text(theirs['version'])} in {theirs['path']}"
            for rank, theirs in enumerate(facts)
        )
        raise InitError(f"the ranks have different versions of NCCL: {found}")


def refuse_shared_cards(facts: Sequence[Facts]) -> None:
    """Raises InitError, on every rank, when two ranks use one GPU without having been set up for
    it.
    """
    seen: dict[tuple[str, str], int] = {}
    for rank, theirs in enumerate(facts):
        may_share = theirs["may_share"] and theirs["version"] >= FIRST_TO_SHARE_CARDS
        if theirs["card"] is None or may_share:
            continue
        first = seen.setdefault((theirs["host"], theirs["card"]), rank)
        if first != rank:
            raise InitError(
                f"ranks {first} and {rank} use the same GPU ({theirs['device']} on "
                f"{theirs['host']}): pass device=f'cuda:{{local_rank}}', or set "
                "CUDA_VISIBLE_DEVICES for each rank. To share one on purpose, for tests: "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), or a NCCL_HOSTID of its own "
                "for each rank"
            )
