"""What a step takes with buckets of a few sizes, which one Reducer(bucket_cap_mb="auto") keeps, and
where the time of a step goes with that: measured on this machine.

    python -m fastcomm tune                                GPT-2 small, two ranks
    python -m fastcomm tune --model transformer --ranks 4

A step's time is that of the slowest rank. docs/scaling.md says how the reducer measures.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

import torch
from lib import launch, report
from lib.models import CASES
from lib.tables import Column, Table

import fastcomm


def main() -> int:
    options = parse_options()
    if "RANK" not in os.environ:
        launch.become_ranks(options.ranks)
    torch.set_num_threads(1)
    case = CASES[options.model]
    with fastcomm.init("shm") as comm:
        model, batch = case.make(comm.rank)
        reducer = fastcomm.Reducer(comm, bucket_cap_mb="auto").attach(model)
        step = case.training_step(model, batch)
        while reducer.planner.is_measuring:
            step()
        timeline = reducer.timeline(steps=options.steps)
        for _ in range(options.steps):
            step()
        try:
            summary = timeline.summary()
        except ImportError as error:
            summary = str(error)
        if comm.rank == 0:
            print(f"{case.description}, {comm.world_size} ranks")
            print_sizes(reducer.planner.seconds, reducer.planner.cap_mb)
            print(f"\n{summary}")
    return 0


def print_sizes(seconds: Mapping[float, float], kept_mb: float) -> None:
    """seconds: of a step, by size."""
    table = Table([Column(8, ("MB",)), Column(12, ("step (ms)",))])
    table.rows += [[f"{cap:g}", f"{1e3 * seconds[cap]:.1f}"] for cap in sorted(seconds)]
    if seconds:
        table.print()
    why = "" if seconds else ", as other sizes give the same buckets"
    print(f"bucket_cap_mb={kept_mb:g}{why}")


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__, prog="python -m fastcomm tune")
    parser.add_argument("--model", choices=tuple(CASES), default="gpt2", help="(gpt2)")
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="(2)")
    parser.add_argument("--steps", type=int, metavar="N", default=10, help="in the summary (10)")
    options = parser.parse_args()
    for name in ("ranks", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is at least 1; got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
