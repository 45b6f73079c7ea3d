"""How a process of a rank begins and fails that runner.py has started. Runs as a script, by its
path, before anything of fastcomm is imported; the rank itself is a script, or a call that launch()
has packed.

The launcher ends all ranks as soon as one has ended. So a rank first leaves what it has raised in
the launcher's folder, and one that has merely lost another waits a while for that one to say why.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from multiprocessing import spawn
from pathlib import Path

is_importing = False  # the launcher's main module, where launch() is not to be called
_PR_SET_PDEATHSIG = 1
_OURS = Path(__file__).parent
_ADVICE = "Set TMPDIR to a folder that this user can write to, on a disk with room"
_PATIENCE_S = 10.0  # of a rank that has lost another, which may be on its way out


def main() -> None:
    launcher, path, *script = sys.argv[1:]
    folder = Path(path)
    # One that was killed by SIGKILL ends nobody: its ranks would train on, or wait, for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        sys.exit(f"the launcher, process {launcher}, has ended")
    for stream in (sys.stdout, sys.stderr):  # the launcher prints whole lines as they come
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if script:
            run_script(script)
        else:
            answer(folder)
    except SystemExit as end:
        if end.code:
            code = end.code & 0xFF if isinstance(end.code, int) else 1
            _report(folder, end, code, f"ended with exit code {code}")
            raise
    except Exception as error:
        _fail(folder, error, is_script=bool(script))
    try:
        _path(folder, "ended").touch()
    except OSError as unwritten:
        print(f"The launcher is not told of this end: {unwritten}. {_ADVICE}", file=sys.stderr)


def run_script(command: Sequence[str]) -> None:
    """Runs the script as Python itself would, as the main module until the process ends."""
    path = command[0]
    script = types.ModuleType("__main__")
    script.__file__ = path
    sys.modules["__main__"] = script
    sys.argv = list(command)
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # dont_inherit: the __future__ imports of this file are not the script's
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, script.__dict__)


def answer(folder: Path) -> None:
    """Makes the call that the folder holds, with the main module as multiprocessing imports it."""
    preparation, packed = pickle.loads((folder / "call").read_bytes())
    global is_importing
    is_importing = True
    spawn.prepare(preparation)
    is_importing = False
    from fastcomm.launching import runner

    runner.answer(folder, packed)


# -- how it fails ----------------------------------------------------------------------------------


def _fail(folder: Path, error: Exception, is_script: bool) -> None:
    """Ends the process. A script's error is printed here, and a call's by whoever launched it; so
    is that of a script which has merely lost another, as only the launcher knows the cause.
    """
    stack = error.__traceback__
    while stack is not None and Path(stack.tb_frame.f_code.co_filename).parent == _OURS:
        stack = stack.tb_next  # what the user wrote comes after what calls it
    error.__traceback__ = stack
    # As Python does: communicators that are still open tell their peers of it.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, stack
    summary = f"raised {type(error).__name__}: {error}"
    is_own_hook = sys.excepthook is not sys.__excepthook__
    if is_script and (is_own_hook or not _comes_of_another(error)):
        # Before it is reported, after which the launcher may end this process.
        sys.excepthook(type(error), error, stack)
        sys.stderr.flush()
        summary = summary.partition("\n")[0]
    else:
        summary += "\n" + "".join(traceback.format_exception(error)).rstrip()
    _report(folder, error, 1, summary)
    sys.exit(1)


def _report(folder: Path, error: BaseException, exit_code: int, how: str) -> None:
    """Leaves for the launcher how this rank has failed: a Raised of runner.py."""
    is_lost = _comes_of_another(error)
    # as who.Process says it: fastcomm may not be imported
    text = f"rank {os.environ['RANK']} (pid {os.getpid()}) {how}"
    # By a rename: the launcher, which may end this rank meanwhile, reads all of it, or nothing.
    written = _path(folder, "writing")
    try:
        written.write_text(json.dumps([time.time(), is_lost, exit_code, text]))
        written.rename(_path(folder, "raised"))
    except OSError as unwritten:
        print(f"{text}\nThe launcher is not told: {unwritten}. {_ADVICE}", file=sys.stderr)
    if is_lost:
        _wait_for_cause(folder)


def _comes_of_another(error: BaseException | None) -> bool:
    """Whether it, or what it was raised for, is an error that another rank has brought about."""
    errors = sys.modules.get("fastcomm.errors")
    while errors is not None and error is not None:
        if isinstance(error, errors.OF_ANOTHER_RANK):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _wait_for_cause(folder: Path) -> None:
    """Until a rank has failed by itself, or all have come to their end."""
    from fastcomm.comm.deadline import Deadline  # this rank has fastcomm by now
    from fastcomm.launching import runner

    deadline = Deadline(_PATIENCE_S)
    while not deadline.is_over():
        raised = runner.raised_in(folder)
        if len(raised) + len(runner.ended_in(folder)) == int(os.environ["WORLD_SIZE"]):
            return
        if not all(one.is_lost for one in raised.values()):
            return
        time.sleep(0.02)


def _path(folder: Path, what: str) -> Path:
    return folder / f"{what}-{os.environ['RANK']}"


if __name__ == "__main__":
    main()
