"""Processes: the ranks that runner.py has started on this machine. Starts each in a session of its
own, prints what it prints, passes signals on to it, and ends it. What the end of one rank means for
the others is decided in runner.py.

docs/launching.md has a table of what each signal does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO, Any, NamedTuple

from fastcomm.comm.deadline import Deadline

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)  # by which batch systems announce the end of a job
# A handler that is neither is the caller's, and stays; SIG_IGN stays, too, for the ranks as well.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_TICK_S = 0.05  # how often the ranks are looked at
_GRACE_S = 30.0  # from the signal that is to end a rank to SIGKILL
_LAST_S = 1.0  # for what an ended rank has printed last: a child of it may hold the pipe still


class Ended(NamedTuple):
    """How a rank has ended. exit_code: as subprocess has it, so -9 after SIGKILL."""

    pid: int
    exit_code: int


class Processes:
    """A context; at its end no rank is left. command: of every rank. is_plain: the ranks write to
    the streams of this process themselves; otherwise each of their lines is printed here behind
    the rank's number.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], is_plain: bool
    ) -> None:
        self._command, self._environment, self._is_plain = command, environment, is_plain
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._printing: list[threading.Thread] = []
        self._streams = _Stream(sys.stdout), _Stream(sys.stderr)
        self._handlers: dict[signal.Signals, Any] = {}
        self._signal: int | None = None  # that is to end all

    @property
    def running(self) -> set[int]:
        """The ranks that have not ended, as far as ended() has said."""
        return set(self._running)

    def start(self, rank: int, variables: Mapping[str, object]) -> None:
        """variables: added to the environment."""
        stream = None if self._is_plain else subprocess.PIPE
        process = subprocess.Popen(
            self._command,
            env={**self._environment, **{name: str(value) for name, value in variables.items()}},
            stdout=stream,
            stderr=stream,
            # A rank has the same encoding. What is no text in it can be printed all the same.
            encoding=getattr(sys.stdout, "encoding", None) or "utf-8",
            errors="backslashreplace",
            start_new_session=True,  # what the terminal sends comes from this process alone
        )
        self._running[rank] = process
        for pipe, to in zip((process.stdout, process.stderr), self._streams, strict=True):
            if pipe is not None:
                arguments = pipe, f"[rank {rank}] ", to
                thread = threading.Thread(target=_print, args=arguments, daemon=True)
                self._printing.append(thread)
                thread.start()

    def ended(self) -> dict[int, Ended]:
        """The ranks that have ended since the last call, after a moment. Raises KeyboardInterrupt
        or SystemExit when a signal is to end this process.
        """
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
        time.sleep(_TICK_S)
        ended = {
            rank: Ended(process.pid, code)
            for rank, process in self._running.items()
            if (code := process.poll()) is not None
        }
        for rank in ended:
            del self._running[rank]
        return ended

    def end(self, number: int = signal.SIGTERM) -> dict[int, Ended]:
        """Ends all that run. Returns how they have ended."""
        ended: dict[int, Ended] = {}
        try:
            self._send(number)
            deadline = Deadline(_GRACE_S)
            while self._running and not deadline.is_over():
                ended |= self.ended()
        finally:  # a second signal does not wait
            self._send(signal.SIGKILL)
            for process in self._running.values():
                process.wait()
        return ended | self.ended()

    def _print_to_the_end(self) -> None:
        """Waits until all is printed. A child of a rank's that goes on may hold a pipe, and whoever
        reads what is printed may be slow. A second signal does not wait.
        """
        deadline = Deadline(_LAST_S)
        while self._signal is None and any(thread.is_alive() for thread in self._printing):
            if deadline.is_over() and not any(stream.is_writing() for stream in self._streams):
                break
            time.sleep(_TICK_S)

    def _send(self, number: int, to_rank_alone: bool = False) -> None:
        """Sends a signal to every rank and, unless to it alone, to the processes of its group."""
        for process in list(self._running.values()):
            if process.poll() is None:  # else the number may be another process's by now
                with contextlib.suppress(ProcessLookupError):
                    (os.kill if to_rank_alone else os.killpg)(process.pid, number)

    # -- signals -----------------------------------------------------------------------------------

    def __enter__(self) -> Processes:
        ours: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            **dict.fromkeys(_ENDING, self._note),
            **dict.fromkeys(_FORWARDED, self._forward),
            signal.SIGTSTP: self._stop,
        }
        if threading.current_thread() is threading.main_thread():  # no other may have handlers
            for number, handler in ours.items():
                if signal.getsignal(number) in _DEFAULTS:
                    self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        number, self._signal = self._signal, None  # the next one is the second
        if number is None:
            number = signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM
        try:
            self.end(number)
            self._print_to_the_end()
        finally:
            for handled, handler in self._handlers.items():
                signal.signal(handled, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Raises nothing, as a rank that is being started would be lost from sight."""
        self._signal = number

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """A worker of a DataLoader, which has no handler, would end."""
        self._send(number, to_rank_alone=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z. The ranks get SIGSTOP: in sessions of their own, SIGTSTP does nothing."""
        self._send(signal.SIGSTOP)
        handler = signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # returns when somebody lets this process go on
        signal.signal(number, handler)
        self._send(signal.SIGCONT)


class _Stream:
    """Where ranks' lines go. If it cannot be written to, says so once, and drops the lines."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._is_lost = False

    def is_writing(self) -> bool:
        return self._lock.locked()

    def write(self, text: str) -> None:
        with self._lock:
            if self._is_lost:
                return
            try:
                self._stream.write(text)
                self._stream.flush()  # a pipe would keep it until the end
            except (OSError, ValueError) as error:  # ValueError: somebody has closed it
                self._is_lost = True
                with contextlib.suppress(OSError, ValueError):  # that stream may be the one
                    print(
                        f"what the ranks print is lost from here on, and they go on: {error}; "
                        "write to a disk with room, or let the reader of the pipe run to the end",
                        file=sys.stderr,
                    )


def _print(pipe: IO[str], prefix: str, to: _Stream) -> None:
    """Prints a rank's lines. Universal newlines make one of each update of a progress bar."""
    with pipe:
        for line in pipe:
            to.write(prefix + line.removesuffix("\n") + "\n")
