"""GroupWork and GroupBucket: a collective that a thread runs, and a bucket that it reduces.

Python runs signal handlers in the main thread, between almost any two of its instructions, and they
may raise: Ctrl-C does. A collective that the other ranks may know of must be finished all the same.
Otherwise this rank would fall out of step, and the thread would write to memory that is in other
use by then. So every wait goes through `see_through`, in steps that may be interrupted anywhere and
begun again.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from fastcomm.comm.collective import OPS
from fastcomm.comm.gathering import CopiedGradients, UsedMask
from fastcomm.comm.times import SLICE_S
from fastcomm.comm.transport import ALIKE, BoundBucket, BucketWork, Part
from fastcomm.control.announcement import Call
from fastcomm.errors import FastcommError
from fastcomm.transports.group.exchange import FUSABLE_NBYTES, FUSED_NBYTES
from fastcomm.transports.group.shards import MOST_FUSED, PAYLOAD_NBYTES, Transfer

if TYPE_CHECKING:
    from fastcomm.postmortem.flight_recorder import Entry
    from fastcomm.transports.group.work_queue import WorkQueue

_ABORTS = 10  # attempts: repeated Ctrl-C may interrupt a few of them


def see_through(
    step: Callable[[BaseException | None], None], abort: Callable[[], None]
) -> BaseException | None:
    """Calls `step` until it returns; returns what a signal handler has raised meanwhile, or None.

    step: gets what has been raised so far. It raises nothing itself: what comes out of it is a
        handler's exception.
    abort: called when a handler raises a second time; that exception is raised then.
    """
    try:
        raised: BaseException | None = None
        while True:
            try:
                step(raised)
                return raised
            except BaseException as exception:
                if raised is not None:
                    raise
                raised = exception
    except BaseException:  # the second exception, wherever in the loop it came
        for _ in range(_ABORTS):
            try:
                abort()
                break
            except BaseException:
                continue
        raise


class GroupWork(BucketWork):
    """A collective that the queue's thread runs: posted, then announced to the other ranks, then
    running, then over. `error`: what ended it, or None.
    """

    def __init__(
        self,
        work_queue: WorkQueue,
        call: Call,
        transfer: Transfer | None = None,
        written: Sequence[Tensor] = (),
        used_mask: UsedMask | None = None,
    ) -> None:
        """transfer: None if the announcement is all there is to the collective. written: the user's
        tensors that it writes to; autograd hears of that here and at the end, as somebody may use
        them meanwhile.
        """
        if written:
            increment_version(written)
        self.call, self.written = call, written
        # These hold the tensors. A small payload goes with the announcement.
        self.transfer = transfer
        payload = None if transfer is None else transfer.payload
        is_small = payload is not None and payload.nbytes <= PAYLOAD_NBYTES
        self.payload = payload if is_small else None
        # The tensor, if others can be fused with it: nothing but its length, label and fingerprint
        # tells it from theirs, and it does not travel with its announcement.
        is_fusable = not is_small and call.nbytes <= FUSABLE_NBYTES and call.op in OPS
        self.fusable = transfer.fusable if transfer is not None and is_fusable else None
        self.is_prepared = False  # its data may be sent with its announcement
        self.is_announced = False  # the other ranks may know of it
        self.error: FastcommError | None = None
        self.has_followed = False  # without data, the rank has taken part in what the others called
        self.entry: Entry | None = None  # once it is posted
        self._queue = work_queue
        self._n_abandoned = work_queue.standing.n_abandoned
        self._used_mask = used_mask
        self.noted_times: tuple[int, int, int] | None = None
        self.was_skipped = False
        self._is_refused = False
        self._is_over = False
        # Holds something once the work is over. Not an Event: an exception inside its Python code
        # would leave its lock locked.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def prepare(self) -> None:
        """Makes what is sent with the announcement, if anything may be."""
        transfer = self.transfer
        if transfer is not None and transfer.can_begin(self.call.op):
            transfer.prepare(self.call.op)
            self.is_prepared = True

    def fusable_behind(self, works: list[GroupWork]) -> list[GroupWork]:
        """Those right behind this one that can be fused with it: none once this one is announced,
        as its announcement names them.
        """
        found: list[GroupWork] = []
        if self.is_announced or self.fusable is None:
            return found
        nbytes = self.call.nbytes
        first = works.index(self) + 1
        for other in works[first : first + MOST_FUSED]:
            nbytes += other.call.nbytes
            is_alike = other.fusable is not None and self.call.is_like(other.call)
            if not is_alike or nbytes > FUSED_NBYTES:
                break
            found.append(other)
        return found

    @property
    def is_posted(self) -> bool:
        """Whether the thread may have announced it: from then on the other ranks count on it."""
        # In this order: a work that the queue no longer holds is over.
        return self._queue.holds(self) or (self._is_over and not self._is_refused)

    def run(self) -> None:
        """Posts the collective and waits for it."""

        def step(raised: BaseException | None) -> None:
            if raised is None and not self._is_over and not self.is_posted:
                self._queue.post(self)
            if self.is_posted:
                self.sleep()

        self._end(see_through(step, self._queue.abort))

    def post(self) -> None:
        """Posts the collective and does not wait."""
        self._queue.post(self)
        if self._is_refused:
            self._end(None)

    def wait(self) -> None:
        """Blocks until the result is in place. Raises the FastcommError that ended the collective.

        What a signal handler raises meanwhile is raised afterwards, from that error if there is
        one. A second exception is raised at once, and aborts the communicator. In a forked child,
        which has no thread to run it, raises FastcommError.
        """
        self._queue.refuse_fork()
        if not self._is_over or self.error is not None:
            self._end(see_through(lambda _: self.sleep(), self._queue.abort))

    def sleep(self) -> None:
        """Waits until the work is over."""
        while not self._is_over:
            try:
                self._bell.get(timeout=SLICE_S)
                self._bell.put(None)  # for others who wait
            except queue.Empty:
                self._queue.look_at_clock()

    def _end(self, raised: BaseException | None) -> None:
        """Raises the work's error, and what a signal handler has raised, if anything."""
        error = self.error
        if error is not None:
            copy = self._queue.heard(error, self._n_abandoned)
            if raised is not None:
                raise raised from copy
            raise copy
        if raised is not None:
            raise raised

    def is_completed(self) -> bool:
        """Whether the result is in place, or never will be."""
        return self._is_over

    def present(self) -> list[bool]:
        self.wait()
        return [] if self._used_mask is None else self._used_mask.present(self.call.op)

    def is_skipped(self) -> bool:
        return self.was_skipped

    def times(self) -> tuple[int, int, int] | None:
        return self.noted_times

    def refuse(self, error: FastcommError) -> None:
        """Ends the work with `error`: it is not posted, and never will be."""
        self._is_refused = True
        self.resolve(error)

    def resolve(self, error: FastcommError | None) -> None:
        """Sets the outcome. The first one counts."""
        if not self._is_over:
            increment_version(self.written)  # whoever saw them since the call
            self.error = error
            if self.entry is not None:
                self.entry.end(error)
            self.transfer = self.payload = self.fusable = None
            self.written = ()
            self._is_over = True
            self._bell.put(None)


