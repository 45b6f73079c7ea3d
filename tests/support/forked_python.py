"""Python as it is started from a shell, but forked from a process that has torch loaded: so are the
Python it becomes and those it starts in turn, by subprocess. What a program with two ranks takes is
mostly the import of torch otherwise, three times with its launcher's.

A child finds the modules that its parent has imported. All else is as after exec: the environment,
the arguments, file descriptors, signals, the exit status.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.bodies import Place
from tests.support.outcomes import values_of
from tests.support.rank_process import Environment
from tests.support.ranks import NO_VARIABLES, BodyOf, fresh_ranks

_start_process: Callable[..., None] = subprocess.Popen.__init__


def python(
    *arguments: str | Path, timeout: float = 270, **options: Any
) -> subprocess.CompletedProcess[str]:
    """How `python *arguments` has ended. For the options see `pythons`."""
    (done,) = pythons([arguments], timeout=timeout, **options)
    return done


def pythons(
    commands: Sequence[Sequence[str | Path]],
    *,
    env: Environment = NO_VARIABLES,
    imports: Sequence[str | Path] = (),
    timeout: float = 270,
) -> list[subprocess.CompletedProcess[str]]:
    """How each `python *command` has ended, one after the other. `env` is added to the environment;
    `imports`, of modules or of what a script imports, are done once for all of them.
    """
    texts = [[sys.executable, *map(str, command)] for command in commands]
    outcomes = fresh_ranks(1, _run, texts, imports, timeout, env=env, timeout=timeout + 10)
    done: list[subprocess.CompletedProcess[str]] = values_of(outcomes)[0]
    return done


def _run(
    place: Place, commands: Sequence[Sequence[str]], imports: Sequence[str | Path], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    fork_python()
    deadline = time.monotonic() + timeout
    for one in imports:
        if isinstance(one, Path):
            sys.path.insert(0, str(one.parent))
            runpy.run_path(str(one), run_name="imported")
        else:
            importlib.import_module(one)
    return [
        subprocess.run(command, capture_output=True, text=True, timeout=deadline - time.monotonic())
        for command in commands
    ]


def in_forked_python(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of a body that runs in a process in which another Python is a fork. The values
    of its arguments must pickle.
    """

    def test(**values: Any) -> None:
        values_of(fresh_ranks(1, _call, BodyOf(body.__module__, body.__name__), values))

    return functools.update_wrapper(test, body)


def _call(place: Place, body: BodyOf, values: Mapping[str, Any]) -> None:
    fork_python()
    body(**values)


def fork_python() -> None:
    """From now on, in this process and its children, another Python is a fork."""
    subprocess.Popen.__init__ = _start
    os.execv = _become


def _start(
    process: subprocess.Popen[Any],
    args: Any,
    *others: Any,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> None:
    if isinstance(args, Sequence) and args[0] == sys.executable:
        gc.freeze()  # the child's collections pass over what there is: they would copy all of it
        environment = dict(os.environ if env is None else env)
        prepare = options.get("preexec_fn")
        options["preexec_fn"] = functools.partial(
            _begin, [*map(str, args[1:])], environment, prepare
        )
    _start_process(process, args, *others, env=env, **options)


def _become(program: str, command: Sequence[str]) -> NoReturn:
    assert program == sys.executable
    sys.stdout.flush()
    sys.stderr.flush()
    _begin(command[1:], dict(os.environ))


def _begin(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    prepare: Callable[[], None] | None = None,
) -> NoReturn:
    """Takes the place of exec. A parent that waits for it goes on as the pipe of errors is closed,
    too.
    """
    status = 1
    try:
        if prepare is not None:
            prepare()
        _close_files()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does when it begins
            signal.signal(number, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w") for fd in (1, 2))
        multiprocessing.current_process()._config["daemon"] = False  # or it may have no children
        gc.enable()
        status = _status_of(arguments)
        threading._shutdown()
    except BaseException:
        traceback.print_exc()
    finally:
        multiprocessing.util._run_finalizers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _close_files() -> None:
    """Puts nothing in their place: their numbers stay taken, for objects that still are to close
    them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):
                os.dup2(nothing, fd, inheritable=False)


def _status_of(arguments: Sequence[str]) -> int:
    if arguments[0] == "-u":
        arguments = arguments[1:]
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0
