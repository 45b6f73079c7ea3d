"""Gloo as the engine of a process group: wraps its Works, and names the lost rank in its errors.

Gloo moves and reduces; process_group.py decides which calls go there.
"""

# mypy: disable-error-code="override, no-any-return"
# torch's stubs do not declare the engines.

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.autograd.graph import increment_version
from torch.futures import Future

from fastcomm.comm.deadline import Deadline
from fastcomm.comm.times import LONG_SLICE_S
from fastcomm.comm.who import Process, in_words
from fastcomm.comm.words import DIED
from fastcomm.errors import PeerLostError
from fastcomm.launching.bootstrap import process_has_ended
from fastcomm.torch_backend.work import BackendWork, Finished, Places, put_all, registered

# In the errors of Gloo's connections, which name the source file. Others refuse the arguments.
_OF_CONNECTIONS = "gloo/transport"
_DYING_S = 0.3  # a process that is killed closes its connections a little before it counts as ended
_TRANSFERS = ("send", "recv", "recv_anysource")


def ended(peers: Iterable[Process]) -> list[Process]:
    """Those of this host that have ended. Torch's engines only say that a connection broke; the
    kernel knows which process has ended. A look costs a few microseconds per process.
    """
    return [one for one in peers if process_has_ended(one.pid)]


class GlooEngine:
    """Calls Gloo, and raises PeerLostError where a process of this host has ended."""

    def __init__(self, gloo: Any, peers: Sequence[Process], members: Sequence[int]) -> None:
        """peers: the other ranks on this host. members: the number of each rank among all."""
        self._gloo, self._peers, self._members = gloo, peers, members

    def call(self, name: str, *arguments: Any) -> EngineWork:
        """Calls Gloo's method `name`, which writes to the first of the arguments."""
        if name in _TRANSFERS:  # which the loss of a third rank does not end
            if name != "send":
                increment_version(arguments[0])
            return TransferWork(self._call(name, arguments), self, name)
        # Gloo looks at memory alone: it takes gaps, and signs that torch has put off, for nothing.
        places: list[tuple[Tensor, Tensor]] = []
        flat = [_flat(argument, places if i == 0 else []) for i, argument in enumerate(arguments)]
        is_root = getattr(arguments[-1], "rootRank", None) == self._gloo.rank()
        value = _tensors(arguments[0])
        if (name == "broadcast" and is_root) or (name == "reduce" and not is_root):
            places = []  # this rank only gives
        else:
            increment_version(value)  # torch does so for some kinds alone
        work = EngineWork(self._call(name, flat), self, name, value, places)
        registered(work, value)
        return work

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], opts: Any) -> Finished:
        """By an all-reduce: Gloo's reduce_scatter takes every op for a sum before torch 2.9, and
        ends the process over a scalar or over unequal parts.
        """
        flats = [part.detach().reshape(-1) for part in parts]
        whole = torch.cat(flats)
        reduction = c10d.AllreduceOptions()
        reduction.reduceOp, reduction.timeout = opts.reduceOp, opts.timeout
        self.call("allreduce", [whole], reduction).wait()
        own = whole.split([flat.numel() for flat in flats])[self._gloo.rank()]
        put_all([(output, own.view(output.shape))])
        return Finished([output])

    def _call(self, name: str, arguments: Sequence[Any]) -> Any:
        try:
            return getattr(self._gloo, name)(*arguments)
        except RuntimeError as error:  # over a connection that broke just before, say
            self.raise_if_lost(name, error)
            raise

    def raise_if_lost(self, name: str, error: RuntimeError | None = None) -> None:
        """Raises PeerLostError if a process has ended, or ends soon as its connection broke."""
        deadline = Deadline(_DYING_S if _OF_CONNECTIONS in str(error) else 0)
        while not (found := ended(self._peers)):
            if deadline.is_over():
                return
            time.sleep(0.005)
        lost = [one._replace(rank=self._members[one.rank]) for one in found]
        own = self._members[self._gloo.rank()]
        gloo_says = f": {error}" if error is not None else ""
        message = f"{in_words(lost)} {DIED}; rank {own} waits in {name}, over Gloo{gloo_says}"
        raise PeerLostError(message, [one.rank for one in lost]) from error


def _flat(argument: Any, places: list[tuple[Tensor, Tensor]]) -> Any:
    """The argument with contiguous tensors. places: gets those copied, each with its copy."""
    if isinstance(argument, list):
        return [_flat(one, places) for one in argument]
    if not isinstance(argument, Tensor) or argument.layout is not torch.strided:
        return argument
    if argument.is_contiguous() and not argument.is_neg():
        return argument
    flat = argument.detach().resolve_neg().contiguous()
    places.append((argument, flat))
    return flat


def _tensors(outputs: Any) -> list[Tensor]:
    """Those that a call writes to: one, a list, or a list for each of its inputs."""
    if isinstance(outputs, list):
        return _tensors(outputs[0]) if outputs and isinstance(outputs[0], list) else outputs
    return [outputs]


class EngineWork(BackendWork):
    """A collective that Gloo carries out."""

    def __init__(
        self,
        work: Any,
        engine: GlooEngine,
        name: str,
        value: Sequence[Tensor] = (),
        places: Places = (),
    ) -> None:
        """value: returned by result() where there are places: see SharedCommunicator.run."""
        super().__init__()
        self._work, self._engine, self._name = work, engine, name
        self._value, self._places, self._is_copied = value, places, bool(places)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises PeerLostError if a rank is known to be lost, else Gloo's error.

        Waits in slices, to look for lost ranks in between: Gloo ends at once only the waits for the
        lost rank itself. That a slice is over says nothing of the collective: only a completed one
        has an error of its own.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0
        deadline = Deadline(seconds if seconds > 0 else math.inf)
        while not self._work.is_completed():
            # Torch drops fractions of milliseconds, and takes 0 for no limit.
            slice_ms = max(1, math.ceil(1e3 * min(LONG_SLICE_S, deadline.left_s())))
            try:
                self._work.wait(timedelta(milliseconds=slice_ms))
                break
            except RuntimeError:
                if self._work.is_completed():
                    break
                self._engine.raise_if_lost(self._name)
                if deadline.is_over():
                    raise
        try:
            self._work.wait()
        except RuntimeError as error:
            self._engine.raise_if_lost(self._name, error)
            raise
        self._place()
        return True

    def _place(self) -> None:
        put_all(self._places)
        self._places = ()

    def is_completed(self) -> bool:
        """Also puts the results in place: an error is for wait()."""
        if not self._work.is_completed():
            return False
        if self._places:
            with contextlib.suppress(RuntimeError):
                self._work.wait()
                self._place()
        return True

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        self.wait()
        return self._work.result() if not self._is_copied else list(self._value)

    def get_future(self) -> Future[Any]:
        """Gloo's own future, with Gloo's errors: no Python code may run in Gloo's threads. So one
        whose results have to be put in place is waited for.
        """
        if not self._is_copied:
            return self._work.get_future()
        return Finished(self.result()).get_future()


class TransferWork(EngineWork):
    """A tensor on its way between two ranks.

    Gloo gives a transfer up when a wait for it times out, so this waits only once.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            self._engine.raise_if_lost(self._name, error)
            raise
