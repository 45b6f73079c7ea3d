"""Runs generated programs for as long as it is told to: `make soak`, or

    python -m tests.programs --minutes 10 --seed random

Prints how many ran over each transport, and the least program that fails, with which it ends.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the ranks

from tests.programs import batches
from tests.programs.batches import STRATEGIES, Failed, find_failure
from tests.support.ranks import Ranks
from tests.support.transports import TRANSPORTS, TRANSPORTS_OVER_TORCH

BATCH = 50
PATIENCE = 5  # times the limit of the suite's programs: in an hour a machine may be very busy once


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", default="random", help="a number, or `random`")
    transports = (*TRANSPORTS, *TRANSPORTS_OVER_TORCH)
    parser.add_argument("--transports", nargs="+", default=transports, choices=transports)
    parser.add_argument("--kinds", nargs="+", default=[*STRATEGIES], choices=[*STRATEGIES])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed == "random" else int(options.seed)
    print(f"seed {seed}", flush=True)
    cells = itertools.product(options.ranks, options.transports, options.kinds)
    deadline = time.monotonic() + 60 * options.minutes
    counts: collections.Counter[str] = collections.Counter()
    ranks = Ranks()
    batches.PROGRAM_LIMIT_S *= PATIENCE
    failure = None
    try:
        for i, (n_ranks, transport, kind) in enumerate(itertools.cycle([*cells])):
            if time.monotonic() > deadline:
                break
            counts[transport] += find_failure(ranks, kind, n_ranks, transport, BATCH, seed + i)
    except Failed as error:
        failure = error
    finally:
        ranks.close()
    print(", ".join(f"{transport}: {count} programs" for transport, count in counts.items()))
    if failure is not None:
        print(failure)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
