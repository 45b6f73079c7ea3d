"""Transport: what a reducer needs of a communicator beside its collectives.

A transport (shm.ShmCommunicator, ...) implements it. The reducer uses `bind_bucket`, in which a
transport may fuse the gathering of gradients with the reduction.
"""

from __future__ import annotations

import abc
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fastcomm.comm.communicator import Communicator, Work
from fastcomm.comm.standing import Standing
from fastcomm.comm.who import Process


class Part(NamedTuple):
    """What one rank brings into a round. By collective.WEIGHTED_OPS the result is the sum over the
    ranks of scale * gradients, divided by the sum of their weights; where that is 0, it is 0.

    weight: of all the rank's data. scale: 0 where weight is. Other ops ask for neither.
    votes: the rank votes to drop the round, and nothing of it counts.
    total: for the transport, the sum of the weights where begin_round adds them up; else None.
    """

    weight: float = 1.0
    scale: float = 1.0
    votes: bool = False
    total: Any = None


ALIKE = Part()  # as all ranks without a weight


class BucketWork(Work):
    """A bucket under way."""

    @abc.abstractmethod
    def present(self) -> list[bool]:
        """After `wait`: by view, whether some rank had a gradient to put there. Waits for the
        result.
        """

    def is_skipped(self) -> bool:
        """After `wait`: whether some rank has voted, where votes travel by themselves. All ranks
        hear of it, and there is no result then.
        """
        return False

    def times(self) -> tuple[int, int, int] | None:
        """In ns of time.monotonic_ns(): when the gradients were gathered (on a device; else 0),
        when the reduction began, with all ranks there, and when this rank's part in it was through.
        Known only of what was launched while Transport.keep_times() was on; None also where the
        transport cannot tell, or not yet. Does not wait.
        """
        return None


class BoundBucket(abc.ABC):
    """A flat buffer that is reduced again and again, as a transport sees it: what can be worked out
    once has been.
    """

    @property
    @abc.abstractmethod
    def posted(self) -> BucketWork | None:
        """The work of the newest launch once the other ranks may know of it; else None.

        Also where an exception out of a signal handler has ended `launch`. None when `gather` or
        `launch` begins.
        """

    @abc.abstractmethod
    def gather(self, parameters: list[Parameter | None]) -> list[int]:
        """Moves the gradients to their places, now or in the launch that must follow;
        parameters[i].grad becomes views[i].

        parameters: one for each view. Returns the indices that are left: where there is None, or a
        parameter without a gradient. Raises RuntimeError whose `slot` is the index of a gradient
        that cannot be moved.
        """

    @abc.abstractmethod
    def launch(
        self, op: str, missing: list[int], fingerprint: int = 0, part: Part = ALIKE
    ) -> BucketWork:
        """Starts reducing the flat buffer, in place. missing: the views for which this rank has no
        gradient; the others hear of it.

        op: as Communicator.all_reduce, or one of collective.WEIGHTED_OPS.

        part: what begin_round has returned. Where its weight is 0, all views are missing. Where it
        votes, the others see is_skipped or, over NCCL, a NaN in the result.

        fingerprint: see collective.fingerprint_of. Ranks that differ get MismatchError, all of
        them, but not over NCCL.
        """

    def note_stream(self) -> None:
        """A gradient of this bucket was produced on the current stream. Called only where
        has_streams.
        """
        raise NotImplementedError

    def count_results(self, adds_squares: bool) -> bool:
        """Asks for n_nonfinite and, with adds_squares, for square_sum, which a transport may count
        while reducing, from the next launch on. Cannot be undone. Returns whether it knows them.
        """
        del adds_squares
        return False

    def square_sum(self) -> Tensor | None:
        """The sum over the views, a float64 scalar on their device: as they are now or, after
        count_results, as the last launch has left them. None: unknown, and torch's own way is as
        good here.
        """
        return None

    def n_nonfinite(self) -> Tensor | None:
        """How many elements the last reduction has left infinite or NaN: an int64 scalar on their
        device. None as above.
        """
        return None


