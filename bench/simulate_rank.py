"""One rank of bench/simulate.py and bench/tune.py: profiles steps without communication, measures
what an all-reduce costs, and makes steps with buckets of several sizes.

Started by bench/lib/launch.py, in a network namespace of its own where hosts are given.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lib import launch, turns
from lib.models import CASES, WARM_UP_STEPS
from lib.places import enter
from lib.step_profile import Profile, Stopwatch, median_of

import fastcomm
from fastcomm.insight.collectives import Cost, MeasuredCosts
from fastcomm.insight.transport import SIZES, measure_costs
from fastcomm.transports.shm.memory import keep_freed_memory

SCRIPT = Path(__file__).resolve()
CALIBRATED_RANKS = 2  # of which all else is predicted
LOCAL = "local"
AUTO = "auto"
AUTO_STEPS = 16  # after which a reducer has made its choice
LOCAL_ROUNDS = 5
BUDGET_S = 2.0


class Methods:
    """What the parent calls, on all ranks at once."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._chosen_mb: float | None = None

    def costs(self) -> list[tuple[int, tuple[float, float]]]:
        """Of an all-reduce, by size: seconds and core seconds."""
        measured = measure_costs(self.comm, (*SIZES, 1 << 25), BUDGET_S)
        return [(nbytes, tuple(cost)) for nbytes, cost in measured.points]  # type: ignore[misc]

    def profile(self, model: str, steps: int) -> Profile:
        """Steps without communication, all ranks at work: when gradients are ready, as parts of
        what the slowest rank's step takes in steps().
        """
        case = CASES[model]
        original, batch = case.make(self.comm.rank)
        stopwatch = Stopwatch(case, copy.deepcopy(original), batch)
        for _ in range(WARM_UP_STEPS):
            stopwatch.step()
        profiles = []
        for _ in range(steps):
            self.comm.barrier()
            profiles.append(stopwatch.step())
        slowest = torch.tensor(self.steps(model, [], LOCAL_ROUNDS, 3), dtype=torch.float64)
        self.comm.all_reduce(slowest, "max")
        median = median_of(profiles)
        scale = slowest.median().item() / median.step().seconds
        return Profile(
            median.forward_s * scale,
            median.backward_s * scale,
            median.optimizer_s * scale,
            [ready * scale for ready in median.ready_s],
            median.sizes,
        )

    def steps(self, model: str, caps: Sequence[Any], rounds: int, steps: int) -> list[list[float]]:
        """Seconds of a step, by round and way: without communication, then with these caps."""
        case = CASES[model]
        original, batch = case.make(self.comm.rank)
        reducers = []

        def prepare(cap: Any) -> Callable[[], None]:
            model = copy.deepcopy(original)
            if cap is not None:
                reducers.append(fastcomm.Reducer(self.comm, bucket_cap_mb=cap).attach(model))
            step = case.training_step(model, batch)
            for _ in range(AUTO_STEPS if cap == AUTO else WARM_UP_STEPS):
                step()
            return step

        ways = {LOCAL: prepare(None)} | {str(cap): prepare(cap) for cap in caps}
        seconds = self._take_turns(ways, rounds, steps)
        for reducer in reducers:
            if reducer.tuning is not None:
                self._chosen_mb = float(reducer.tuning.options.bucket_cap_mb)
            reducer.detach()
        return seconds

    def chosen(self) -> float | None:
        """What the last steps() came to with AUTO, in MiB."""
        return self._chosen_mb

    def _take_turns(
        self, ways: dict[str, Callable[[], None]], rounds: int, steps: int
    ) -> list[list[float]]:
        table = []
        for number in range(rounds):
            gc.collect()
            row = {}
            for way in turns.order_of(list(ways), number):
                self.comm.barrier()
                row[way] = statistics.median(turns.time_calls(ways[way], steps)) / 1e9
            table.append([row[way] for way in ways])
        return table


def costs_of(ranks: launch.Ranks) -> MeasuredCosts:
    """What the ranks' costs() has measured, in the parent."""
    return MeasuredCosts([(nbytes, Cost(*cost)) for nbytes, cost in ranks.call("costs")[0]])


def serve() -> None:
    launch.die_with_parent()
    # Before any step, as a reducer does: else one without communication may get new pages for its
    # gradients each time, or not, as the memory around them will have it, and take twice as long.
    keep_freed_memory()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    places = json.loads(sys.argv[1]) if sys.argv[1:] else None
    backend, method = enter(rank, places)
    with fastcomm.init(backend, init_method=method, rank=rank, world_size=world_size) as comm:
        launch.serve(rank, Methods(comm))
        comm.barrier()


if __name__ == "__main__":
    sys.path.append(str(SCRIPT.parent.parent))
    serve()
