"""Communication hooks written for torch's DDP, run by a Reducer: a stand-in for GradBucket, and a
bucket that such hooks reduce.

The tensor in the hook's future becomes the gradients; the hook divides, too. The communicator only
carries the used mask and, once a round was abandoned, how often each rank has called
the hook: what a hook has posted elsewhere stays posted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.comm.collective import SKIP, as_pairs
from fastcomm.comm.communicator import Work
from fastcomm.comm.flat_buffers import FlatBuffer
from fastcomm.comm.objects import on_host
from fastcomm.comm.transport import BoundBucket, BucketWork, Transport, copy_gradients
from fastcomm.errors import FastcommError
from fastcomm.reducer.layout import view_of
from fastcomm.transports.cuda.driver import Producers

NEVER = -1

# A state and a function, which is called with the state and a bucket, as in DDP's
# register_comm_hook.
Hook = tuple[Any, Callable[[Any, Any], "torch.futures.Future[Tensor]"]]


def hooks_of(hook: Hook | Sequence[Hook] | None) -> tuple[Hook, ...]:
    """One hook, several, or none, as a tuple. Raises TypeError."""
    pairs = () if hook is None else tuple(hook) if isinstance(hook, list) else (hook,)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])):
            raise TypeError(
                "a hook is a pair (state, function) as for register_comm_hook, or a list of "
                f"them; got {pair!r}"
            )
    return pairs


class HookCalls:
    """Counts how often this rank has called a reducer's hook. After an abandoned round the ranks
    compare their counts before they call the hook again.
    """

    def __init__(self) -> None:
        self._n = 0
        self._was_pending = False
        self._n_abandoned = NEVER  # of the communicator, when the ranks last agreed

    def begin(self, comm: Transport) -> None:
        """Called at attach(), when the ranks have met. Earlier calls stay counted."""
        if self._n_abandoned == NEVER:
            self._n_abandoned = comm.n_abandoned

    def count(self, future: torch.futures.Future[Tensor]) -> None:
        self._n += 1
        # a hook that is done at once has posted nothing, or has waited for all ranks
        self._was_pending |= not future.done()

    def compare(self, comm: Transport) -> None:
        """Raises FastcommError, on every rank, if what some have posted would be taken for later
        collectives.
        """
        if comm.n_abandoned == self._n_abandoned:
            return
        facts = torch.tensor([self._n, -self._n, self._was_pending], device=comm.device)
        comm.all_reduce(facts, "max")
        most, negated_least, was_pending = on_host(comm, facts).tolist()
        if was_pending and most != -negated_least:
            raise FastcommError(
                f"rank {comm.rank}: in a backward that was abandoned, some ranks had called "
                "the communication hook and others had not: they have called it "
                f"{-negated_least} to {most} times, and this rank {self._n}. What it has posted "
                "would be taken for later collectives. Make a new process group for the hook, and "
                "a new Reducer, on every rank"
            )
        self._n_abandoned = comm.n_abandoned


@dataclass(frozen=True)
class BucketHooks:
    """The hooks that reduce a bucket, and which of the reducer's buckets it is."""

    chain: Sequence[Hook]
    calls: HookCalls
    index: int
    is_last: bool


class GradBucket:
    """Passed to hooks in place of torch.distributed.GradBucket, which cannot be made from Python.
    Its index is the same in every step.
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        buffer: Tensor,
        offsets: list[int],
        like: list[Tensor],
        parameters: list[Tensor],
    ) -> None:
        """like: tensors of the gradients' shapes and strides, which begin at these offsets of the
        buffer.
        """
        self._index = index
        self._is_last = is_last
        self._offsets, self._like = offsets, like
        self._parameters = parameters
        self.set_buffer(buffer)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        """The flat buffer, padding between the gradients included."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the buffer, gradients included: for hooks that wrap others, and cast."""
        begin = buffer.storage_offset()
        self._gradients = [
            buffer.as_strided(one.shape, one.stride(), begin + offset)
            for offset, one in zip(self._offsets, self._like, strict=True)
        ]
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def parameters(self) -> list[Tensor]:
        return self._parameters


