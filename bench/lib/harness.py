"""What the benchmarks are made with: ranks of this host, or of hosts that a limited network joins;
contenders that take turns; and what one of them takes more than another.

The parent starts the ranks, which run the same script with the same arguments, and calls their
methods: see launch.py. Contenders take turns in every round, in random order, so that a drift of
the machine's speed meets all of them. For the GPU's clock see cuda_clock.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lib import cuda_clock, launch

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))
try:
    from tests.support import namespaces
except ModuleNotFoundError:  # installed: there is no network then
    namespaces = None  # type: ignore[assignment]

PORT = 29500  # in namespaces of our own every port is free
PLACES_VARIABLE = "FASTCOMM_BENCH_PLACES"

T = TypeVar("T")


# ---- where ranks are -----------------------------------------------------------------------------


def why_no_network(delay_ms: float = 0) -> str | None:
    """Why there can be no hosts here; None if there can."""
    if namespaces is None:
        return "run it in the source tree"
    return namespaces.why_no_delay() if delay_ms else namespaces.why_not()


@contextlib.contextmanager
def started(
    script: str,
    n_ranks: int,
    *,
    hosts: Sequence[int] = (),
    rate: str = "1gbit",
    delay_ms: float = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[launch.Ranks]:
    """The ranks of a script. hosts: so many are on each of these, which are network namespaces with
    links of this rate and delay; without hosts all are on this one.
    """
    variables, arguments = dict(environment or {}), sys.argv[1:]
    with contextlib.ExitStack() as stack:
        if hosts:
            made = namespaces.Hosts(hosts, rate=rate, delay_s=delay_ms / 1e3)
            network = stack.enter_context(made)
            places = [
                [network.namespace(host), network.address(0), network.environment(rank)]
                for rank, host in enumerate(network.host_of)
            ]
            variables[PLACES_VARIABLE] = json.dumps(places)
        path = Path(script).resolve()
        yield stack.enter_context(
            launch.Ranks(path, n_ranks, arguments=arguments, environment=variables)
        )


def is_rank() -> bool:
    """Whether this process is a rank that a benchmark has started."""
    return launch.SOCKET_VARIABLE in os.environ


@contextlib.contextmanager
def joined(device: str = "cpu", *, group: str = "") -> Iterator[Any]:
    """The rank's side: a communicator of all ranks, wherever they are. device: "cuda" for a GPU of
    its own. group: torch.distributed's backend, if its default group is wanted as well; for "gloo"
    on a GPU it is NCCL.
    """
    launch.die_with_parent()
    torch.set_num_threads(1)
    own = torch.device("cpu")
    if device == "cuda":
        own = cuda_clock.use_device(int(os.environ["RANK"]))
        group = "nccl" if group == "gloo" and own.type == "cuda" else group
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend, meetings = _enter(rank)
    backend = "nccl" if device == "cuda" else backend
    with fastcomm.init(
        backend, init_method=meetings[0], rank=rank, world_size=n, device=own
    ) as comm:
        if group:
            dist.init_process_group(group, init_method=meetings[1], rank=rank, world_size=n)
        yield comm
        gc.collect()  # models go before their groups do
        if group:
            dist.destroy_process_group()
        comm.barrier()  # rank 0 serves the store that the others are still leaving


def _enter(rank: int) -> tuple[str, list[str]]:
    """Goes to this rank's host, if there are hosts. Returns the backend, and where fastcomm and
    torch meet.
    """
    if PLACES_VARIABLE not in os.environ:
        return "shm", [f"file://{launch.scratch()}/{name}" for name in ("fastcomm", "torch")]
    namespace, address, environment = json.loads(os.environ[PLACES_VARIABLE])[rank]
    namespaces.enter(namespace)
    os.environ.update(environment)
    return "hierarchical", [f"tcp://{address}:{PORT + n}" for n in range(2)]


def sent() -> int:
    """The rank's side: bytes that have left this network namespace's interface so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == namespaces.INTERFACE:
            return int(figures.split()[8])
    return 0


# ---- turns ---------------------------------------------------------------------------------------


def take_turns(
    contenders: Mapping[str, Callable[[], T]], rounds: int, barrier: Callable[[], object]
) -> dict[str, list[T]]:
    """The rank's side: what each contender's turns return, by round. Before each turn the ranks
    meet; no garbage is collected meanwhile.
    """
    names = list(contenders)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        gc.collect()
        gc.disable()
        for name in shuffled(names, number):
            barrier()
            found[name].append(contenders[name]())
        gc.enable()
    return found


def shuffled(contenders: Sequence[T], number: int) -> list[T]:
    """The order of round `number`: random, and the same on every rank."""
    return random.Random(number).sample(contenders, len(contenders))


def slowest(answers: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """answers: by rank, what take_turns returns. The times of the slowest rank in each turn."""
    return {
        name: [max(turn) for turn in zip(*(answer[name] for answer in answers), strict=True)]
        for name in answers[0]
    }


def time_fresh_calls(
    call: Callable[[], object], prepare: Callable[[], object], n_calls: int
) -> list[int]:
    """As time_calls, with a `prepare` before each call that does not count."""
    clock = time.perf_counter_ns
    nanoseconds = [0] * n_calls
    for index in range(n_calls):
        prepare()
        start = clock()
        call()
        nanoseconds[index] = clock() - start
    return nanoseconds


def time_calls(call: Callable[[], object], n_calls: int) -> list[int]:
    """Nanoseconds of each of `n_calls` calls, one after the other, with no barrier between them."""
    clock = time.perf_counter_ns
    stamps = [0] * (n_calls + 1)
    stamps[0] = clock()
    for index in range(1, n_calls + 1):
        call()
        stamps[index] = clock()
    return [end - start for start, end in itertools.pairwise(stamps)]


# ---- what one takes more than another ------------------------------------------------------------


def differences(samples: Mapping[str, Sequence[float]], base: str, way: str) -> list[float]:
    """By round, what `way` takes more than `base`."""
    return [a - b for a, b in zip(samples[way], samples[base], strict=True)]


def ratios(samples: Mapping[str, Sequence[float]], base: str, way: str) -> list[float]:
    """By round, how many times as long as `base` the other way takes."""
    return [a / b for a, b in zip(samples[way], samples[base], strict=True)]


def overheads(samples: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """What every other way takes more than `base`: the median over rounds, as what slows a whole
    round does not count.
    """
    return {
        way: statistics.median(differences(samples, base, way)) for way in samples if way != base
    }


def rounded(figures: Mapping[str, float], digits: int = 3) -> dict[str, float]:
    return {name: round(value, digits) for name, value in figures.items()}
