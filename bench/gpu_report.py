"""What a run of ci/gpu.sh has shown: as one JSON file, and as Markdown for the documents.

    python bench/gpu_report.py bench/results                   print the Markdown
    python bench/gpu_report.py bench/results --steps FILE      write gpu-summary.json first

FILE has a line for each step of ci/gpu.sh: its name, outcome, seconds and the last line that it
printed, with tabs in between. The documents say "measured on" by what is printed here, only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib import machine

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = "gpu-summary.json"
NOT_YET = "**Nothing here has run on a GPU yet.**"
WAYS = {  # of bench/step.py, by the heading of their column
    "local": "local step",
    "fastcomm": "fastcomm",
    "ddp": "DDP",
    "ddp_views": "DDP, bucket views",
    "fastcomm_bf16": "fastcomm, bf16 wire",
    "ddp_bf16": "DDP, bf16 hook",
    "fastcomm_int8": "fastcomm, int8 wire",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the results lie")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="what the steps came to")
    options = parser.parse_args()
    if options.steps is not None:
        summary = {"machine": this_machine(), "steps": list(read_steps(options.steps))}
        (options.folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    print(page(options.folder), overheads(options.folder), sep="\n\n")


def this_machine() -> dict[str, object]:
    return machine.describe() | {
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return next(iter(done.stdout.splitlines()), "unknown")


def read_steps(path: Path) -> Iterator[dict[str, object]]:
    for line in path.read_text().splitlines():
        name, outcome, seconds, last = line.split("\t", 3)
        yield {"name": name, "outcome": outcome, "seconds": int(seconds), "last line": last}


def page(folder: Path) -> str:
    """Markdown for docs/lab/notebook.md: what ran, what each way adds to a step, the kernels."""
    if not (folder / SUMMARY).is_file():
        return NOT_YET
    summary = json.loads((folder / SUMMARY).read_text())
    on = summary["machine"]
    lines = [
        f"Run on {on['gpu']}, driver {on['driver']}, NCCL {on['nccl']}, torch {on['torch']},",
        f"at commit {on['commit']} on {on['date'][:10]}, by `bash ci/gpu.sh`:\n",
        *_outcomes_of(summary["steps"]),
        "\nWhat a step of one rank takes, and what each way adds, in ms:\n",
        *_overheads_of(folder / "step-cuda.json", WAYS),
        *_bars_of(folder / "flatten.json"),
    ]
    return "\n".join(lines)


def overheads(folder: Path) -> str:
    """Markdown for docs/gpu.md: what fastcomm and DDP add to a training step."""
    ways = {way: WAYS[way] for way in ("local", "fastcomm", "ddp", "ddp_views")}
    return "\n".join(_overheads_of(folder / "step-cuda.json", ways))


def _outcomes_of(steps: list[dict[str, Any]]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for step in steps:
        names.setdefault(step["outcome"], []).append(step["name"])
    for outcome, of in names.items():
        yield f"- {outcome}: {', '.join(of)}"


def _overheads_of(path: Path, ways: dict[str, str]) -> Iterator[str]:
    found = _read(path)
    if not found:
        return
    yield f"| {found['machine']['gpu']} | {' | '.join(ways.values())} |\n|---|{len(ways) * '---|'}"
    for model in found["models"].values():
        added = model["overhead_ms"] | {"local": model["quartiles_ms"]["local"][1]}
        cells = (f"{added[way]:.2f}" if way in added else "" for way in ways)
        yield f"| {model['model']} | {' | '.join(cells)} |"


def _bars_of(path: Path) -> Iterator[str]:
    bars = _read(path).get("bars")
    if bars:
        missed = [f"{bar['what']} ({bar['figure']})" for bar in bars if not bar["is_met"]]
        n_met = len(bars) - len(missed)
        said = f"The kernels met {n_met} of {len(bars)} targets; missed: "
        yield "\n" + textwrap.fill(f"{said}{', '.join(missed) or 'none'}.", 100)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


if __name__ == "__main__":
    main()
