"""Puts the host in the GPU's place for the benchmarks, beside the stand-ins for the driver and for
NCCL.

In bench/lib/cuda_clock.py time is then taken on the host's clock, and captured work called again.
The times mean nothing; the way of the program is the GPU's own. Whoever imports this before it runs
a benchmark has it so: see `on_the_host` in test_bench.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.support import small_models  # noqa: F401 (finds bench/)

from lib import cuda_clock, flatten_contenders, models  # isort: skip

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


vars(cuda_clock).update(
    Span=Span,
    capture=capture,
    why_not=lambda: None,
    device_count=lambda: CARDS,
    l2_bytes=lambda: 0,
    use_device=lambda index: torch.device("cpu"),
    synchronize=lambda: None,
)
# What takes a GPU milliseconds takes the host minutes; and DDP sends bfloat16 from GPUs only.
models.CUDA_CASES = {"mlp": models.CASES["mlp"]}
flatten_contenders.LISTS["tiny"] = lambda: flatten_contenders.tiny_shapes()[:200]
default_hooks.bf16_compress_hook = default_hooks.allreduce_hook
