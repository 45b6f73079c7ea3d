"""What Reducer.timeline() costs: a step while it records, after stop(), and after stop() again, on
two ranks over shared memory.

    python -m fastcomm bench timeline
    python -m fastcomm bench timeline --models gpt2 conv --rounds 40

One model and one reducer; every round has a turn of each state, a few steps long, in an order that
changes from round to round. A step's time is that of the slowest rank. The cost is the median over
rounds of (state - off); its half-width is from the rounds' spread. "off again" is the same as
"off": its cost is what this method makes of nothing.

The line below is the recording alone, which whole steps would hide: the CPU time that a backward of
many tiny parameters takes on one rank with a timeline, less that without. The last is what
reducer.stragglers() rests on, which is always on: what a step takes to note its phases, and what it
takes the ranks to tell each other, about every 2 s.

Predicted before the first run: a gradient costs one clock and one store, 0.03 us; a bucket its five
notes and two calls of the transport, 2 us; a step its hooks on forward and on the output, 10 us. So
a step of GPT-2 small (148 gradients, 21 buckets) costs 60 us of some 900 ms, less than 0.01%, and
one of the conv net (162 gradients) 20 us of some 60 ms, 0.03%: nothing that whole steps could show.
Noting the phases: six calls, 0.6 us a step. Telling them: one small all_gather, 50 us.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from lib import launch, report, tables, turns
from lib.models import CASES, WARM_UP_STEPS, TinyParameters
from lib.tables import Column, Table
from torch import nn

import fastcomm
from fastcomm.insight.phases import BACKWARD, OPTIMIZER, OTHER, WAITING
from fastcomm.insight.stragglers import Stragglers

STATES = ("off", "on", "off again")
MOST = 0.01  # of a step: what a timeline is to cost while it is on
N_TINY = 1000  # parameters of the model that has hardly any work
PREDICTED_US = {"gpt2": 60.0, "conv": 20.0, "mlp": 16.0, "transformer": 30.0}


def main() -> int:
    options = parse_options()
    if "RANK" not in os.environ:
        launch.become_ranks(2)
    torch.set_num_threads(1)
    with fastcomm.init("shm") as comm:
        rows = [measure(comm, name, options) for name in options.models]
        noting_us, telling_us = phases_us(comm)
        if comm.rank == 0:
            tiny_us = recording_us(options.pairs)
            print_rows(rows)
            print(f"Recording alone: {tiny_us:.3f} us per parameter, of {N_TINY} in one bucket")
            print(f"Phases: {noting_us:.2f} us a step to note, {telling_us:.0f} us to tell, in 2 s")
            figures = {
                "rows": rows,
                "recording_us_per_parameter": round(tiny_us, 4),
                "phases_us": {"noting": round(noting_us, 3), "telling": round(telling_us, 1)},
            }
            report.write_results("timeline", figures, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    report.add_choices(parser, "--models", CASES, ("gpt2", "conv"))
    parser.add_argument("--rounds", type=report.several, default=20, help="rounds (20)")
    parser.add_argument("--steps", type=int, default=2, help="steps of each turn (2)")
    parser.add_argument(
        "--pairs", type=int, default=400, help="pairs of steps for the recording alone (400)"
    )
    return report.parse(parser)


def measure(comm: Any, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Collective. One model's row: the step, and what recording adds to it."""
    model, batch = CASES[name].make(comm.rank)
    reducer = fastcomm.Reducer(comm).attach(model)
    step = CASES[name].training_step(model, batch)
    for _ in range(WARM_UP_STEPS):
        step()
    samples: dict[str, list[float]] = {state: [] for state in STATES}
    for number in range(options.rounds):
        for state in turns.order_of(STATES, number):
            samples[state].append(turn_ms(comm, reducer, state, step, options.steps))
    reducer.detach()
    costs = {
        state: [a - b for a, b in zip(samples[state], samples["off"], strict=True)]
        for state in STATES[1:]
    }
    step_ms = statistics.median(samples["off"])
    return {
        "model": name,
        "step_ms": round(step_ms, 3),
        "cost_ms": {state: round(statistics.median(cost), 4) for state, cost in costs.items()},
        "half_width_ms": {state: round(half_width(cost), 4) for state, cost in costs.items()},
        "predicted_us": PREDICTED_US.get(name),
    }


