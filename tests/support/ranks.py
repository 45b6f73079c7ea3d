"""The ranks the tests run on: real processes, started once per world size and then sent work.

A test takes the `ranks` fixture and calls `ranks(2, body, *args)`. `body` is a function of a test
module; it runs as `body(comm, *args)` on every rank at the same time, and what it returns comes
back as a list by rank. `@on_ranks(2)` says the same in one line, for tests that are nothing but a
body. `fresh_ranks` starts processes for one call only, for tests that kill, fork or fail to
initialise. The `transport` fixture runs a test's ranks over shared memory and over NCCL: the real
one where there is a GPU, which all ranks share, else its stand-in, for which host memory is the
device. Processes come from multiprocessing's fork server, which has torch loaded already, so that a
new rank costs a fork instead of an import.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.stand_ins import environment, stand_ins

TRANSPORTS = ("shm", "nccl")
TRANSPORTS_OVER_TORCH = ("group", "hierarchical")
TIME_LIMIT = 60.0
# Once one rank has failed, the others have this long to answer: they may be waiting for a rank that
# will never come.
GRACE = 15.0
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_PR_SET_PDEATHSIG = 1

Environment = Mapping[str, "str | None"]
NO_VARIABLES: Environment = MappingProxyType({})


@dataclass(frozen=True)
class Place:
    """Where a rank stands, before any communicator exists. `init_method` is a file:// address that
    only these ranks share.
    """

    rank: int
    world_size: int
    init_method: str
    directory: str


@dataclass(frozen=True)
class Failure:
    """An exception as it was on its rank. `types` names its class and all base classes,
    `builtins.OSError` for example.
    """

    types: tuple[str, ...]
    message: str
    traceback: str

    @property
    def type(self) -> str:
        """The class name alone."""
        return self.types[0].rpartition(".")[2]

    def is_a(self, expected: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
        wanted = expected if isinstance(expected, tuple) else (expected,)
        return any(_type_name(one) in self.types for one in wanted)


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank.

    kind      "returned", "raised", "died" (the process ended before it answered) or "hung" (no
              answer in time; it was killed)
    value     what the body returned
    failure   what it raised
    exitcode  of the process, as in multiprocessing: -9 for SIGKILL; None while it is alive
    stacks    of a rank that hung: the stacks of all its threads
    """

    rank: int
    kind: str
    value: Any = None
    failure: Failure | None = None
    exitcode: int | None = None
    stacks: str = ""

    def is_a(self, expected: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
        """Whether this rank raised `expected`."""
        return self.failure is not None and self.failure.is_a(expected)

    def __str__(self) -> str:
        if self.kind == "returned":
            return f"rank {self.rank} returned {_shorten(repr(self.value))}"
        if self.failure is not None:
            return (
                f"rank {self.rank} raised {self.failure.type}: "
                f"{self.failure.message}\n{self.failure.traceback}"
            )
        if self.kind == "died":
            return f"rank {self.rank} died with exit code {self.exitcode}"
        return (
            f"rank {self.rank} had not answered and was killed; its "
            f"stacks:\n{self.stacks or '(none)'}"
        )


class RankError(AssertionError):
    """A body did not return on every rank. `outcomes` holds what happened on each."""

    def __init__(self, body: Callable[..., Any], outcomes: Sequence[Outcome]) -> None:
        self.outcomes = tuple(outcomes)
        lines = [f"{body.__name__} on {len(outcomes)} ranks:"]
        told: dict[str, int] = {}
        for outcome in outcomes:
            text = str(outcome).removeprefix(f"rank {outcome.rank} ")
            lines.append(
                f"rank {outcome.rank}: as rank {told[text]}" if text in told else str(outcome)
            )
            told.setdefault(text, outcome.rank)
        super().__init__("\n".join(lines))


class Ranks:
    """A pool of worlds, one per transport and world size, each started at its first use and reused
    by the tests that follow.
    """

    def __init__(self) -> None:
        self.transport = "shm"
        self._worlds: dict[tuple[str, int], _World] = {}

    def __call__(
        self, world_size: int, body: Callable[..., Any], *args: Any, timeout: float = TIME_LIMIT
    ) -> list[Any]:
        """Returns what `body(comm, *args)` returned, by rank. Raises RankError with all failures if
        any rank did not return.
        """
        outcomes = self._world(world_size).call(body, args, timeout, GRACE)
        if any(outcome.kind != "returned" for outcome in outcomes):
            self._drop(world_size)
            raise RankError(body, outcomes)
        return [outcome.value for outcome in outcomes]

    def raises(
        self,
        world_size: int,
        expected: type[BaseException] | tuple[type[BaseException], ...],
        body: Callable[..., Any],
        *args: Any,
        match: str = "",
        survives: bool = False,
        timeout: float = TIME_LIMIT,
    ) -> list[Failure]:
        """Checks that every rank raised `expected` with a message that contains the pattern
        `match`; returns the failures by rank.

        The ranks are replaced afterwards, unless `survives` says that their communicator is still
        good.
        """
        outcomes = self._world(world_size).call(body, args, timeout, GRACE)
        as_expected = all(
            o.failure is not None and o.is_a(expected) and re.search(match, o.failure.message)
            for o in outcomes
        )
        if not (survives and as_expected):
            self._drop(world_size)
        if not as_expected:
            raise RankError(body, outcomes)
        return [outcome.failure for outcome in outcomes if outcome.failure is not None]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def _world(self, world_size: int) -> _World:
        key = self.transport, world_size
        if key not in self._worlds:
            self._worlds[key] = _World(world_size, transport=self.transport)
        return self._worlds[key]

    def _drop(self, world_size: int) -> None:
        self._worlds.pop((self.transport, world_size)).close()


def fresh_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    env: Environment | Sequence[Environment] = NO_VARIABLES,
    pass_comm: bool = False,
    transport: str = "shm",
    timeout: float = TIME_LIMIT,
) -> list[Outcome]:
    """Runs `body(place, *args)`, or `body(comm, *args)` with `pass_comm`, in new processes; returns
    how it ended, by rank. Never raises.

    `env` is set in the ranks (None unsets), one mapping for all or one per rank. The launcher's
    variables (RANK, MASTER_ADDR, ...) are absent unless `env` gives them: see `torchrun_env`.
    """
    world = _World(world_size, env=env, pass_comm=pass_comm, transport=transport)
    try:
        outcomes = world.call(body, args, timeout, grace=None)
    finally:
        exitcodes = world.close()
    return [
        replace(outcome, exitcode=exitcode)
        for outcome, exitcode in zip(outcomes, exitcodes, strict=True)
    ]


