"""Starts ranks on this machine: `python -m fastcomm run train.py`, and launch() from a script or a
notebook. Tells them who they are as torchrun does, and ends all when one fails, or starts another
in its place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fastcomm.comm import forms
from fastcomm.comm.who import Process
from fastcomm.errors import FastcommError
from fastcomm.launching import launchers
from fastcomm.launching.bootstrap import MeetingPoint
from fastcomm.launching.cores import cores
from fastcomm.launching.processes import Ended, Processes
from fastcomm.transports.shm.ring import MAX_RANKS

_BEGINNING = Path(__file__).with_name("rank_process.py")
_HAS_ENDED = (  # and a rank that waited for it has lost it
    "\nrank {} has ended with exit code 0, which may be why: make the call on every rank, and "
    "where ranks have different numbers of batches, loop by reducer.join()"
)


class Raised(NamedTuple):
    """How a rank has failed, as rank_process.py leaves it. is_lost: only because of another."""

    at_s: float
    is_lost: bool
    exit_code: int
    text: str


class Failure(NamedTuple):
    """How the first rank has failed. text: names it, and says how."""

    text: str
    exit_code: int


def launch(
    function: Callable[..., Any], *args: Any, ranks: int | None = None, threads: int | None = None
) -> list[Any]:
    """Runs `function(*args)` in `ranks` new processes on this machine, where fastcomm.init()
    connects them. Returns the result of each rank, in a list; what the ranks print is printed here.

    args: positional arguments; use functools.partial(function, lr=0.1) for others.
    ranks: None means one for each GPU or, without GPUs, one for each physical core, but at most 64;
        a line on sys.stderr then says how many, and why.
    threads: the number of torch's threads in each rank. None: OMP_NUM_THREADS, or the rank's share
        of the cores.

    In a script call it under `if __name__ == "__main__":`, because the processes import the script
    again. In a notebook it needs cloudpickle (`pip install cloudpickle`).

    Raises FastcommError if a rank fails: it names the rank and what it raised. The other ranks are
    ended, also on KeyboardInterrupt, or if this process is killed. Raises FastcommError if the
    function or its arguments cannot be pickled, TypeError for ranks or threads that are no int,
    ValueError for less than one.
    """
    if getattr(sys.modules["__main__"], "is_importing", False):  # rank_process.py
        raise FastcommError(
            "launch() is called where this script is imported, as each rank does: call it under "
            'if __name__ == "__main__":'
        )
    ranks, threads = _numbers(ranks, threads)
    packed = _packed(function, args)
    with _new_folder() as name:
        folder = Path(name)
        with _in_folder():  # rank_process.py reads it before it has fastcomm
            # What multiprocessing tells a new process of this one: among others, its main module.
            preparation: dict[str, Any] = spawn.get_preparation_data("fastcomm rank")
            del preparation["authkey"]  # is not to be written anywhere
            (folder / "call").write_bytes(pickle.dumps((preparation, packed)))
        failure = _start(ranks, threads, [], folder)
        if failure is not None:
            raise FastcommError(failure.text)
        return [_returned(folder, rank) for rank in range(ranks)]


def run(
    command: Sequence[str],
    ranks: int | None = None,
    threads: int | None = None,
    n_replacements: int = 0,
    is_plain: bool = False,
) -> Failure | None:
    """Runs a Python script, with its arguments, as launch() runs a function. None: all is well.

    n_replacements: so many times another process takes the place of a rank that has failed, while
        the others go on, as they do in Reducer.elastic(). is_plain: what the ranks print has no
        prefix, and goes straight to the streams of this process.
    """
    ranks, threads = _numbers(ranks, threads)
    if n_replacements < 0:
        raise ValueError(f"--replace must be at least 0; got {n_replacements}")
    if not Path(command[0]).exists():
        raise FastcommError(f"there is no script {command[0]} in {os.getcwd()}")
    with _new_folder() as folder:
        return _start(ranks, threads, command, Path(folder), n_replacements, is_plain)


def _numbers(ranks: int | None, threads: int | None) -> tuple[int, int]:
    """The numbers of ranks, and of threads in each; None: what suits the machine."""
    for name, given in (("ranks", ranks), ("threads", threads)):
        if not isinstance(given, (int, NoneType)):
            raise TypeError(f"{name} must be an int; got {given!r}")
    n_cores, reason = cores(), None
    if ranks is None:
        ranks, reason = _chosen(torch.cuda.device_count(), n_cores)
    if threads is None:
        told = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(told) if told.isdecimal() else max(1, n_cores // max(1, ranks))
    if ranks < 1 or threads < 1:
        raise ValueError(f"ranks and threads must be at least 1; got {ranks} and {threads}")
    if reason is not None:
        each = "1 thread" if threads == 1 else f"{threads} threads"
        print(f"fastcomm starts {ranks} ranks with {each} each: {reason}", file=sys.stderr)
    return ranks, threads


def _chosen(n_gpus: int, n_cores: int) -> tuple[int, str]:
    """How many ranks suit the machine, and why."""
    if n_gpus:
        return n_gpus, "one for each GPU"
    if n_cores > MAX_RANKS:
        return MAX_RANKS, f"of {n_cores} cores, as shared memory takes {MAX_RANKS} ranks"
    return n_cores, "one for each physical core"


def _start(
    ranks: int,
    threads: int,
    script: Sequence[str],
    folder: Path,
    n_replacements: int = 0,
    is_plain: bool = False,
) -> Failure | None:
    """script: with its arguments; without one the ranks make the call that the folder holds."""
    command = (sys.executable, str(_BEGINNING), str(os.getpid()), str(folder), *script)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    # Here, as it is to outlive every rank. Its port is chosen by the system.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    point = MeetingPoint(urlparse(f"tcp://localhost:{store.port}"), store)
    replaces = n_replacements > 0
    replaced: set[int] = set()
    with Processes(command, environment, is_plain) as processes:
        for rank in range(ranks):
            processes.start(rank, _variables(rank, ranks, store.port))
        while not _are_over(processes.running, replaced, point, folder):
            for rank, ended in processes.ended().items():
                if ended.exit_code == 0:
                    continue
                if not replaces:
                    failures = {rank: ended, **processes.end()}
                    raised = raised_in(folder)
                    failure = _first_failure(failures, raised, ended_in(folder))
                    return _with_victims(failure, raised) if script else failure
                own = {r: raised for r, raised in raised_in(folder).items() if r == rank}
                failure = _first_failure({rank: ended}, own, [])
                trouble = _why_not_replaced(rank, rank in replaced, folder, n_replacements)
                if trouble is not None:
                    return failure._replace(text=f"{failure.text}\n{trouble}")
                n_replacements -= 1
                first_line = failure.text.partition("\n")[0]
                print(f"{first_line}; another process takes its place", file=sys.stderr)
                replaced.add(rank)
                (folder / f"raised-{rank}").unlink(missing_ok=True)
                processes.start(rank, _variables(rank, ranks, store.port))
    return None


def _variables(rank: int, ranks: int, port: int) -> dict[str, object]:
    """What torchrun tells a rank; frameworks look for all of it."""
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": os.getpid(),
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }


def _are_over(
    running: Collection[int], replaced: set[int], point: MeetingPoint, folder: Path
) -> bool:
    """Whether all have ended, but for those that took others' places and wait for them in vain."""
    if not running:
        return True
    may_be_too_late = replaced.issuperset(running) and bool(ended_in(folder))
    return may_be_too_late and len(point.waiting(list(running))) == len(running)


