"""TimedStore: a store whose calls end. Torch's wait for ever where the process that serves the
store is stopped, or where its host has left the network.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from fastcomm.comm.deadline import Deadline
from fastcomm.postmortem.script_end import start_thread

# How much longer than for missing ranks a rank waits for the store itself, which says who is
# missing.
ANSWER_S = 3.0
T = TypeVar("T")


class Silence(RuntimeError):
    """The store has not answered: RuntimeError, as torch raises for a connection that is lost."""


def answer_of(ask: Callable[[], T], patience_s: float) -> T:
    """What `ask` returns or raises. Raises Silence if it does neither, and leaves its thread."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    start_thread("fastcomm asking", run)
    if not Deadline(patience_s).await_(lambda seconds: wait([answer], seconds).done):
        raise Silence(f"the store has not answered for {patience_s:.0f} s")
    return answer.result()


class TimedStore:
    """Has the methods of a store. Once that has not answered, it is not asked again: a thread still
    waits for it, and the next would wait behind that one.

    patience: with each call. deadline: by which the store has to have answered, if that comes
    first.
    """

    def __init__(self, store: Store, patience: timedelta) -> None:
        self._store, self._patience_s = store, patience.total_seconds()
        self._silence: str | None = None
        self.deadline: Deadline | None = None

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, getattr(self._store, name))

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._silence is not None:
            raise Silence(self._silence)
        patience_s = self._patience_s
        if self.deadline is not None:
            patience_s = min(patience_s, self.deadline.left_s())
        try:
            return answer_of(partial(call, *args), patience_s + ANSWER_S)
        except Silence as silence:
            self._silence = str(silence)
            raise
