"""One bucket by itself, bound as a reducer binds it, and what its gather and its launch take on the
host's clock.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import Parameter


def bind(comm: Any, n: int, numel: int, wire_dtype: torch.dtype | None, label: int) -> Any:
    """A bucket of n gradients of float32, of numel elements each."""
    # Behind the gradients: one element for each, in which ranks tell each other which they have.
    flat = comm.empty(n * numel + n, dtype=torch.float32).zero_()
    views = list(flat[: n * numel].split(numel))
    offsets = [i * numel for i in range(n)]
    return comm.bind_bucket(flat, views, offsets, wire_dtype=wire_dtype, label=label)


def time_round(bucket: Any, parameters: list[Parameter]) -> tuple[int, int]:
    """Nanoseconds of a gather and of a launch. Waits for the result, which does not count."""
    start = time.perf_counter_ns()
    bucket.gather(parameters)
    gathered = time.perf_counter_ns()
    work = bucket.launch("mean", [])
    launched = time.perf_counter_ns()
    work.wait()
    return gathered - start, launched - gathered
