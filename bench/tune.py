"""Measures on this machine what a step takes with buckets of a few sizes, which size
Reducer(bucket_cap_mb="auto") keeps, and where the time of a step goes with that size.

    python -m fastcomm tune                                GPT-2 small, two ranks
    python -m fastcomm tune --model transformer --ranks 4

A step's time is that of the slowest rank. docs/bucket_size.md says how the reducer measures.
"""

from __future__ import annotations

import argparse
import sys

from lib import harness, launch, report
from lib.models import CASES

import fastcomm


def main() -> int:
    options = parse_options()
    if harness.is_rank():
        with harness.joined() as comm:
            launch.serve(comm.rank, Methods(comm, options))
        return 0
    launch.exit_on_sigterm()
    with harness.started(__file__, options.ranks) as ranks:
        seconds, kept_mb, summary = ranks.call("tune")[0]
    print(f"{CASES[options.model].description}, {options.ranks} ranks")
    print("      MB   step (ms)")
    for cap_mb, step_s in sorted(seconds):
        print(f"{cap_mb:8g}{1e3 * step_s:12.1f}")
    why = "" if seconds else ", as other sizes give the same buckets"
    print(f"bucket_cap_mb={kept_mb:g}{why}\n\n{summary}")
    return 0


class Methods:
    """What the parent calls, on all ranks together."""

    def __init__(self, comm: fastcomm.Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options

    def tune(self) -> tuple[list[tuple[float, float]], float, str]:
        """Seconds of a step by size, the size that is kept, and where the time of a step goes."""
        case = CASES[self.options.model]
        model, batch = case.make(self.comm.rank)
        reducer = fastcomm.Reducer(self.comm, bucket_cap_mb="auto").attach(model)
        step = case.training_step(model, batch)
        while reducer.core.planner.is_measuring:
            step()
        timeline = reducer.timeline(steps=self.options.steps)
        for _ in range(self.options.steps):
            step()
        try:
            summary = timeline.summary()
        except ImportError as error:
            summary = str(error)
        return list(reducer.core.planner.seconds.items()), reducer.core.planner.cap_mb, summary


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__, prog="python -m fastcomm tune")
    parser.add_argument("--model", choices=tuple(CASES), default="gpt2", help="the model (gpt2)")
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="number of ranks (2)")
    parser.add_argument("--steps", type=int, metavar="N", default=10, help="summed up steps (10)")
    options = parser.parse_args()
    for name in ("ranks", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is at least 1; got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
