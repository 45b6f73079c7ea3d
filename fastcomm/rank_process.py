"""How a process of a rank begins that runner.py has started. Runs as a script, by its path, before
anything of fastcomm is imported; the rank itself is a script, or a call that launch() has packed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from multiprocessing import spawn
from pathlib import Path

is_importing = False  # the launcher's main module, where launch() is not to be called
_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, kind, what, *arguments = sys.argv[1:]
    # One that was killed by SIGKILL ends nobody: its ranks would train on, or wait, for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        sys.exit(f"the launcher, process {launcher}, has ended")
    if kind == "script":  # what was asked for above holds on
        os.execv(sys.executable, [sys.executable, "-u", what, *arguments])
    answer(Path(what))


def answer(folder: Path) -> None:
    """Makes the call that the folder holds, where its main module can be found again, as it can in
    a process of multiprocessing's.
    """
    preparation, packed = pickle.loads((folder / "call").read_bytes())
    global is_importing
    is_importing = True
    spawn.prepare(preparation)
    is_importing = False
    from fastcomm import runner

    runner.answer(folder, packed)


if __name__ == "__main__":
    main()