def values_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the body returned on every rank, as it must have done."""
    assert all(outcome.kind == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


def on_ranks(*world_sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a body: `@on_ranks(2)` over `def test_x(comm)` runs it on two ranks,
    `@on_ranks(2, 3)` first on two, then on three.

    Further arguments of the body are fixtures or parameters of the test; their values must pickle.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        comm, *others = inspect.signature(body).parameters.values()

        def test(ranks: Ranks, world_size: int, **values: Any) -> None:
            ranks(
                world_size,
                _BodyOf(body.__module__, body.__name__),
                *(values[other.name] for other in others),
            )

        functools.update_wrapper(test, body)
        fixtures = [comm.replace(name=name) for name in ("ranks", "world_size")]
        test.__signature__ = inspect.Signature([*fixtures, *others])
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


@dataclass(frozen=True)
class _BodyOf:
    """The body under an `on_ranks` test. Pickles by name: the name in the module belongs to the
    test.
    """

    module: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name).__wrapped__(*args)


def note(place: Place, **facts: Any) -> None:
    """For bodies: leaves facts that other ranks, and the test, can read, each whole or not
    at all.
    """
    for name, value in facts.items():
        path = Path(place.directory, name)
        path.with_suffix(".new").write_text(str(value))
        path.with_suffix(".new").rename(path)


def noted(place: Place, name: str) -> str:
    return Path(place.directory, name).read_text()


def finish_together(comm: Any) -> None:
    """For bodies, before a rank abandons a round. Over NCCL the host does not wait, and one that
    abandons a round ends what the others are still about to finish of the round before: here they
    have all finished it.
    """
    if comm.backend == "nccl":
        gloo().barrier().wait()


def hear_of_it(comm: Any) -> None:
    """For bodies, after a backward that fails on another rank. Over NCCL, where backward does not
    wait, this raises the error."""
    deadline = time.monotonic() + 20
    while comm.backend == "nccl" and time.monotonic() < deadline:
        comm.check()


def torchrun_env(world_size: int) -> list[dict[str, str]]:
    """The variables torchrun would set for `world_size` ranks of one host, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world_size)]


