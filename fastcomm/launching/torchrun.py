"""torchrun as the demo and the benchmarks start it: Ctrl-C, or SIGTERM, ends it without a
traceback, and with 128 + the signal's number.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.run import main


def run() -> int:
    """Runs torchrun with this process's arguments; returns the exit status."""
    try:
        main()
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run())
