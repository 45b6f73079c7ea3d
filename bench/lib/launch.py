"""Starts the ranks of a benchmark and gives them work, one call at a time, from the parent process
that coordinates the measurement.

Several sets of ranks can be alive together: a set that has nothing to do sleeps in a blocking read
of its socket and takes no time from the set that is measured. Calls and answers are lines of JSON.
Whatever happens, `close` leaves no process behind, and no call waits for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Importing torch on a busy machine takes its time; a call measures all rounds of a model, for many
# minutes if that is large.
START_LIMIT = 240.0
CALL_LIMIT = 3600.0
# How long ranks that are told to end, or whose peer has failed, get to do so by themselves.
GRACE = 5.0
SOCKET_VARIABLE = "FASTCOMM_BENCH_SOCKET"
PR_SET_PDEATHSIG = 1


class RanksError(RuntimeError):
    """A rank did not start, failed, ended or did not answer in time. What it printed is on
    stderr.
    """


class Ranks:
    """`world_size` processes of `script`, each of which calls `serve`. They find RANK and
    WORLD_SIZE in their environment, and what `environment` has; a `launcher` (mpirun and its
    arguments) starts all of them by itself, and has its own way to tell them their rank.
    """

    def __init__(
        self,
        script: Path,
        world_size: int,
        *,
        arguments: Sequence[str] = (),
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = script.stem
        self.world_size = world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._environment = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="fastcomm-bench-")
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = str(Path(self._folder.name) / "socket")
                listener.bind(address)
                listener.listen(world_size)
                self._start(
                    [*launcher, sys.executable, str(script), *arguments],
                    address,
                    together=bool(launcher),
                )
                self._connections = self._accept(listener)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str], address: str, *, together: bool) -> None:
        environment = {
            **os.environ,
            **self._environment,
            SOCKET_VARIABLE: address,
            "WORLD_SIZE": str(self.world_size),
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(1 if together else self.world_size):
            # In a session of their own: an interrupt at the keyboard reaches the parent alone,
            # which then ends them in order.
            process = subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._processes.append(process)

    def _accept(self, listener: socket.socket) -> list[socket.socket]:
        """One connection per rank, in the order of ranks."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + START_LIMIT
        listener.settimeout(0.2)
        while len(found) < self.world_size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                ended = [
                    process.returncode for process in self._processes if process.poll() is not None
                ]
                if ended:
                    raise RanksError(
                        f"{self.name}: a rank exited with status {ended[0]} before it was ready"
                    ) from None
                if time.monotonic() > deadline:
                    raise RanksError(
                        f"{self.name}: only {len(found)} of {self.world_size} ranks started in "
                        f"{START_LIMIT:.0f} s"
                    ) from None
                continue
            connection.settimeout(START_LIMIT)
            found[int(receive(connection))] = connection
        return [found[rank] for rank in range(self.world_size)]

    def call(self, method: str, /, **arguments: object) -> list[Any]:
        """Runs this method on every rank at the same time and returns what they return, by
        rank. Raises RanksError.
        """
        for connection in self._connections:
            send(connection, [method, arguments])
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + CALL_LIMIT
        while len(answers) < self.world_size:
            waiting = {
                rank: connection
                for rank, connection in enumerate(self._connections)
                if rank not in answers
            }
            ready = multiprocessing.connection.wait(
                list(waiting.values()), deadline - time.monotonic()
            )
            if not ready:
                late = ", ".join(map(str, waiting))
                raise RanksError(
                    f"{self.name}: no answer from rank {late} to {method} in {CALL_LIMIT:.0f} s"
                )
            for rank, connection in waiting.items():
                if connection in ready:
                    answers[rank] = self._answer(connection, rank, method)
        return [answers[rank] for rank in range(self.world_size)]

    def _answer(self, connection: socket.socket, rank: int, name: str) -> Any:
        try:
            error, value = receive(connection)
        except (EOFError, OSError) as failure:
            raise RanksError(f"{self.name}: rank {rank} ended during {name}") from failure
        if error:
            raise RanksError(f"{self.name}: rank {rank} failed in {name}: {error}")
        return value

    def close(self) -> None:
        """Ends the ranks: politely by closing their sockets, then by signals. mpirun passes SIGTERM
        on to its ranks.
        """
        for connection in self._connections:
            connection.close()
        end_of_patience = time.monotonic() + GRACE if self._connections else 0.0
        for action in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for process in self._processes:
                if action is not None and process.poll() is None:
                    action(process)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end_of_patience - time.monotonic()))
            end_of_patience = time.monotonic() + GRACE
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(rank: int, methods: object) -> None:
    """The rank's side: runs the methods of `methods` that the parent calls, until the parent closes
    the connection.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET_VARIABLE])
        send(connection, rank)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                name, arguments = receive(connection)
                try:
                    answer = [None, getattr(methods, name)(**arguments)]
                except Exception as error:
                    traceback.print_exc()
                    answer = [f"{type(error).__name__}: {error}", None]
                send(connection, answer)


def scratch() -> Path:
    """The rank's side: a folder that these ranks share, for the files they meet through. It goes
    with them.
    """
    return Path(os.environ[SOCKET_VARIABLE]).parent


def die_with_parent() -> None:
    """The rank's side: one that waits in a collective when its parent is killed would wait for
    ever. prctl(2), Linux only.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_on_sigterm() -> None:
    """The parent's side: SIGTERM ends the run as an exception does, through every `close`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def send(connection: socket.socket, message: object) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError where the other side has closed."""
    line = bytearray()
    # Messages alternate, so nothing of a next one is ever read here.
    while not line.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise EOFError
        line += part
    return json.loads(line)
