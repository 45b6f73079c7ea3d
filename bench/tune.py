"""What bucket size, how often to synchronise, which wire: predicted for a model on this machine, or
on one that a TOML file describes, by the model of a step that Reducer(bucket_cap_mb="auto") uses.

    python -m fastcomm tune                                 GPT-2 small, two ranks of this machine
    python -m fastcomm tune --model transformer --measure   and measures what it predicts
    python -m fastcomm tune --machine cluster.toml --ranks 64

The step's parts and the gradients' times are measured on this machine, without communication;
[step] of a TOML file overrides how long the parts are. docs/scaling.md says what the file holds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib import launch, report, turns
from lib import machine as this_machine
from lib.models import CASES
from lib.step_profile import Profile
from lib.tables import Column, Table
from simulate_rank import CALIBRATED_RANKS, SCRIPT, costs_of

from fastcomm.insight import machine as machines
from fastcomm.insight.advice import (
    CHEAP,
    DEFAULT_CAP_MB,
    WORTHWHILE,
    Choice,
    choose_cap,
    sweep,
    sync_every,
    wire_gain,
)
from fastcomm.insight.machine import Machine
from fastcomm.insight.step_model import LocalStep, Prediction, predict_on
from fastcomm.insight.transport import link_of

WIRE_PAYS = 0.05  # of the step, for less nobody rounds gradients


def main() -> int:
    options = parse_options()
    launch.exit_on_sigterm()
    with launch.Ranks(SCRIPT, CALIBRATED_RANKS) as ranks:
        profile = Profile(*ranks.call("profile", model=options.model, steps=options.steps)[0])
        on = options.machine or this_machine_of(ranks)
    step = profile.step().lasting(on.step)
    predictions = sweep(on, options.ranks, step, profile.plan)
    measured = measure(predictions, options) if options.measure else {}
    found = figures(predictions, measured, options)
    print(f"{CASES[options.model].description}, {options.ranks} ranks, {on.name}")
    table_of(found).print()
    found |= advise(predictions, on, step, profile, options.ranks)
    print("\n" + "\n".join(found["advice"]))
    report.write_results("tune", found, options)
    return 0


def table_of(results: Mapping[str, Any]) -> Table:
    columns = [("MB", 7), ("buckets", 9), ("step (ms)", 11), ("communication (ms)", 20)]
    columns += [("exposed (ms)", 14)]
    names = ["predicted_ms", "communication_ms", "exposed_ms"]
    if results["rows"][0]["measured_ms"] is not None:
        columns, names = [*columns, ("measured (ms)", 15)], [*names, "measured_ms"]
    table = Table([Column(width, (title,)) for title, width in columns])
    for row in results["rows"]:
        times = [f"{row[name]:.1f}" for name in names]
        table.rows.append([f"{row['cap_mb']:g}", str(row["buckets"]), *times])
    return table


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__, prog="python -m fastcomm tune")
    parser.add_argument("--model", choices=tuple(CASES), default="gpt2", help="(gpt2)")
    parser.add_argument("--ranks", type=int, metavar="N", default=2, help="(2)")
    parser.add_argument("--machine", type=Path, metavar="TOML", help="default: this machine")
    parser.add_argument("--measure", action="store_true", help="measure each size, too, here")
    parser.add_argument("--rounds", type=int, default=5, help="of measured steps (5)")
    parser.add_argument("--steps", type=int, default=5, help="that are profiled (5)")
    options = report.parse(parser)
    if options.measure and options.machine is not None:
        parser.error("--measure is for this machine: leave --machine out")
    if options.machine is not None:
        try:
            options.machine = machines.read(options.machine)
        except ValueError as error:
            parser.error(f"--machine {error}")
    return options


def this_machine_of(ranks: launch.Ranks) -> Machine:
    """This machine, from what two ranks of it measure."""
    link = link_of(costs_of(ranks), "direct", CALIBRATED_RANKS)
    cores = this_machine.cores()
    return Machine(link, algorithm="direct", cores=cores, name=f"this machine, {cores} cores")


def measure(
    predictions: Mapping[float, Prediction], options: argparse.Namespace
) -> dict[float, float]:
    """Seconds of a step by size: medians of the slowest rank's."""
    with launch.Ranks(SCRIPT, options.ranks) as ranks:
        answers = ranks.call(
            "steps", model=options.model, caps=list(predictions), rounds=options.rounds, steps=1
        )
    slowest = turns.slowest(answers)
    return {
        cap: statistics.median(row[way] for row in slowest)
        for way, cap in enumerate(predictions, 1)
    }


def advise(
    predictions: Mapping[float, Prediction],
    on: Machine,
    step: LocalStep,
    profile: Profile,
    ranks: int,
) -> dict[str, Any]:
    """What the model says, as figures and in words."""
    choice = choose_cap({cap: one.seconds for cap, one in predictions.items()})
    plan = profile.plan(choice.cap_mb)
    every = sync_every(predict_on(on, ranks, step, plan), step.crowded(on.crowding(ranks)))
    gain = wire_gain(on, ranks, step, plan)
    words = [
        f"bucket_cap_mb={choice.cap_mb:g}: {why_size(choice)}",
        f"synchronise every {every} backward{'s' if every > 1 else ''}: communication then takes "
        f"at most {CHEAP:.0%}{'' if every < 32 else ', or is as rare as is sensible'}",
        f"wire: {why_wire(on, gain)}",
    ]
    advice = {"cap_mb": choice.cap_mb, "every": every, "wire_gain": round(gain, 4)}
    return advice | {"advice": words}


def why_size(choice: Choice) -> str:
    if choice.cap_mb == DEFAULT_CAP_MB:
        return f"the default; no other size saves {WORTHWHILE:.0%}"
    return f"{choice.gain:.1%} less than with the default"


def why_wire(on: Machine, gain: float) -> str:
    if on.algorithm == "direct":
        return "the gradients' own dtype; in shared memory fewer bits save nothing"
    wire = "bfloat16" if gain >= WIRE_PAYS else "the gradients' own dtype"
    return f"{wire}; 16 bits save {gain:.1%} of the step"


def figures(
    predictions: Mapping[float, Prediction],
    measured: Mapping[float, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    rows = [
        {
            "cap_mb": cap,
            "buckets": len(one.buckets),
            "predicted_ms": round(1e3 * one.seconds, 3),
            "communication_ms": round(1e3 * one.communication_s, 3),
            "exposed_ms": round(1e3 * one.exposed_s, 3),
            "measured_ms": round(1e3 * measured[cap], 3) if measured else None,
        }
        for cap, one in predictions.items()
    ]
    return {"model": options.model, "ranks": options.ranks, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
