"""How a process of a rank begins that runner.py has started. Runs as a script, by its path, before
anything of fastcomm is imported; the rank itself is a script, or a call that launch() has packed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import types
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
    # By lines: Python without a buffer writes each argument of print() by itself, and the launcher
    # would take the pieces for lines.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    if kind == "script":
        run_script(what, arguments)
    else:
        answer(Path(what))


def run_script(path: str, arguments: list[str]) -> None:
    """Runs the script as Python itself would: as the main module, which stays until the process
    ends, with its folder first on sys.path.
    """
    script = types.ModuleType("__main__")
    script.__file__ = path
    sys.modules["__main__"] = script
    sys.argv = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # dont_inherit: the __future__ imports of this file are not the script's
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, script.__dict__)


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
