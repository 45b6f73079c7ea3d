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
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlparse

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fastcomm.errors import FastcommError
from fastcomm.launching.bootstrap import MeetingPoint
from fastcomm.launching.call_folder import CallFolder, Raised, new_folder

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_BEGINNING = str(Path(__file__).with_name("rank_process.py"))
_TICK_S = 0.05  # how often ranks are looked at that may be replaced
_PREFIX = re.compile(r"\[rank \d+\] ")
_HAS_ENDED = (  # and a rank that waited for it has lost it
    "\nrank {} has ended with exit code 0, which may be why: make the call on every rank, and "
    "where ranks have different numbers of batches, loop by reducer.join()"
)


class Failure(NamedTuple):
    """How the first rank has failed. text: names it, and says how."""

    text: str
    exit_code: int


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
        failure = _start(ranks, threads, [], folder)
        if failure is not None:
            raise FastcommError(failure.text)
        return [_returned(folder, rank) for rank in range(ranks)]


def run(
    command: Sequence[str],
    ranks: int | None = None,
    threads: int | None = None,
    n_replacements: int = 0,
) -> Failure | None:
    """Runs a Python script, with its arguments, as launch() runs a function. None: all is well.

    n_replacements: so many times another process takes the place of a rank that has failed, while
        the others go on, as they do in Reducer.elastic().
    """
    ranks, threads = _numbers(ranks, threads)
    if n_replacements < 0:
        raise ValueError(f"--replace must be at least 0; got {n_replacements}")
    if not Path(command[0]).exists():
        raise FastcommError(f"there is no script {command[0]} in {os.getcwd()}")
    with new_folder() as folder:
        if n_replacements:
            return _replace(ranks, threads, command, folder, n_replacements)
        return _start(ranks, threads, command, folder)


def cores() -> int:
    """The cores this process may run on, which in a container or under taskset are fewer than the
    machine's.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numbers(ranks: int | None, threads: int | None) -> tuple[int, int]:
    """The numbers of ranks, and of threads in each; None: what suits the machine."""
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


def _start(ranks: int, threads: int, script: Sequence[str], folder: CallFolder) -> Failure | None:
    """Returns when all have ended: None if well. script: with its arguments; without one the ranks
    make the call that the folder holds.
    """
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
            elastic_launch(config, sys.executable)(
                _BEGINNING, str(os.getpid()), str(folder.path), *script
            )
        except ChildFailedError as error:
            raised = folder.raised()
            failure = _first_failure(error.failures, raised, folder.ended())
            return _with_victims(failure, raised) if script else failure
        except SignalException as error:  # the ranks have ended
            raise _ended_by(error.sigval) from None
    return None


def _ended_by(number: int) -> BaseException:
    """The exception for a signal that has ended the launcher."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


# -- ranks that are replaced -----------------------------------------------------------------------


def _replace(
    ranks: int, threads: int, script: Sequence[str], folder: CallFolder, n_replacements: int
) -> Failure | None:
    """As _start(), with a group of the launcher's for each rank: it ends a group as a whole."""
    from torch.distributed.elastic.multiprocessing import SignalException

    with _surroundings(threads):
        # Here, as it is to outlive every rank. Its port is chosen by the system.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        point = MeetingPoint(urlparse(f"tcp://localhost:{store.port}"), store)
        groups: dict[int, Any] = {}
        replaced: set[int] = set()
        try:
            for rank in range(ranks):
                groups[rank] = _start_rank(rank, ranks, store.port, script, folder)
            while not _are_over(groups.keys(), replaced, point, folder):
                time.sleep(_TICK_S)
                for rank, ended in [(rank, group.wait(0)) for rank, group in groups.items()]:
                    if ended is None:
                        continue
                    del groups[rank]
                    if not ended.is_failed():
                        continue
                    own = {r: raised for r, raised in folder.raised().items() if r == rank}
                    failure = _first_failure({rank: ended.failures[0]}, own, [])
                    trouble = _why_not_replaced(rank, rank in replaced, folder, n_replacements)
                    if trouble is not None:
                        return failure._replace(text=f"{failure.text}\n{trouble}")
                    n_replacements -= 1
                    first_line = failure.text.partition("\n")[0]
                    print(f"{first_line}; another process takes its place", file=sys.stderr)
                    replaced.add(rank)
                    folder.forget(rank)
                    groups[rank] = _start_rank(rank, ranks, store.port, script, folder)
        except SignalException as error:
            raise _ended_by(error.sigval) from None
        finally:
            for group in groups.values():
                group.close()
    return None


