"""Validates the model of a step (fastcomm.insight.step_model), and says by it what a step takes on
up to 1,024 ranks.

    python -m fastcomm bench simulate            predicts, then measures, 2 to 6 ranks; then scales
    python -m fastcomm bench simulate --wire shm --models mlp --ranks 2 4
    python -m fastcomm bench simulate --only scaling --machine bench/machines/v100.toml

Over shared memory ("shm"), and between hosts that are network namespaces with limited links
("network": needs root's rights, and runs from the source tree only). Two ranks are calibrated: what
a step takes without communication, when its gradients are ready, and what an all-reduce costs. From
these the model predicts the step on each number of ranks and with each bucket size. All predictions
are printed before the same steps are measured. A measured step is the median over rounds of the
slowest rank's.

Expected, before the first run: a median error under 15% of the step. More where many ranks share
few cores, which the model takes to be perfectly fair; less of the step and more of the overhead
where communication is small.

The scaling is of ResNet-50 on the machine of a TOML file, beside what was published: see PUBLISHED.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lib import launch, report, turns
from lib import machine as this_machine
from lib.models import CASES, resnet50
from lib.places import places_of
from lib.step_profile import Profile
from lib.tables import Column, Table
from simulate_rank import AUTO, CALIBRATED_RANKS, SCRIPT, costs_of

from fastcomm.insight import machine as machines
from fastcomm.insight.advice import EVERY, sweep, sync_every, wire_gain
from fastcomm.insight.machine import Machine
from fastcomm.insight.step_model import predict_on, predict_sharded, seconds_every
from fastcomm.insight.transport import link_of

sys.path.append(str(Path(__file__).resolve().parent.parent))
try:
    from tests.support import namespaces
except ModuleNotFoundError:  # installed
    namespaces = None  # type: ignore[assignment]

V100 = Path(__file__).resolve().parent / "machines" / "v100.toml"
SCALES = tuple(1 << exponent for exponent in range(11))
GOAL = 0.15
# Seconds of a step with DDP over NCCL, by GPUs, median; "local": without DDP.
PUBLISHED = {
    "source": "PyTorch's benchmarks/distributed/ddp/README.md: ResNet-50, 32 images for each V100, "
    "servers of 8 with four links of 100 Gbit/s",
    "local_s": 0.097,
    "step_s": {1: 0.100, 2: 0.103, 4: 0.103, 8: 0.104, 16: 0.104},
    "paper": "PyTorch Distributed (VLDB 2020), abstract: near-linear scalability using 256 GPUs",
    "left_out": "Figure 9's own values: its plots have no table, and none could be verified",
}
TITLES = {"shm": "Ranks of one host", "network": "Two hosts"}
COLUMNS = (
    ("model", 14, "<"),
    ("ranks", 7, ">"),
    ("MB", 6, ">"),
    ("predicted", 11, ">"),
    ("measured", 10, ">"),
    ("ratio", 7, ">"),
    ("overhead", 10, ">"),
    ("measured", 10, ">"),
)
Row = dict[str, Any]


def main() -> int:
    options = parse_options()
    launch.exit_on_sigterm()
    figures: dict[str, Any] = {}
    if options.only != "scaling":
        rows, choices = [], []
        for wire in wires(options):
            more_rows, more_choices = validate(wire, options)
            rows += more_rows
            choices += more_choices
        if not rows:
            return 2  # wires() has said why
        figures |= {"validation": rows, "auto": choices, "errors": print_errors(rows)}
        print_choices(choices)
    if options.only != "validation":
        figures["scaling"] = scale(options.machine)
    print(f"\n{this_machine.summary()}")
    report.write_results("simulate", figures, options)
    return 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("--only", choices=("validation", "scaling"), help="do one of the two")
    parser.add_argument(
        "--wire", choices=("shm", "network", "both"), default="both", help="to validate on (both)"
    )
    report.add_choices(parser, "--models", CASES, ("mlp", "transformer"))
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 3, 4, 5, 6), metavar="N")
    parser.add_argument(
        "--caps", nargs="+", type=float, default=(1, 5, 25, 100), metavar="MB", help="bucket sizes"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of measured steps (5)")
    parser.add_argument("--steps", type=int, default=3, help="of each turn (3)")
    parser.add_argument("--rate", default="1gbit", help="of the links, as tc(8) writes it (1gbit)")
    parser.add_argument(
        "--machine",
        type=Path,
        default=V100,
        metavar="TOML",
        help="to scale on (machines/v100.toml)",
    )
    options = report.parse(parser)
    if min(options.ranks) < 2:
        parser.error("--ranks are at least 2: one rank does not communicate")
    if min(options.caps) <= 0:
        parser.error("--caps are sizes in MB, above 0")
    try:
        options.machine = machines.read(options.machine)
    except ValueError as error:
        parser.error(f"--machine {error}")
    return options


def wires(options: argparse.Namespace) -> list[str]:
    """Which can be measured here."""
    chosen = ["shm", "network"] if options.wire == "both" else [options.wire]
    why_not = namespaces.why_not() if namespaces else "run it in the source tree"
    if "network" in chosen and why_not is not None:
        print(f"Not measured over a network: {why_not}", file=sys.stderr)
        chosen.remove("network")
    return chosen


# ---- validation ----------------------------------------------------------------------------------


def validate(wire: str, options: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Predicts and measures; the calibrated ranks stay, so that each world size is predicted from
    what this machine was like just before it was measured. Also returns what "auto" comes to.
    """
    rows: list[Row] = []
    choices: list[Row] = []
    print(f"\n{TITLES[wire]}: a step in milliseconds")
    table = Table([Column(width, (title,), align) for title, width, align in COLUMNS])
    table.print_head()
    with ranks_of("shm", CALIBRATED_RANKS, options) as calibrated:
        for n in options.ranks:
            predicted = predict_all(wire, n, calibrated, options)
            for row in predicted:
                table.print_row(cells(row))
            with ranks_of(wire, n, options) as ranks:
                choices += measure_all(ranks, predicted, options)
            for row in predicted:
                table.print_row(cells(row))
            rows += predicted
    return rows, choices


