"""allreduce and step, one after the other and sized so that all take about three minutes,
and one page of their results.

    python -m fastcomm bench --report report.html
    python -m fastcomm bench --report report.html --ranks 4
    python -m fastcomm bench --from bench/results/*.json --report report.html   measures nothing

Each is a run of its own with fewer sizes, models and rounds than its defaults have; the page names
the commands. --json writes the results of all as one list, which --from takes, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lib import launch, machine, report
from lib.page import Results

# What makes each short.
SHORT = {
    "allreduce": ("-e", "64M", "-f", "8", "--peers", "gloo,mpi,backend"),
    "step": (
        *("--models", "mlp", "transformer", "conv", "--rounds", "6"),
        *("--ways", "local", "fastcomm", "backend", "ddp", "ddp_views"),
    ),
}
GRACE = 30.0  # seconds that a benchmark has to end its ranks


def main() -> int:
    options = parse_options()
    launch.exit_on_sigterm()
    print(f"# {machine.summary()}")
    print(f"# {', '.join(SHORT)}: together about three minutes on two cores", flush=True)
    all_results, failed = [], []
    try:
        for name, arguments in SHORT.items():
            print(f"\n== {name}", flush=True)
            status, text = run(name, [*arguments, "--ranks", str(options.ranks), "--json", "-"])
            if status != 0:
                failed.append(name)
            if text:
                all_results.append(json.loads(text))
    finally:  # also where the run is cut off
        print()
        if all_results:
            write(all_results, options)
    if failed:
        print(f"failed, see above: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def parse_options() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="number of ranks, on this machine (2)"
    )
    options = report.parse(parser)
    if options.plot is not None:
        parser.error("--plot is of one benchmark, or of results: --from FILE --plot FILE")
    if options.report is None and options.json is None:
        parser.error("where are the results to go? --report FILE.html, --json FILE or both")
    if options.ranks < 2:
        parser.error("--ranks is at least 2: one rank has no peers")
    return options


def run(name: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Its exit status and its results, if it has come to any. With them on its stdout, what it
    prints for people is on its stderr.
    """
    command = [sys.executable, str(Path(__file__).resolve().with_name(f"{name}.py")), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stdout, text=True) as process:
        try:
            text, _ = process.communicate()
            return process.returncode, text
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            raise


def write(all_results: Sequence[Results], options: argparse.Namespace) -> None:
    if options.json is not None:
        report.write_json(all_results, options.json, options)
    if options.report is not None:
        report.write_page(all_results, options.report)


if __name__ == "__main__":
    sys.exit(main())
