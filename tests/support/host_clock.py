"""Puts the host in the GPU's place for the benchmarks, beside the stand-ins for the driver and for
NCCL.

In bench/cuda_clock.py time is then taken on the host's clock, and captured work is called again.
The times mean nothing; the way of the program is the GPU's own.

A benchmark, and whatever ranks it starts, takes it in as `sitecustomize`: see `host_clock` in
test_bench.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType

CARDS = 2


class Span:
    def __enter__(self) -> Span:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = time.perf_counter()

    def microseconds(self) -> float:
        return 1e6 * (self._end - self._start)


def capture(work: Callable[[], object]) -> Callable[[], object]:
    work()
    return work


def replace_clock(module: ModuleType) -> None:
    import torch

    vars(module).update(
        Span=Span,
        capture=capture,
        why_not=lambda: None,
        device_count=lambda: CARDS,
        l2_bytes=lambda: 0,
        use_device=lambda index: torch.device("cpu"),
        synchronize=lambda: None,
    )


def replace_models(module: ModuleType) -> None:
    """What takes a GPU milliseconds takes the host minutes; and DDP sends bfloat16 from GPUs
    only.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module.CUDA_CASES = {"mlp": module.CASES["mlp"]}
    default_hooks.bf16_compress_hook = default_hooks.allreduce_hook


REPLACEMENTS = {"cuda_clock": replace_clock, "models": replace_models}


class _Finder:
    """Finds these modules where they are, and replaces what needs a GPU once they are loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name not in REPLACEMENTS:
            return None
        from importlib.util import spec_from_file_location

        source = os.path.join(os.environ["FASTCOMM_BENCH"], f"{name}.py")
        return spec_from_file_location(name, source, loader=_Loader(name, source))


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        REPLACEMENTS[module.__name__](module)


sys.meta_path.insert(0, _Finder())