def cells(row: Row) -> list[str]:
    """Of a row of the table, whose measured part may not be known yet."""
    measured = row.get("measured_ms")
    return [
        row["model"],
        str(row["ranks"]),
        f"{row['cap_mb']:g}",
        f"{row['predicted_ms']:.1f}",
        f"{measured:.1f}" if measured else "",
        f"{row['predicted_ms'] / measured:.2f}" if measured else "",
        f"{row['predicted_overhead_ms']:.1f}",
        f"{row['overhead_ms']:.1f}" if measured else "",
    ]


def predict_all(
    wire: str, ranks: int, calibrated: launch.Ranks, options: argparse.Namespace
) -> list[Row]:
    """Rows without what will be measured."""
    own = calibrate(wire, calibrated, ranks, options)
    rows = []
    for model in options.models:
        profile = Profile(*calibrated.call("profile", model=model, steps=10)[0])
        for cap in options.caps:
            prediction = predict_on(own, ranks, profile.step(), profile.plan(cap))
            rows.append(
                {
                    "wire": wire,
                    "model": model,
                    "ranks": ranks,
                    "cap_mb": cap,
                    "predicted_ms": round(1e3 * prediction.seconds, 2),
                    "predicted_overhead_ms": round(1e3 * prediction.communication_s, 2),
                }
            )
    return rows


