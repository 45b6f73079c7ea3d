"""HostedWork and HostedBucket: a collective that a thread carries out, and a bucket of gradients that it reduces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from fastcomm.communicator import BoundBucket, BucketWork, copy_gradients, presence_values
from fastcomm.errors import FastcommError
from fastcomm.hosted_call import Call
from fastcomm.hosted_exchange import CARRIED_NBYTES

SLICE_S = 0.1  # how often a waiting rank looks at the clock

# Carries a collective out once all ranks have come to it; gets everybody's payload, if there is one.
Move = Callable[[Tensor | None], None]


class Waiter(Protocol):
    """What a work has of its communicator."""

    def look_at_clock(self) -> None: ...
    def hear(self, error: FastcommError) -> None: ...


class HostedWork(BucketWork):
    """A collective in the thread's queue, or under way, or ended: then `error` says how."""

    def __init__(self, waiter: Waiter, call: Call, move: Move, payload: Tensor | None = None, presence: Tensor | None = None) -> None:
        self.call = call
        # These hold the tensors. The payload goes with the announcement if it is small.
        self.move: Move | None = move
        self.payload = payload if payload is not None and payload.nbytes <= CARRIED_NBYTES else None
        self.error: FastcommError | None = None
        self._waiter = waiter
        self._presence = presence
        self._done = threading.Event()

    def wait(self) -> None:
        """Blocks until the result is in place. Raises the FastcommError that ended the collective, if one did."""
        while not self._done.wait(SLICE_S):
            self._waiter.look_at_clock()
        if self.error is not None:
            self._waiter.hear(self.error)
            raise self.error

    def is_completed(self) -> bool:
        """Whether the result is in place, or never will be."""
        return self._done.is_set()

    def present(self) -> list[bool]:
        """See BucketWork.present."""
        self.wait()
        absent, _ = presence_values(self.call.op)
        return [] if self._presence is None else (self._presence != absent).tolist()

    def settle(self, error: FastcommError | None) -> None:
        """The outcome is known. The first one counts."""
        if not self._done.is_set():
            self.error, self.move, self.payload = error, None, None
            self._done.set()


class HostedBucket(BoundBucket):
    """A flat buffer into which gradients are copied, and which then is reduced by `reduce(op, presence)`."""

    def __init__(self, flat: Tensor, views: list[Tensor], reduce: Callable[[str, Tensor], HostedWork]) -> None:
        self._flat, self._views, self._reduce = flat, views, reduce
        self._presence = flat[flat.numel() - len(views) :]

    def gather(self, parameters: list[Parameter | None]) -> list[int]:
        """See BoundBucket.gather."""
        return copy_gradients(self._flat, self._views, parameters)

    def launch(self, op: str, missing: list[int]) -> HostedWork:
        """See BoundBucket.launch. Waits for nobody."""
        absent, present = presence_values(op)
        self._presence.fill_(present)
        if missing:
            self._presence[missing] = absent
        return self._reduce(op, self._presence)

    def note_stream(self) -> None:
        """See BoundBucket.note_stream. There are no streams."""

    def square_sum(self) -> None:
        """See BoundBucket.square_sum."""

    def n_nonfinite(self) -> None:
        """See BoundBucket.n_nonfinite."""