def _why_not_replaced(rank: int, is_new: bool, folder: Path, n_replacements: int) -> str | None:
    """is_new: it took the place of another, and may have lost a third on its way to the loop."""
    raised = raised_in(folder).get(rank)
    if raised is not None and raised.is_lost and not is_new:
        return f"rank {rank} does not go on without a lost rank: loop by reducer.elastic()"
    if ended_in(folder):
        return "no process takes its place, as other ranks have come to their end"
    return None if n_replacements else "no process takes its place: --replace allows no more"


# -- the folder of a call: its way to the ranks, and back ------------------------------------------


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    """For one launcher; no other user can open it."""
    with _in_folder():
        return tempfile.TemporaryDirectory(prefix="fastcomm-launch-", ignore_cleanup_errors=True)


@contextlib.contextmanager
def _in_folder() -> Iterator[None]:
    """Says what to do where something cannot be written there. Raises InitError."""
    try:
        yield
    except OSError as error:
        raise launchers.no_folder(error) from error


def raised_in(folder: Path) -> dict[int, Raised]:
    """By rank, how it has failed. What cannot be read is a failure all the same."""
    found = {}
    for rank, path in _left_in(folder, "raised").items():
        what = f"what rank {rank} has left of its failure"
        try:
            form = float, bool, int, str
            found[rank] = Raised(*forms.read(path.read_bytes(), form, what))
        except FastcommError as unreadable:
            found[rank] = Raised(0.0, False, 1, f"rank {rank} failed; {unreadable}")
    return found