def calibrate(
    wire: str, calibrated: launch.Ranks, ranks: int, options: argparse.Namespace
) -> Machine:
    """The machine that `ranks` ranks will find, from what two of them have."""
    host = link_of(costs_of(calibrated), "direct", CALIBRATED_RANKS)
    cores = this_machine.cores()
    if wire == "shm":
        return Machine(host, algorithm="direct", cores=cores)
    with ranks_of("network", 2, options) as pair:
        network = link_of(costs_of(pair), "exchange", 2)
    # The two hosts share this machine's cores.
    return Machine(
        host,
        network,
        "hierarchical",
        ranks_per_host=max(hosts_of(ranks)),
        cores=max(1, cores // 2),
    )


def measure_all(ranks: launch.Ranks, rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """Completes the rows. Returns for each model what a step takes with bucket_cap_mb="auto"."""
    choices = []
    for model in options.models:
        answers = ranks.call(
            "steps",
            model=model,
            caps=[*options.caps, AUTO],
            rounds=options.rounds,
            steps=options.steps,
        )
        slowest = turns.slowest(answers)
        mine = [row for row in rows if row["model"] == model]
        for way, row in enumerate(mine, 1):
            row["measured_ms"] = round(1e3 * statistics.median(r[way] for r in slowest), 2)
            over = statistics.median(r[way] - r[0] for r in slowest)
            row["overhead_ms"] = round(1e3 * over, 2)
        by_cap = {row["cap_mb"]: way for way, row in enumerate(mine, 1)}
        auto = {"model": model, "ranks": ranks.world_size, "wire": mine[0]["wire"]}
        auto["chosen_mb"] = ranks.call("chosen")[0]
        for against, way in by_cap.items():
            # paired, as a drift of the machine meets all ways of a round
            ratio = statistics.median(r[-1] / r[way] for r in slowest)
            auto[f"over_{against:g}"] = round(ratio, 3)
        choices.append(auto)
    return choices


def hosts_of(ranks: int) -> list[int]:
    """Two hosts, whose ranks are as equal as can be."""
    return [ranks - ranks // 2, ranks // 2]


@contextlib.contextmanager
def ranks_of(wire: str, n: int, options: argparse.Namespace) -> Iterator[launch.Ranks]:
    if wire == "shm":
        with launch.Ranks(SCRIPT, n) as ranks:
            yield ranks
        return
    with namespaces.Hosts(hosts_of(n), rate=options.rate) as hosts:
        arguments = [json.dumps(places_of(hosts))]
        with launch.Ranks(SCRIPT, n, arguments=arguments) as ranks:
            yield ranks


def print_errors(rows: Sequence[Row]) -> Row:
    """The medians of what the predictions are off by, as parts of the measured step."""
    off: dict[str, list[float]] = {**{row["wire"]: [] for row in rows}, "all": []}
    for row in rows:
        for name in (row["wire"], "all"):
            off[name].append(abs(row["predicted_ms"] / row["measured_ms"] - 1))
    errors: Row = {name: round(statistics.median(parts), 3) for name, parts in off.items()}
    by_wire = ", ".join(f"{wire} {error:.1%}" for wire, error in errors.items())
    verdict = "met" if errors["all"] <= GOAL else "NOT met"
    print(f"\nmedian error of the predicted step: {by_wire} (goal {GOAL:.0%}: {verdict})")
    return errors


def print_choices(choices: Sequence[Row]) -> None:
    print("\na step with bucket_cap_mb=auto, as a part of that with a fixed size:")
    for row in choices:
        parts = [f"{name[5:]} MB: {row[name]:.2f}" for name in row if name.startswith("over_")]
        setting = f"{row['model']}, {row['ranks']} ranks, {row['wire']}"
        print(f"  {setting}, chose {row['chosen_mb']:g} MB: {', '.join(parts)}")


# ---- scaling -------------------------------------------------------------------------------------


def spread_over_tensors(sizes: Sequence[int], parts: Mapping[str, float]) -> Profile:
    """A step whose gradients become ready evenly over the backward, the last tensor's first."""
    backward_s = parts["backward"]
    ready = [backward_s * (len(sizes) - i) / len(sizes) for i in range(len(sizes))]
    return Profile(parts["forward"], backward_s, parts["optimizer"], ready, sizes)


def scale(on: Machine) -> Row:
    """ResNet-50 on 1 to 1,024 ranks of a machine, by algorithm."""
    parts = {"forward": 0.031, "backward": 0.064, "optimizer": 0.002, **on.step}
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in resnet50().parameters()]
    profile = spread_over_tensors(sizes, parts)
    step, plan = profile.step(), profile.plan(25)
    print(f"\nResNet-50 on {on.name}: a step in ms, buckets of 25 MB")
    names = ("ring", "tree", "hierarchical", "sharded", "published")
    table = Table([Column(7, ("ranks",)), *(Column(14, (name,)) for name in names)])
    table.print_head()
    rows = []
    for ranks in SCALES:
        seconds = {
            algorithm: predict_on(replace(on, algorithm=algorithm), ranks, step, plan).seconds
            for algorithm in names[:3]
        }
        ring = replace(on, algorithm="ring")
        seconds["sharded"] = predict_sharded(ring, ranks, step, plan).seconds
        published = PUBLISHED["step_s"].get(ranks)  # type: ignore[attr-defined]
        table.print_row(
            [
                str(ranks),
                *(f"{1e3 * seconds[name]:.1f}" for name in names[:4]),
                f"{1e3 * published:.0f}" if published else "",
            ]
        )
        row = {name: round(value, 6) for name, value in seconds.items()}
        rows.append({"ranks": ranks, **row, "published": published})
    print(f"  published: {PUBLISHED['source']}\n  {PUBLISHED['left_out']}")
    return {"machine": on.name, "local_s": step.seconds, "rows": rows, "published": PUBLISHED} | {
        "advice": advise(on, SCALES[-1], profile)
    }


def advise(on: Machine, ranks: int, profile: Profile) -> Row:
    step = profile.step()
    by_cap = {cap: one.seconds for cap, one in sweep(on, ranks, step, profile.plan).items()}
    best = min(by_cap, key=lambda cap: by_cap[cap])
    prediction = predict_on(on, ranks, step, profile.plan(best))
    every = sync_every(prediction, step)
    gain = wire_gain(on, ranks, step, profile.plan(best))
    print(
        f"On {ranks} ranks: buckets of {best:g} MB; synchronise every {every} backwards and "
        f"communication takes at most 5%; a 16-bit wire saves {gain:.0%} of the step"
    )
    by_every = {n: round(seconds_every(prediction, step, n), 6) for n in EVERY}
    return {"ranks": ranks, "cap_mb": best, "every": every, "wire_gain": round(gain, 4)} | {
        "seconds_by_cap": {f"{cap:g}": round(value, 6) for cap, value in by_cap.items()},
        "seconds_by_every": by_every,
    }


if __name__ == "__main__":
    sys.exit(main())
