"""Starts ranks on this machine: `python -m fastcomm run train.py`, and launch() from a script or a
notebook. torch's elastic launcher starts them, tells them who they are as torchrun does, and ends
all when one fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from fastcomm.call_folder import CallFolder, Raised, new_folder
from fastcomm.errors import FastcommError, PeerLostError

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_BEGINNING = str(Path(__file__).with_name("rank_process.py"))


def launch(
    function: Callable[..., Any], *args: Any, ranks: int | None = None, threads: int | None = None
) -> list[Any]:
    """Runs `function(*args)` in `ranks` new processes of this machine, where fastcomm.init() brings
    them together. Returns what each has returned, by rank; what they print is printed here.

    args: positional ones; functools.partial(function, lr=0.1) brings others.
    ranks: None means one for each GPU, or one for each core where there is no GPU.
    threads: how many threads torch has in each. None shares out the cores.

    A script calls it under `if __name__ == "__main__":`, since the processes import it again. A
    function that a notebook has defined takes cloudpickle (`pip install cloudpickle`).

    Raises FastcommError when a rank fails: it names the rank and what it has raised. The other
    ranks are ended, and all of them on KeyboardInterrupt, or when this process is killed. Raises
    FastcommError, too, when the function or its arguments cannot be pickled; TypeError for ranks or
    threads that are no int, ValueError for less than one.
    """
    if getattr(sys.modules["__main__"], "is_importing", False):  # rank_process.py
        raise FastcommError(
            "launch() is called where this script is imported, as each rank does: call it under "
            'if __name__ == "__main__":'
        )
    ranks, threads = _numbers(ranks, threads)
    packed = _packed(function, args)
    with new_folder() as folder:
        folder.write_call(_preparation(), packed)
        _start(ranks, threads, ["call", str(folder.path)], folder)
        return [_returned(folder, rank) for rank in range(ranks)]


def run(command: Sequence[str], ranks: int | None = None, threads: int | None = None) -> None:
    """Runs a Python script, with its arguments, as launch() runs a function."""
    ranks, threads = _numbers(ranks, threads)
    if not Path(command[0]).exists():
        raise FastcommError(f"there is no script {command[0]} in {os.getcwd()}")
    with new_folder() as folder:
        _start(ranks, threads, ["script", *command], folder)


def cores() -> int:
    """The cores this process may run on, which in a container or under taskset are fewer than the
    machine's.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numbers(ranks: int | None, threads: int | None) -> tuple[int, int]:
    """Of ranks, and of threads in each; None: what suits the machine."""
    for name, given in (("ranks", ranks), ("threads", threads)):
        if not isinstance(given, (int, NoneType)):
            raise TypeError(f"{name} must be an int; got {given!r}")
    if ranks is None:
        ranks = torch.cuda.device_count() or cores()
    if threads is None:
        threads = max(1, cores() // ranks) if ranks > 0 else 1
    if ranks < 1 or threads < 1:
        raise ValueError(f"ranks and threads must be at least 1; got {ranks} and {threads}")
    return ranks, threads


def _start(ranks: int, threads: int, what: Sequence[str], folder: CallFolder) -> None:
    """Returns when all have ended well. what: see rank_process.py."""
    # Not above: what these import takes longer than all of fastcomm, and training needs none of it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with _surroundings(threads):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder.logs), tee=Std.ALL),
            log_line_prefix_template="[rank ${rank}] ",
        )
        try:
            elastic_launch(config, sys.executable)(_BEGINNING, str(os.getpid()), *what)
        except ChildFailedError as error:
            raise FastcommError(_what_failed(error.failures, folder.raised())) from None
        except SignalException as error:  # the ranks have ended
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


