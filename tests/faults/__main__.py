"""Strikes trainings by as many faults as it is told to: `make faults`, or

    python -m tests.faults --faults 300 --seed random

Prints for each transport and kind of fault how many there were, how many ranks hung or came out of
it otherwise than they should, and how long it took until the last rank heard of it, or with
--go-on had made a step without the lost one. Ends with 1 if
there was any trouble; a late rank is none, as other load may be the reason.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import statistics
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the ranks

from tests.faults.faults import ENDINGS, KINDS, Fault, Verdict, strike
from tests.support.transports import EVERY_TRANSPORT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", default="random", help="a number, or `random`")
    parser.add_argument("--transports", nargs="+", default=EVERY_TRANSPORT, choices=EVERY_TRANSPORT)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--go-on", action="store_true", help="by elastic(): the others must go on")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed == "random" else int(options.seed)
    print(f"seed {seed}", flush=True)
    kinds = ENDINGS if options.go_on else options.kinds
    cells = itertools.cycle(itertools.product(options.transports, kinds))
    verdicts: dict[tuple[str, str], list[Verdict]] = collections.defaultdict(list)
    for i, cell in enumerate(itertools.islice(cells, options.faults)):
        verdict = strike(Fault.drawn(seed + i, *cell, options.go_on))
        verdicts[cell].append(verdict)
        if verdict.trouble is not None:
            print(f"{verdict.fault}\n  {verdict.trouble}", flush=True)
    for (transport, kind), some in verdicts.items():
        print(f"{transport:<13}{kind:<22}{in_words(some)}")
    troubles = [one for some in verdicts.values() for one in some if one.trouble is not None]
    print(f"{options.faults} faults, {len(troubles)} of them with trouble")
    return int(bool(troubles))


def in_words(verdicts: list[Verdict]) -> str:
    n_bad = sum(one.trouble is not None for one in verdicts)
    words = f"{len(verdicts):5} faults, {n_bad} with trouble"
    latencies = [one.latency_s for one in verdicts if one.latency_s is not None]
    if latencies:
        median, worst = statistics.median(latencies), max(latencies)
        n_late = sum(one.is_late for one in verdicts)
        words += f", {n_late} late; heard of after {1e3 * median:.0f} ms (median)"
        words += f", {1e3 * worst:.0f} ms (worst)"
    return words


if __name__ == "__main__":
    sys.exit(main())