def turn_ms(
    comm: Any, reducer: fastcomm.Reducer, state: str, step: Callable[[], None], n_steps: int
) -> float:
    """What a step takes on the slowest rank in this state."""
    timeline = reducer.timeline()
    timeline.start() if state == "on" else timeline.stop()
    comm.barrier()
    slowest = torch.tensor([sum(turns.time_calls(step, n_steps)) / n_steps / 1e6])
    comm.all_reduce(slowest, "max")
    return slowest.item()


def half_width(samples: list[float]) -> float:
    """Of an interval around their median that holds the true one in 95 of 100 cases: 1.253 is what
    the median of a normal distribution scatters more than its mean.
    """
    return 1.96 * 1.253 * statistics.stdev(samples) / math.sqrt(len(samples))


def recording_us(n_pairs: int) -> float:
    """CPU time of this thread that recording takes, per parameter of the tiny model: one rank, so
    that nobody waits. The median over pairs of steps.
    """
    model, differences = TinyParameters(N_TINY), []
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        with fastcomm.init("shm", init_method=meeting, rank=0, world_size=1) as comm:
            reducer = fastcomm.Reducer(comm).attach(model)
            timeline = reducer.timeline()
            gc.disable()
            for _ in range(n_pairs):
                timeline.stop()
                without = step_us(model)
                timeline.start()
                differences.append(step_us(model) - without)
            gc.enable()
            reducer.detach()
    return statistics.median(differences) / N_TINY


def phases_us(comm: Any) -> tuple[float, float]:
    """Collective. The medians of what a step's phases take to note, and to tell the other ranks."""
    stragglers = Stragglers()
    stragglers.use(comm)
    stragglers.begin(0)
    of_a_step = (BACKWARD, WAITING, OTHER, WAITING, OPTIMIZER, OTHER)

    def note() -> None:
        for phase in of_a_step:
            stragglers.phases.enter(phase)

    noting = turns.time_calls(note, N_TINY)
    telling = turns.time_calls(lambda: stragglers.tell(stragglers.due_at), N_TINY)
    return statistics.median(noting) / 1e3, statistics.median(telling) / 1e3


def step_us(model: nn.Module) -> float:
    model.zero_grad()
    begin = time.thread_time_ns()
    model().backward()
    return (time.thread_time_ns() - begin) / 1e3


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(
        [
            Column(12, ("model",), "<"),
            Column(10, ("step ms",)),
            Column(20, ("on, ms",)),
            Column(20, ("off again, ms",)),
            Column(10, ("on, %",)),
            Column(14, ("predicted us",)),
        ]
    )
    table.print_head()
    for row in rows:
        both = [f"{row['cost_ms'][s]:+.3f} +- {row['half_width_ms'][s]:.3f}" for s in STATES[1:]]
        share = f"{100 * row['cost_ms']['on'] / row['step_ms']:+.2f}"
        predicted = f"{row['predicted_us'] or math.nan:.0f}"
        table.print_row([row["model"], f"{row['step_ms']:.1f}", *both, share, predicted])
    tables.print_bars(map(bar_of, rows))


def bar_of(row: dict[str, Any]) -> tables.Bar:
    """Decided only where all of the interval around the cost lies on one side."""
    cost, about, step = row["cost_ms"]["on"], row["half_width_ms"]["on"], row["step_ms"]
    is_met = None
    if abs(cost - MOST * step) > about:
        is_met = cost <= MOST * step
    return tables.Bar(
        f"{row['model']}: at most {MOST:.0%} while it is on",
        f"{100 * cost / step:+.2f}% +- {100 * about / step:.2f}%",
        is_met,
    )


if __name__ == "__main__":
    sys.exit(main())