def _are_over(
    running: Collection[int], replaced: set[int], point: MeetingPoint, folder: CallFolder
) -> bool:
    """Whether all ranks have come to their end, but for those that took the place of others, and
    wait for them in vain.
    """
    if not running:
        return True
    may_be_too_late = bool(folder.ended()) and replaced.issuperset(running)
    return may_be_too_late and len(point.waiting(list(running))) == len(running)


def _start_rank(rank: int, ranks: int, port: int, script: Sequence[str], folder: CallFolder) -> Any:
    """A group of the launcher's, of this rank alone."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return start_processes(
        name=f"rank {rank}",
        entrypoint=sys.executable,
        args={0: (_BEGINNING, str(os.getpid()), str(folder.path), *script)},
        envs={0: {name: str(value) for name, value in variables.items()}},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.logs), tee=Std.ALL),
        log_line_prefixes={0: f"[rank {rank}] "},
    )


def _why_not_replaced(
    rank: int, is_new: bool, folder: CallFolder, n_replacements: int
) -> str | None:
    """is_new: it took the place of another, and may have lost a third on its way to the loop."""
    raised = folder.raised().get(rank)
    if raised is not None and raised.is_lost and not is_new:
        return f"rank {rank} does not go on without a lost rank: loop by reducer.elastic()"
    if folder.ended():
        return "no process takes its place, as other ranks have come to their end"
    return None if n_replacements else "no process takes its place: --replace allows no more"


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
        with (
            _Lines(sys.stdout) as out,
            _Lines(sys.stderr) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            yield
    finally:
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(before)
        with contextlib.suppress(ValueError):  # only the main thread has any
            for number, handler in handlers.items():
                if handler is not None:  # else it is not Python's
                    signal.signal(number, handler)


class _Lines:
    """A stream that the launcher writes what ranks print to, each piece of a line behind the rank's
    prefix: puts the pieces of one rank together, and other ranks on other lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # a thread of the launcher reads for each rank
        self._open = ""  # the prefix of a line that has no end yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._stream.write("\n")

    def write(self, text: str) -> int:
        found = _PREFIX.match(text)
        prefix = found[0] if found else ""
        with self._lock:
            if self._open and prefix != self._open:
                self._stream.write("\n")
            elif self._open:
                text = text.removeprefix(prefix)
            self._stream.write(text)
            self._stream.flush()  # a pipe would keep it until the end
            self._open = "" if text.endswith("\n") else prefix
        return len(text)


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
    """In a rank: makes the call, and leaves for launch() what it returns."""
    folder, rank = CallFolder(path), int(os.environ["RANK"])
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
    try:
        return pickle.loads(answer)
    except Exception as error:  # its classes may raise anything
        raise FastcommError(
            f"what rank {rank} has returned cannot be read: {type(error).__name__}: {error}"
        ) from error


def _first_failure(
    failures: Mapping[int, Any], raised: Mapping[int, Raised], ended: Sequence[int]
) -> Failure:
    """The failure of the first rank that failed by itself. failures: torch's ProcessFailure by
    rank; those that had ended first come first, and the launcher has ended the others by SIGTERM.
    ended: the ranks that have come to their end in good order.
    """
    causes = sorted(one for one in raised.values() if not one.is_lost)
    if causes:
        return Failure(causes[0].text, causes[0].exit_code)
    # A rank that has lost another waits. If one has come to its end, no other had failed by then.
    is_over = any(failures[rank].exitcode > 0 for rank in raised.keys() & failures.keys())
    others = [
        rank
        for rank, failure in failures.items()
        if rank not in raised and not (is_over and failure.exitcode == -signal.SIGTERM)
    ]
    if not others:
        first = min(raised.values())
        likely = _HAS_ENDED.format(", ".join(map(str, ended))) if ended else ""
        return Failure(first.text + likely, first.exit_code)
    rank = min(others, key=lambda rank: float(failures[rank].timestamp))
    failure = failures[rank]
    how, exit_code = f"ended with exit code {failure.exitcode}", failure.exitcode
    if exit_code < 0:
        how, exit_code = f"was ended by {failure.signal_name()}", 128 - exit_code
    return Failure(f"rank {rank} (pid {failure.pid}) {how}", exit_code)


def _with_victims(failure: Failure, raised: Mapping[int, Raised]) -> Failure:
    """Before the first failure, in a line each: the ranks that have lost another meanwhile."""
    victims = [
        one.text.partition("\n")[0]
        for _, one in sorted(raised.items())
        if one.is_lost and not failure.text.startswith(one.text)
    ]
    return failure._replace(text="\n".join([*victims, failure.text]))
