"""Time on the GPU for the benchmarks: events on the stream and replays of captured work, never the
host's clock.

What is captured once runs as often as one likes without the host in its way, so that a replay's
time is the device's alone. Back-to-back calls between two events are for what cannot be captured,
or where the host's part is meant to count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def why_not() -> str | None:
    """Why nothing can be measured on a GPU here; None if it can."""
    if not torch.version.cuda:
        return "this torch was built without CUDA"
    if not torch.cuda.is_available():
        return "there is no CUDA device, or no driver for it"
    return None


def device_count() -> int:
    return torch.cuda.device_count()


def use_device(index: int) -> torch.device:
    """Makes a GPU the current one."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def l2_bytes() -> int:
    """The size of the current GPU's L2 cache."""
    return int(torch.cuda.get_device_properties().L2_cache_size)


def synchronize() -> None:
    torch.cuda.synchronize()


def capture(work: Callable[[], object]) -> Callable[[], None]:
    """A replay of `work`, which has run once before: lazy initialisation must not be captured. Keep
    it no longer than its communicator.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (a watchdog, autograd) may call what a capture forbids its own thread.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


class Span:
    """The stretch of the current stream between two events."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> Span:
        self._start.record()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.record()

    def microseconds(self) -> float:
        """Waits for the end of it."""
        self._end.synchronize()
        return 1e3 * float(self._start.elapsed_time(self._end))


def microseconds_of(call: Callable[[], object], n: int) -> float:
    """The mean of n calls, one behind the other. One before them lets the host get ahead."""
    call()
    with Span() as span:
        for _ in range(n):
            call()
    return span.microseconds() / n
