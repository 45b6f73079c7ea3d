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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib import machine
from lib.step_table import INT8_MS, SHARE_OF_DDP

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = "gpu-summary.json"
NOT_YET = "**Nothing here has run on a GPU yet.**"


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
    print(page(options.folder))


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
    """Markdown: the machine, the steps, and each bar of the benchmarks with its figure."""
    if not (folder / SUMMARY).is_file():
        return NOT_YET
    summary = json.loads((folder / SUMMARY).read_text())
    on = summary["machine"]
    lines = [
        f"Measured on {on['gpu']}, driver {on['driver']}, NCCL {on['nccl']}, torch {on['torch']},",
        f"at commit {on['commit']} on {on['date'][:10]}, by `bash ci/gpu.sh`:",
        "",
        "| step | outcome | seconds | its last line |",
        "|---|---|---|---|",
        *(
            f"| {step['name']} | {step['outcome']} | {step['seconds']} | {step['last line']} |"
            for step in summary["steps"]
        ),
    ]
    figures = [*_bars_of(folder / "flatten.json"), *_steps_of(folder / "step-cuda.json")]
    if figures:
        lines += ["", "| figure | measured | bar |", "|---|---|---|", *figures]
    return "\n".join(lines)


def _bars_of(path: Path) -> Iterator[str]:
    for bar in _read(path).get("bars", ()):
        yield f"| {bar['what']} | {bar['figure']} | {'met' if bar['is_met'] else 'NOT met'} |"


def _steps_of(path: Path) -> Iterator[str]:
    for name, result in _read(path).get("models", {}).items():
        for wire in ("", "_bf16"):
            share = result[f"fastcomm{wire}_share_of_ddp{wire}_overhead"]
            is_met = "met" if share <= SHARE_OF_DDP else "NOT met"
            what = f"{name}: a step's overhead, {'in bfloat16, ' if wire else ''}of DDP's over NCCL"
            yield f"| {what} | {share:.2f} | {is_met} |"
        if "int8_ms_per_100m" in result:
            what = (
                f"{name}: a wire of int8 adds for each 100 M parameters, on one card at most "
                f"{INT8_MS:g} ms"
            )
            is_met = "met" if result["int8_ms_per_100m"] <= INT8_MS else "NOT met"
            yield f"| {what} | {result['int8_ms_per_100m']:.2f} ms | {is_met} |"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


if __name__ == "__main__":
    main()