class Transport(Communicator):
    """A communicator, as reducers and the transports themselves see it. May change."""

    __slots__ = ()
    processes: tuple[Process, ...]  # by rank
    flight: Any  # the newest collectives, a fastcomm.postmortem.flight_recorder.FlightRecorder
    standing: Standing
    # Without a Python frame, in which a signal handler might raise.
    n_abandoned = property(attrgetter("standing.n_abandoned"))
    failure = property(attrgetter("standing.failure"))
    open_join: Any = None  # a block of join(), in which ranks whose data has ended follow()
    # Capabilities, by which callers choose; they ask for no transport by its type.
    has_streams: bool  # work is ordered by streams, on which buckets note their gradients
    cuda: Any  # where there are streams: the device, a fastcomm.transports.cuda.driver.Device
    crosses_network: bool  # ranks may be on several hosts, and the CPU moves the data
    adds_by_tree: bool  # the sum over all ranks is that of kernels/shm/reduce.h
    is_threadsafe: bool  # any number of threads may call it and wait at once

    def begin_round(self, op: str, part: Part, reducer: int) -> Part:
        """A round begins. All ranks call it before the first bucket, with the same op and the
        number of the reducer. Returns what its launches need. Does not wait.
        """
        del op, reducer
        self.end_round()
        return part

    def end_round(self) -> None:
        """What was launched so far is not abandoned with what comes: the round has ended alike on
        all ranks.
        """
        self.standing.forget_abandonment()

    @abc.abstractmethod
    def broadcast_all(self, tensors: list[Tensor], src: int = 0) -> None:
        """Broadcasts many tensors, at once where the transport can."""

    @abc.abstractmethod
    def bind_bucket(
        self,
        flat: Tensor,
        views: list[Tensor],
        offsets: list[int],
        *,
        wire_dtype: torch.dtype | None,
        label: int,
        lane: int = 0,
        bounds: tuple[int, ...] | None = None,
        error_feedback: bool = False,
    ) -> BoundBucket:
        """Prepares the reduction of `flat`. views[i] begins at its element offsets[i], ascending; a
        complex view takes pairs of elements. `flat` ends with one element for each view, by which
        the ranks tell each other which gradients they have.

        wire_dtype: what the elements are cast to on their way between ranks. None: none was chosen,
        and the transport rounds as its all_reduce does. The same on all ranks.

        label: a number that is equal on all ranks and different for different buckets. Ranks that
        launch buckets of different labels get MismatchError, all of them. lane: buckets of
        different lanes do not wait for each other, where the transport has lanes.

        bounds: rank r needs only the elements from bounds[r] to bounds[r + 1] of the result, and
        what lies behind bounds[world_size]; what it has elsewhere is undefined. None: all of them.
        A transport that gains nothing by it may leave the whole result.

        error_feedback: keep what wire_dtype, of 8 or 16 bits, has dropped, and add it to what is
        sent in the next round. Only where feeds_back_errors.
        """

    def refuse_vote(self, op: str, looks_for_nan: bool) -> None:
        """Raises FastcommError where no vote would reach the other ranks, not even as a NaN."""
        del op, looks_for_nan

    def follow(self) -> bool:
        """Takes part, without data, in the other ranks' next collective, the reduction of a bucket,
        and adds nothing to it; over NCCL in their next round. A mean is over the other ranks; the
        contents of this rank's own bucket are undefined afterwards. Waits for the others. Returns
        True if all ranks have called this, so that there was nothing to reduce.

        Raises MismatchError, on every rank, if the others call anything else.
        """
        raise NotImplementedError

    def refuse_capture(self, what: str) -> None:
        """Raises FastcommError if a CUDA graph is being captured. what: the call that would wait
        for the device.
        """
        del what

    def make_window(self, flat: Tensor, *, label: int) -> None:
        """Lets collectives do without a copy of `flat`, which `empty` has made, where the transport
        needs to know of it first. Collective. A second call does nothing until the ranks have met
        anew.
        """
        del flat, label

    @abc.abstractmethod
    def all_gather_v(self, flat: Tensor, bounds: tuple[int, ...], *, label: int = 0) -> Work:
        """Copies each rank's shard of `flat`, the elements from bounds[rank] to bounds[rank + 1],
        to all others. Returns the Work at once.

        flat: made by `empty`; bounds: of world_size + 1 numbers, ascending, equal on all ranks.
        label: of the bucket whose parameters these are.
        """

    def keep_times(self, is_on: bool) -> None:
        """Turns the times of buckets' works on or off. Call it once with False for each call with
        True. By default a transport keeps none.
        """
        del is_on

    @property
    def has_captured(self) -> bool:
        """Whether a CUDA graph has collectives of this communicator. Only where has_streams."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Notes where the device's current stream is: two marks know the ns between them, by
        `later.ns_since(earlier)`, once both are reached. None while a CUDA graph is captured, and
        where none can be made. Only where has_streams.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def check_tensor(self, tensor: Tensor) -> None:
        """Raises what a collective raises by itself, before any peer is involved: ValueError or
        TypeError for a tensor that it does not take, FastcommError where none can begin.
        """

    def end_channels(self, *, aborts: bool) -> None:
        """Ends what send() and recv() go by. close() and abort() begin with it."""
        if self.membership is not None:
            self.membership.end_channels(aborts)

    @abc.abstractmethod
    def check(self) -> None:
        """Raises what has ended the collectives under way, if that is known by now. Does not
        wait.
        """
