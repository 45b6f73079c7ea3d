"""The ranks the tests run on: real processes, started once per world size and then sent work.

A test takes the `ranks` fixture and calls `ranks(2, body, *args)`. `body` is a function of a test
module; it runs as `body(comm, *args)` on every rank at the same time, and what it returns comes
back as a list by rank. `@on_ranks(2)` says the same in one line, for tests that are nothing but a
body. `fresh_ranks` starts processes for one call only, for tests that kill, fork or fail to
initialise. The `transport` fixture runs a test's ranks over shared memory and over NCCL: the real
one where there is a GPU, which all ranks share, else its stand-in, for which host memory is the
device. Processes come from multiprocessing's fork server, which has loaded what preload.py says, so
that a new rank costs a fork instead of an import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pytest

from tests.fakes.stand_ins import environment, stand_ins
from tests.support.bodies import Place
from tests.support.outcomes import Failure, Outcome, RankError
from tests.support.rank_process import Environment, serve, stacks_path
from tests.support.transports import environment_of

TIME_LIMIT = 180.0
# Once one rank has failed, the others have this long to answer: they may be waiting for a rank that
# will never come.
GRACE = 15.0
MOST_RANKS = 20  # that wait for work, of each pytest worker: each holds 0.1 GB of memory
NO_VARIABLES: Environment = MappingProxyType({})


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
        outcomes = self._call(world_size, body, args, timeout)
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
        outcomes = self._call(world_size, body, args, timeout)
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

    def _call(
        self, world_size: int, body: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[Outcome]:
        key = self.transport, world_size
        world = self._worlds.pop(key, None)
        if world is None:
            self._make_room(world_size)
            world = _World(world_size, transport=self.transport, lasts=True)
        self._worlds[key] = world  # the newest is last
        # In between they stand still: threads of Gloo's wake up a hundred times a second.
        world.signal(signal.SIGCONT)
        try:
            outcomes = world.call(body, args, timeout, GRACE)
        except BaseException:  # of a test that is ended: the next would get this one's answers
            self._drop(world_size)
            raise
        world.signal(signal.SIGSTOP)
        return outcomes

    def _make_room(self, n: int) -> None:
        """Ends the worlds that have waited longest, so that `n` more ranks fit."""
        while self._worlds and sum(size for _, size in self._worlds) + n > MOST_RANKS:
            self._worlds.pop(next(iter(self._worlds))).close()

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


def stand_in_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    env: Environment | Sequence[Environment] = NO_VARIABLES,
    **options: Any,
) -> list[Outcome]:
    """As fresh_ranks over NCCL, but with the stand-ins also where there is a GPU."""
    environments = [env] * world_size if isinstance(env, Mapping) else env
    env = [{**environment(stand_ins()), **own} for own in environments]
    return fresh_ranks(world_size, body, *args, env=env, transport="nccl", **options)


def on_ranks(*world_sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a body: `@on_ranks(2)` over `def test_x(comm)` runs it on two ranks,
    `@on_ranks(2, 3)` first on two, then on three. Without any, the test is parametrised with
    `world_size` by another mark, which is `over`.

    Further arguments of the body are fixtures or parameters of the test; their values must pickle.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        comm, *others = inspect.signature(body).parameters.values()

        def test(ranks: Ranks, world_size: int, **values: Any) -> None:
            ranks(
                world_size,
                BodyOf(body.__module__, body.__name__),
                *(values[other.name] for other in others),
            )

        functools.update_wrapper(test, body)
        fixtures = [comm.replace(name=name) for name in ("ranks", "world_size")]
        test.__signature__ = inspect.Signature([*fixtures, *others])
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test

    return decorate


@dataclass(frozen=True)
class BodyOf:
    """The body that a test was made of. Pickles by name: the name in the module belongs to the
    test.
    """

    module: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **values: Any) -> Any:
        body = getattr(importlib.import_module(self.module), self.name).__wrapped__
        return body(*args, **values)


def torchrun_env(world_size: int) -> list[dict[str, str]]:
    """The variables torchrun would set for `world_size` ranks of one host, by rank."""
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(own_port()),
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world_size)]


def own_port(lowest: int = 25_000) -> int:
    """A port at which nobody listens, nor will until the ranks do: from a few that no other process
    of tests takes, and the kernel deals out to none. lowest: of the 7,200 that they share.
    """
    first = lowest + 12 * (os.getpid() % 600)
    for _ in range(12):
        port = first + next(_n_ports) % 12
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As the ranks' store does: a connection that ended a minute ago still has the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port
    raise RuntimeError(f"the ports from {first} to {first + 11} are all taken")


_n_ports = itertools.count()


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
        lasts: bool = False,
    ) -> None:
        """lasts: for further bodies, which need the communicator that this one leaves."""
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        self._processes = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        environments = [env] * world_size if isinstance(env, Mapping) else env
        context = _fork_server()
        init_method = f"file://{self._directory}/rendezvous"
        self._places = [
            Place(rank, world_size, init_method, self._directory, transport)
            for rank in range(world_size)
        ]
        for rank, place in enumerate(self._places):
            ours, theirs = context.Pipe()
            variables = {**environment_of(transport, rank), **environments[rank]}
            process = context.Process(
                target=serve,
                args=(theirs, place, variables, pass_comm, lasts),
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

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def close(self) -> list[int | None]:
        """Ends the processes, politely first, and returns their exit codes."""
        self.signal(signal.SIGCONT)
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
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not all(map(self._has_shown_stacks, late)):
            time.sleep(0.1)
        time.sleep(0.5)  # until they are written to the end
        for rank in late:
            with contextlib.suppress(OSError), open(stacks_path(self._places[rank])) as file:
                outcomes[rank] = Outcome(rank, "hung", stacks=file.read())
            outcomes.setdefault(rank, Outcome(rank, "hung"))
        self._kill()

    def _has_shown_stacks(self, rank: int) -> bool:
        path = stacks_path(self._places[rank])
        return not os.path.exists(path) or os.path.getsize(path) > 0

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


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    return context