def gloo() -> Any:
    """For bodies: torch.distributed's default group over Gloo among the same ranks, made at the
    first call and kept.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        # Ranks of one host: the name of the host may not resolve where the tests run.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{_place.directory}/gloo",
            rank=_place.rank,
            world_size=_place.world_size,
        )
    return dist.group.WORLD


def meeting_place() -> Path:
    """For bodies: a directory of these ranks alone, which goes with them."""
    return Path(_place.directory)


class _World:
    """The processes of one world and the pipes to them. Owns both, and the directory the ranks meet
    in.
    """

    def __init__(
        self,
        world_size: int,
        env: Environment | Sequence[Environment] = NO_VARIABLES,
        pass_comm: bool = True,
        transport: str = "shm",
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        self._processes = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        environments = [env] * world_size if isinstance(env, Mapping) else env
        context = _fork_server()
        for rank in range(world_size):
            place = Place(rank, world_size, f"file://{self._directory}/rendezvous", self._directory)
            ours, theirs = context.Pipe()
            variables = {**environment_of(transport, rank), **environments[rank]}
            process = context.Process(
                target=_serve,
                args=(theirs, place, variables, transport if pass_comm else None),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def call(
        self, body: Callable[..., Any], args: tuple[Any, ...], timeout: float, grace: float | None
    ) -> list[Outcome]:
        """Runs the body on every rank. Ranks that do not answer in time are killed, with all
        others; so `close` must follow then.
        """
        work = pickle.dumps((body, args))
        for pipe in self._pipes:
            # A rank that has died since the last call is found when its answer is read.
            with contextlib.suppress(OSError):
                pipe.send_bytes(work)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(self._pipes):
            ready = self._wait(
                [rank for rank in range(len(self._pipes)) if rank not in outcomes], deadline
            )
            if not ready:
                self._give_up(outcomes)
            for rank in ready:
                outcomes[rank] = self._read(rank)
                if outcomes[rank].kind != "returned" and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[rank] for rank in range(len(self._pipes))]

    def close(self) -> list[int | None]:
        """Ends the processes, politely first, and returns their exit codes."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        exitcodes = [process.exitcode for process in self._processes]
        self._kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        return [
            process.exitcode if code is None else code
            for process, code in zip(self._processes, exitcodes, strict=True)
        ]

    def _wait(self, ranks: list[int], deadline: float) -> list[int]:
        """Returns the ranks that have answered or ended by the deadline. A process may end while
        one it forked keeps the pipe open.
        """
        signs = {self._pipes[rank]: rank for rank in ranks} | {
            self._processes[rank].sentinel: rank for rank in ranks
        }
        return sorted(
            {
                signs[sign]
                for sign in multiprocessing.connection.wait(
                    list(signs), deadline - time.monotonic()
                )
            }
        )

    def _read(self, rank: int) -> Outcome:
        try:
            if not self._pipes[rank].poll():
                raise EOFError
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, OSError):
            self._processes[rank].join(5)
            return Outcome(rank, "died", exitcode=self._processes[rank].exitcode)
        kind, payload = pickle.loads(answer)
        return Outcome(rank, kind, **{"value" if kind == "returned" else "failure": payload})

    def _give_up(self, outcomes: dict[int, Outcome]) -> None:
        late = [rank for rank in range(len(self._pipes)) if rank not in outcomes]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        for rank in late:
            with contextlib.suppress(OSError), open(_stacks_path(self._directory, rank)) as file:
                outcomes[rank] = Outcome(rank, "hung", stacks=file.read())
            outcomes.setdefault(rank, Outcome(rank, "hung"))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                # A rank leads its own process group, so whatever it has started goes with it. It
                # may not have got that far yet.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join(10)


