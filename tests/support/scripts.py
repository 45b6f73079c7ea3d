"""Scripts with some ranks, started as torchrun starts them, but forked with torch loaded: what a
test of an example takes is mostly the import of torch otherwise, three times with the launcher's.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.bodies import Place
from tests.support.other_device import OtherDevice
from tests.support.outcomes import values_of
from tests.support.ranks import fresh_ranks, torchrun_env
from tests.support.transports import environment_of


def printed_by(
    script: Path,
    *arguments: str,
    folder: Path | None = None,
    ranks: int = 2,
    is_for_cpus: bool = False,
) -> str:
    """What the ranks print, rank 0 first. folder: where they run, and leave their files.

    is_for_cpus: whether the script asks fastcomm.init() for the CPU. Others must run wherever torch
        sees CUDA: over NCCL if there is a GPU, else on host memory that counts as another device.
    """
    common = {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RESTART_COUNT": "0"}
    has_gpu = torch.cuda.is_available()
    environments = [
        one | common | (environment_of("nccl", rank) if has_gpu else {})
        for rank, one in enumerate(torchrun_env(ranks))
    ]
    devices = None if has_gpu or is_for_cpus else OtherDevice
    options = {"env": environments, "timeout": 280}
    outcomes = fresh_ranks(ranks, _run, script, arguments, folder, devices, **options)
    return "".join(values_of(outcomes))


def _run(
    place: Place,
    script: Path,
    arguments: Sequence[str],
    folder: Path | None,
    devices: type[OtherDevice] | None,
) -> str:
    os.chdir(folder or ".")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), devices() if devices else contextlib.nullcontext():
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