@contextlib.contextmanager
def _surroundings(threads: int) -> Iterator[None]:
    """The environment of the ranks; afterwards the caller's own, with its signal handlers, which
    the launcher replaces. What the launcher logs of a failure, our error says, too.
    """
    before = os.environ.copy()
    log = logging.getLogger("torch.distributed.elastic")
    level = log.level
    log.setLevel(logging.CRITICAL)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(before)
        with contextlib.suppress(ValueError):  # only the main thread has any
            for number, handler in handlers.items():
                if handler is not None:  # else it is not Python's
                    signal.signal(number, handler)


# -- a call, its way to the ranks, and back --------------------------------------------------------


def _preparation() -> dict[str, Any]:
    """What multiprocessing tells a new process of this one: among others, its main module."""
    preparation: dict[str, Any] = spawn.get_preparation_data("fastcomm rank")
    del preparation["authkey"]  # is not to be written anywhere
    return preparation


def _packed(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    is_of_a_notebook = function.__module__ == "__main__" and not hasattr(
        sys.modules["__main__"], "__file__"
    )
    if is_of_a_notebook and importlib.util.find_spec("cloudpickle") is None:
        raise FastcommError(
            f"{function.__qualname__} was defined in a notebook or a shell, from where new "
            "processes cannot import it: pip install cloudpickle, or define it in a module"
        )
    try:
        return _pickled((function, args))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise FastcommError(
            f"{name} and its arguments cannot be sent to new processes: {type(error).__name__}: "
            f"{error}. Define it at the top of a module, or pip install cloudpickle; files, locks "
            "and the like are to be opened inside of it"
        ) from error


def _pickled(value: Any) -> bytes:
    if importlib.util.find_spec("cloudpickle") is None:
        return pickle.dumps(value)
    import cloudpickle  # type: ignore[import-not-found, unused-ignore]

    return bytes(cloudpickle.dumps(value))


def answer(path: Path, packed: bytes) -> None:
    """In a rank: makes the call, and leaves for launch() what it returns, or has raised."""
    folder, rank = CallFolder(path), int(os.environ["RANK"])
    try:
        _call(folder, rank, packed)
    except Exception as error:
        stack = traceback.format_exc().rstrip()
        what = f"rank {rank} (pid {os.getpid()}) raised {type(error).__name__}: {error}\n{stack}"
        folder.write_raised(rank, Raised(time.time(), isinstance(error, PeerLostError), what))
        sys.exit(1)


def _call(folder: CallFolder, rank: int, packed: bytes) -> None:
    function, args = pickle.loads(packed)
    try:
        value = function(*args)
    except SystemExit as end:
        if end.code:
            raise
        value = None
    try:
        returned = _pickled(value)
    except Exception as error:
        raise FastcommError(
            "what the function returns cannot be sent to the process that has called launch(): "
            f"{type(error).__name__}: {error}"
        ) from error
    folder.write_answer(rank, returned)


def _returned(folder: CallFolder, rank: int) -> Any:
    answer = folder.answer(rank)
    if answer is None:
        raise FastcommError(
            f"rank {rank} ended with exit code 0 before the function had returned: by os._exit(), "
            "or by exit() in a library"
        )
    return pickle.loads(answer)


def _what_failed(failures: Mapping[int, Any], raised: Mapping[int, Raised]) -> str:
    """Of the first rank that has not merely lost another. failures: torch's ProcessFailure by rank,
    of those that had ended first.
    """
    causes = sorted(one for one in raised.values() if not one.is_lost)
    if causes:
        return causes[0].text
    others = [rank for rank in failures if rank not in raised]
    if not others:
        return min(raised.values()).text
    rank = min(others, key=lambda rank: float(failures[rank].timestamp))
    failure = failures[rank]
    message = failure.error_file_data.get("message")
    how = (
        f"was ended by {failure.signal_name()}"
        if failure.exitcode < 0
        else f"ended with exit code {failure.exitcode}"
    )
    if isinstance(message, dict):  # of a script that calls torch's record()
        how = f"raised {message['message']}\n{message['extraInfo']['py_callstack'].rstrip()}"
    return f"rank {rank} (pid {failure.pid}) {how}"
