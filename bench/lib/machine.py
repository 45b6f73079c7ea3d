"""Describes the machine and the software a result was measured with: what a reader needs to judge
the numbers. Names no host.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from fastcomm.transports.nccl.library import load, version_text


def describe() -> dict[str, object]:
    description: dict[str, object] = {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "cores": cores(),
        "l3_cache": l3_cache(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastcomm": fastcomm_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
    }
    if torch.cuda.is_available():
        description |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        }
        description["nccl"] = nccl_version()
    return description


def cores() -> int:
    """The cores this process may run on, which in a container or under taskset are fewer than the
    machine's.
    """
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """The processor's name; Arm kernels do not give one."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def l3_cache() -> str:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return "unknown"


def fastcomm_version() -> str:
    try:
        return importlib.metadata.version("fastcomm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed: used from the source tree"


def nccl_version() -> str:
    """Of the library fastcomm has loaded, or would load."""
    return version_text(load()[0])


def summary() -> str:
    """One line for the head of a printed result."""
    machine = describe()
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, fastcomm {machine['fastcomm']}, torch "
        f"{machine['torch']}"
    )