def ended_in(folder: Path) -> list[int]:
    """The ranks that have come to their end in good order."""
    return sorted(_left_in(folder, "ended"))


def _left_in(folder: Path, what: str) -> dict[int, Path]:
    """By rank, the files of that name."""
    named = ((path.name.partition("-")[2], path) for path in folder.glob(f"{what}-*"))
    return {int(rank): path for rank, path in named if rank.isdecimal()}


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


def answer(folder: Path, packed: bytes) -> None:
    """In a rank: makes the call, and leaves for launch() what it returns."""
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
    with _in_folder():
        (folder / f"answer-{os.environ['RANK']}").write_bytes(returned)


def _returned(folder: Path, rank: int) -> Any:
    answer = folder / f"answer-{rank}"
    if not answer.exists():
        raise FastcommError(
            f"rank {rank} ended with exit code 0 before the function had returned: by os._exit(), "
            "or by exit() in a library"
        )
    try:
        return pickle.loads(answer.read_bytes())
    except Exception as error:  # its classes may raise anything
        raise FastcommError(
            f"what rank {rank} has returned cannot be read: {type(error).__name__}: {error}"
        ) from error


def _first_failure(
    failures: Mapping[int, Ended], raised: Mapping[int, Raised], ended: Sequence[int]
) -> Failure:
    """The failure of the first rank that failed by itself. failures: by rank, in the order in which
    they ended; the launcher has ended all but the first by SIGTERM. ended: the ranks that have come
    to their end in good order.
    """
    causes = sorted(one for one in raised.values() if not one.is_lost)
    if causes:
        return Failure(causes[0].text, causes[0].exit_code)
    # A rank that has lost another waits. If one has come to its end, no other had failed by then.
    is_over = any(failures[rank].exit_code > 0 for rank in raised.keys() & failures.keys())
    others = [
        rank
        for rank, failure in failures.items()
        if failure.exit_code
        and rank not in raised
        and not (is_over and failure.exit_code == -signal.SIGTERM)
    ]
    if not others:
        first = min(raised.values())
        likely = _HAS_ENDED.format(", ".join(map(str, ended))) if ended else ""
        return Failure(first.text + likely, first.exit_code)
    pid, exit_code = failures[others[0]]
    how = f"ended with exit code {exit_code}"
    if exit_code < 0:
        names = {int(one): one.name for one in signal.Signals}  # without the real-time signals
        how = f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
        exit_code = 128 - exit_code
    return Failure(f"{Process(others[0], pid).in_words()} {how}", exit_code)


def _with_victims(failure: Failure, raised: Mapping[int, Raised]) -> Failure:
    """Before the first failure, in a line each: the ranks that have lost another meanwhile."""
    victims = [
        one.text.partition("\n")[0]
        for _, one in sorted(raised.items())
        if one.is_lost and not failure.text.startswith(one.text)
    ]
    return failure._replace(text="\n".join([*victims, failure.text]))