def environment_of(transport: str, rank: int) -> dict[str, str]:
    """The variables a rank needs so that fastcomm.init(transport) works where the tests run."""
    import torch

    if transport in TRANSPORTS_OVER_TORCH:
        # The name of this host may not resolve where the tests run. Even and odd ranks take each
        # other for ranks of two hosts.
        return {"GLOO_SOCKET_IFNAME": "lo"} | (
            {"FASTCOMM_HOST_ID": f"host {rank % 2}"} if transport == "hierarchical" else {}
        )
    if transport != "nccl":
        return {}
    if not torch.cuda.is_available():
        return environment(stand_ins())
    # Several ranks on one GPU. NCCL before 2.30 must take them for ranks of different hosts; later
    # ones want to be told.
    sharing = {
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }
    # Kernels of different ranks wait for each other on the same multiprocessors: few blocks,
    # nothing that is loaded or chosen late.
    return sharing | {
        "NCCL_MAX_CTAS": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_WIN_ENABLE": "0",
        "CUDA_MODULE_LOADING": "EAGER",
    }


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # The modules most bodies need, so that ranks find them loaded; none of them starts threads.
    context.set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "torch.nn.parallel",
            "torch.utils.checkpoint",
            "torch._dynamo",
            "pytest",
        ]
    )
    return context


def _serve(
    pipe: multiprocessing.connection.Connection,
    place: Place,
    env: Environment,
    transport: str | None,
) -> None:
    """The life of a rank: answers calls until the pipe closes. Bodies get a communicator over
    `transport`; None: they get the place.
    """
    global _place
    _place = place
    _settle(env)
    comm = None
    for work in _incoming(pipe):
        try:
            body, args = pickle.loads(work)
            if transport is not None and comm is None:
                comm = _communicator(transport)
            value = body(place if comm is None else comm, *args)
            answer = pickle.dumps(("returned", value))
            del value
        except SystemExit:
            raise
        except BaseException as error:  # pytest.fail's exception is not an Exception
            answer = pickle.dumps(("raised", _describe(error)))
        # What a failed body leaves in reference circles would otherwise hold on to shared memory.
        gc.collect()
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(answer)
    if comm is not None:
        comm.close()


def _settle(env: Environment) -> None:
    import torch

    os.setsid()
    # A rank whose parent, the fork server, is gone has nobody left to answer to.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stacks = os.open(_stacks_path(_place.directory, _place.rank), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _communicator(transport: str) -> Any:
    import torch

    import fastcomm

    comm = fastcomm.init(
        transport, init_method=_place.init_method, rank=_place.rank, world_size=_place.world_size
    )
    if comm.device.type != "cpu":
        torch.set_default_device(comm.device)  # what bodies make is made there
    return comm


def _incoming(pipe: multiprocessing.connection.Connection) -> Iterator[bytes]:
    while True:
        try:
            yield pipe.recv_bytes()
        except (EOFError, OSError):
            return


def _describe(error: BaseException) -> Failure:
    types = tuple(_type_name(one) for one in type(error).__mro__)
    return Failure(
        types,
        str(error),
        "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    )


def _type_name(one: type) -> str:
    return f"{one.__module__}.{one.__qualname__}"


def _stacks_path(directory: str, rank: int) -> str:
    return f"{directory}/stacks-{rank}"


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


_place: Place