class HookedBucket(BoundBucket):
    """A flat buffer that hooks reduce in turn: each gets the result of the one before."""

    def __init__(
        self,
        comm: Transport,
        hooks: BucketHooks,
        flat: Tensor,
        views: list[Tensor],
        offsets: list[int],
    ) -> None:
        self._known = FlatBuffer(flat)
        self._offsets = offsets
        self._comm = comm
        self._hooks = hooks
        self._flat = flat
        self._views = views
        # as in DDP, hooks see complex gradients as pairs
        self._like = [as_pairs(view) for view in views]
        # Collectives over a communicator of ours end with the round.
        self._is_ours = all(
            isinstance(getattr(state, "comm", state), Transport) for state, _ in hooks.chain
        )
        # Held, they would hold the reducer, which their own hooks hold, and torch shows the garbage
        # collector no such circle.
        self._parameters: list[weakref.ref[Parameter] | None] = [None] * len(views)
        self._producers = Producers(comm.cuda) if comm.has_streams else None
        self._posted: BucketWork | None = None

    @property
    def posted(self) -> BucketWork | None:
        """The work once the hook has begun it: only the hook can finish that."""
        return self._posted

    def gather(self, parameters: list[Parameter | None]) -> list[int]:
        self._posted = None
        gradients = self._order_gathering(parameters)
        left = copy_gradients(self._views, parameters)
        self._release(gradients)
        self._parameters = [None if one is None else weakref.ref(one) for one in parameters]
        return left

    def launch(self, op: str, missing: list[int], step: int = 0, weight: Any = None) -> BucketWork:
        self._posted = None
        if not self._is_ours:
            self._hooks.calls.compare(self._comm)
        # the used mask, and behind it this rank's vote to drop the round
        used_mask = torch.ones(len(self._views) + 1, device=self._flat.device)
        used_mask[missing] = 0
        used_mask[-1] = op == SKIP
        buffer = self._flat[: self._flat.numel() - len(self._views)]
        if op == SKIP:
            buffer.zero_()  # a hook may keep something of it
        bucket = GradBucket(
            self._hooks.index,
            self._hooks.is_last,
            # with a storage of its own: a hook that puts it on a queue to a process moves that
            view_of(buffer, 0, buffer.shape, (1,)),
            self._offsets,
            self._like,
            self._known_parameters(),
        )
        *wrapped, (state, hook) = self._hooks.chain
        for first_state, first in wrapped:
            bucket.set_buffer(_value(first(first_state, bucket)))
        future = hook(state, bucket)
        self._hooks.calls.count(future)
        # Last: if the hook raises on one rank, the others wait for that rank here, and learn of it
        # in the same step.
        known = self._comm.all_reduce(used_mask, "max", async_op=True)
        assert known is not None  # for the type checker: async_op was asked for
        self._posted = _HookedWork(buffer, future, used_mask, known)
        return self._posted

    def _known_parameters(self) -> list[Tensor]:
        """Those that were gathered; for one without a gradient its place in the buffer."""
        known = [None if reference is None else reference() for reference in self._parameters]
        return [view if one is None else one for one, view in zip(known, self._views, strict=True)]

    def _order_gathering(self, parameters: list[Parameter | None]) -> list[Tensor]:
        """Gradients are gathered on the stream that is current now, as hooks expect: orders it
        after the streams on which they were produced. Returns them, where there are streams.
        """
        if self._producers is None:
            return []
        self._producers.order_before_current()
        return [one.grad for one in parameters if one is not None and one.grad is not None]

    def _release(self, gradients: list[Tensor]) -> None:
        if self._producers is not None:
            for gradient in gradients:
                self._producers.keep(gradient)
            self._producers.clear()

    def note_stream(self) -> None:
        """Notes that a gradient has been produced on the current stream."""
        if self._producers is not None:
            self._producers.note()


class _HookedWork(BucketWork):
    def __init__(
        self, buffer: Tensor, future: torch.futures.Future[Tensor], used_mask: Tensor, known: Work
    ) -> None:
        self._buffer = buffer
        self._future = future
        self._used_mask = used_mask
        self._known = known

    def wait(self) -> None:
        self._known.wait()
        value = _value(self._future)
        if value.data_ptr() != self._buffer.data_ptr() or value.dtype != self._buffer.dtype:
            self._buffer.copy_(value)

    def is_completed(self) -> bool:
        return self._future.done() and self._known.is_completed()

    def present(self) -> list[bool]:
        return self._facts()[:-1]

    def is_skipped(self) -> bool:
        return self._facts()[-1]

    def _facts(self) -> list[bool]:
        facts = [bool(value) for value in self._used_mask.tolist()]
        self._known.wait()  # over NCCL, whether that was the result
        return facts


def _value(future: torch.futures.Future[Tensor]) -> Tensor:
    """The tensor in a hook's future; some hooks leave a list of one."""
    value = future.wait()
    return value[0] if isinstance(value, (list, tuple)) else value