class GroupBucket(BoundBucket):
    """A flat buffer into which gradients are copied. transfer: reduces it on the thread. sent: the
    dtype in which it travels.
    """

    def __init__(
        self,
        work_queue: WorkQueue,
        flat: Tensor,
        views: list[Tensor],
        transfer: Transfer,
        sent: torch.dtype,
        label: int,
    ) -> None:
        self._queue, self._flat, self.transfer = work_queue, flat, transfer
        self._gathering = CopiedGradients(flat, views)
        self._sent, self._label = sent, label
        self._newest: GroupWork | None = None

    def fits(self, call: Call) -> bool:
        """Whether the call can be of this bucket, as another rank announces it."""
        return (call.numel, call.dtype) == (self._flat.numel(), self._flat.dtype)

    @property
    def posted(self) -> GroupWork | None:
        work = self._newest
        return work if work is not None and work.is_posted else None

    def gather(self, parameters: list[Parameter | None]) -> list[int]:
        self._newest = None
        return self._gathering.gather(parameters)

    def launch(
        self, op: str, missing: list[int], fingerprint: int = 0, part: Part = ALIKE
    ) -> GroupWork:
        """Waits for nobody."""
        self._newest, flat, mask = None, self._flat, self._gathering.used_mask
        self._queue.check_usable()
        mask.fill(op, missing)
        what = "all_reduce", flat.numel(), flat.dtype, self._sent, op
        call = Call(*what, label=self._label, fingerprint=fingerprint, part=part)
        work = self._newest = GroupWork(self._queue, call, self.transfer, used_mask=mask)
        work.post()
        return work

    def prepare_without_data(self, n_ranks: int) -> Tensor | None:
        """Lets this rank take part with zeros, while no work of this bucket is unfinished.
        Returns what its transfer gets as payloads.
        """
        payload = self.transfer.payload
        self._flat.zero_()
        if payload is None or payload.nbytes > PAYLOAD_NBYTES:
            return None
        return payload.new_zeros(n_ranks, payload.numel())
