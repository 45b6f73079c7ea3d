"""Whether narrow wires between hosts cost accuracy: the demo's model trained from several seeds
over each wire, and the loss it ends with beside the spread of float32's.

    python bench/wire_loss.py                                     5 seeds of a small model
    python bench/wire_loss.py --layers 4 --width 448              as large as the demo's

Ranks of this host take each other for those of two hosts, so that gradients take the way between
hosts. One seed means the same model and the same batches over every wire. A run's loss is the mean
over its last 10 steps. Exits with 1 unless every wire's mean over the seeds lies between the
smallest and the largest loss of float32, and all ranks end with the same bits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lib import launch, machine, report
from lib.tables import Column, Table

import fastcomm

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
corpus, gpt, demo = map(importlib.import_module, ("corpus", "gpt", "train_gpt"))

WIRES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire_dtype": torch.bfloat16},
    "int8": {"wire_dtype": torch.int8},
    "float8": {"wire_dtype": torch.float8_e4m3fn},
    "bfloat16_feedback": {"wire_dtype": torch.bfloat16, "error_feedback": True},
    "int8_feedback": {"wire_dtype": torch.int8, "error_feedback": True},
    "float8_feedback": {"wire_dtype": torch.float8_e4m3fn, "error_feedback": True},
}
LAST = 10  # steps


def main() -> int:
    options = parse_options()
    launch.exit_on_sigterm()
    wires = ["float32", *(wire for wire in options.wires if wire != "float32")]
    arguments = ["--as-rank", str(options.layers), str(options.width)]
    losses: dict[str, list[float]] = {wire: [] for wire in wires}
    apart = 0.0
    os.environ["TQDM_DISABLE"] = "1"  # in the ranks
    with launch.Ranks(Path(__file__).resolve(), options.ranks, arguments=arguments) as ranks:
        runs = [(seed, wire) for seed in range(options.seeds) for wire in wires]
        for seed, wire in report.tracked(runs, "training"):
            answers = ranks.call("train", wire=wire, seed=seed, steps=options.steps)
            losses[wire].append(answers[0][0])
            apart = max(apart, *(difference for _, difference in answers))
    print(f"# {machine.summary()}")
    print(
        f"# {options.ranks} ranks, {options.layers} layers of width {options.width}, "
        f"{options.steps} steps, {options.seeds} seeds; largest difference of a parameter between "
        f"ranks: {apart:g}"
    )
    table_of(losses).print()
    if options.json is not None:
        Path(options.json).write_text(json.dumps({"losses": losses, "apart": apart}, indent=1))
    return 0 if apart == 0 and all(within(losses).values()) else 1


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="(5)")
    parser.add_argument("--steps", type=int, default=100, help="of a run (100)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    parser.add_argument("--width", type=int, default=128, help="of the model (128)")
    parser.add_argument("--ranks", type=int, default=2, help="of two hosts, in turn (2)")
    parser.add_argument(
        "--wires", nargs="+", choices=WIRES, default=list(WIRES), help="beside float32 (all)"
    )
    parser.add_argument("--json", metavar="FILE", help="the losses")
    options = parser.parse_args()
    if options.seeds < 2 or options.steps < LAST or options.ranks < 2:
        parser.error(f"at least 2 seeds, {LAST} steps and 2 ranks")
    return options


def within(losses: Mapping[str, Sequence[float]]) -> dict[str, bool]:
    """By wire: whether its mean lies in the spread of float32's seeds."""
    least, most = min(losses["float32"]), max(losses["float32"])
    return {wire: least <= statistics.mean(some) <= most for wire, some in losses.items()}


def table_of(losses: Mapping[str, Sequence[float]]) -> Table:
    columns = [Column(20, ("wire",), "<"), Column(9, ("mean",)), Column(9, ("least",))]
    columns += [Column(9, ("most",)), Column(22, ("to float32, by seed",))]
    table = Table([*columns, Column(10, ("within",))])
    for wire, is_within in within(losses).items():
        some = losses[wire]
        differences = [its - theirs for its, theirs in zip(some, losses["float32"], strict=True)]
        figures = (statistics.mean(some), min(some), max(some))
        table.rows.append(
            [
                wire,
                *(f"{figure:.4f}" for figure in figures),
                f"{min(differences):+.4f} to {max(differences):+.4f}",
                "yes" if is_within else "no",
            ]
        )
    return table


# -- the ranks -------------------------------------------------------------------------------------


class Methods:
    """What a rank does when it is called."""

    def __init__(self, rank: int, layers: int, width: int) -> None:
        self.comm = fastcomm.init(
            "hierarchical",
            init_method=f"file://{launch.scratch()}/ranks",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        self.text = corpus.standard_library()
        self.layers, self.width = layers, width

    def train(self, wire: str, seed: int, steps: int) -> tuple[float, float]:
        """The loss at the end, and how far a parameter is from that of another rank."""
        torch.manual_seed(seed)
        model = gpt.GPT(self.layers, self.width)
        generator = torch.Generator().manual_seed(1000 * (1 + seed) + self.comm.rank)
        reducer = fastcomm.Reducer(self.comm, **WIRES[wire]).attach(model)
        losses = demo.train(reducer, model, self.text, generator, steps)
        apart = demo.parameter_difference(self.comm, model)
        reducer.detach()
        return statistics.mean(losses[-LAST:]), apart


def run_rank(layers: int, width: int) -> None:
    launch.die_with_parent()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.environ |= {"FASTCOMM_HOST_ID": f"host {rank % 2}", "GLOO_SOCKET_IFNAME": "lo"}
    launch.serve(rank, Methods(rank, layers, width))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(*map(int, sys.argv[2:4]))
    else:
        sys.exit(main())
