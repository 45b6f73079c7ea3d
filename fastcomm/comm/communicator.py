"""Communicator and Work: the collectives that users hold. What a transport owes a reducer beside
them is in transport.py.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fastcomm.comm.collective import Op
from fastcomm.errors import FastcommError

C = TypeVar("C", bound="Communicator")
_LONGEST_WAIT = timedelta(seconds=30)  # for ranks that live and do not come to a rebuild()


class ProcessBound:
    """The base of what belongs to one process, and can be neither copied nor pickled."""

    __slots__ = ()  # so that a compiled class can have it for a base
    instead = ""  # what to do, behind "keep it out of what you copy or save"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError. Called by copy, pickle and torch.save()."""
        raise TypeError(
            f"a {type(self).__name__} belongs to this process, and can be neither copied nor "
            f"pickled: keep it out of what you copy or save{self.instead}"
        )


class Work(ProcessBound, abc.ABC):
    """A collective that has been launched. Its tensors must not be touched until `wait` returns."""

    instead = ", and call its wait() first"

    @abc.abstractmethod
    def wait(self) -> None:
        """Blocks until the result is in place (on CUDA: until the current stream is ordered after
        it). Raises FastcommError.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Whether the collective has ended, with a result or an error. Lets it make progress if
        that takes no waiting.
        """


class Communicator(ProcessBound, abc.ABC):
    """Collectives between `world_size` ranks. All ranks call the same ones in the same order; one
    thread at a time per communicator. fastcomm.init() makes it. As a context manager it closes at
    the end of the block, or aborts if an exception other than sys.exit(0) ends the block.

    rank: the number of this process, from 0 to world_size - 1.
    world_size: how many ranks there are.
    local_rank: this rank's number among the ranks of its host.
    timeout: how long a collective waits for other ranks.
    device: where tensors have to be: torch.device("cpu"), or this rank's CUDA device.
    backend: "shm", "nccl", "group" or "hierarchical". To choose what to do, use the next three.
    wire_dtypes: the dtypes that Reducer(wire_dtype=...) takes.
    feeds_back_errors: whether Reducer(error_feedback=True) is possible.
    progresses_itself: whether a collective with async_op=True makes progress while nobody is inside
        a call.

    If a collective cannot be completed, it raises MismatchError, PeerLostError or TimeoutError on
    every rank. It raises FastcommError after close(), and ValueError or TypeError for a bad
    argument, on this rank only. Over NCCL a later call may raise the error, because the host does
    not wait for the device. With async_op=True a collective returns a Work immediately, otherwise
    None. Do not use the tensors, or pass them to another collective, until work.wait() has
    returned; it raises what went wrong. For autograd a collective is a write to the tensors that it
    changes: a backward that needs their old values raises torch's error.

    If you copy an object that holds a communicator, such as a model, the copy holds the same one.
    Pickling raises TypeError.
    """

    __slots__ = ()
    instead = ", and call fastcomm.init() where you load it"
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    wire_dtypes: tuple[torch.dtype, ...]
    feeds_back_errors: bool
    progresses_itself: bool
    timeout: timedelta
    # For rebuild(), split(), send() and recv(): a fastcomm.launching.membership.Fixed
    membership: Any = None

    def __copy__(self: C) -> C:
        return self

    def __deepcopy__(self: C, memo: dict[int, Any]) -> C:
        return self

    @property
    @abc.abstractmethod
    def failure(self) -> FastcommError | None:
        """The error that ended this communicator, as far as this rank knows, or None. Does not ask
        other ranks.
        """

    @abc.abstractmethod
    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Returns an uninitialised flat tensor of `numel` elements on `device`, in memory that this
        transport reaches without a copy: shared memory, or memory of NCCL. The memory lives as long
        as the tensor. Only this rank is involved. Raises ValueError for a negative numel, TypeError
        for a dtype that is not reduced, MemoryError.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False) -> Work | None:
        """Reduces `tensor` over all ranks, in place. The result has the same bits on every rank.

        tensor: contiguous, on `device`, of any shape; numel and dtype are the same on every rank.
        op: "sum", "mean", "min", "max", "prod", or the same of torch.distributed.ReduceOp. Of
            complex tensors, which all collectives take as pairs of real numbers, sum or mean.

        On the CPU 16-bit floats are added in float32 and rounded once.
        """

    @abc.abstractmethod
    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduces many tensors over all ranks, in place, in one collective. For small tensors this
        is faster than an all_reduce of each.

        tensors: each as in all_reduce; of one dtype, sharing no memory. The ranks compare how many
            there are and a checksum of their sizes, which misses a difference with a chance of 1 in
            2**31. Over NCCL nothing compares them, as in all_reduce.

        The results equal those of an all_reduce of each: bit for bit over shared memory and
        "group"; over other transports the order of addition may differ.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False) -> Work | None:
        """Copies rank `src`'s `tensor` into every other rank's: contiguous, on `device`, of the
        same numel and dtype on every rank.
        """

    @abc.abstractmethod
    def all_gather_single(self, out: Tensor, inp: Tensor, *, async_op: bool = False) -> Work | None:
        """Concatenates every rank's `inp`, by rank, into `out` of world_size * inp.numel()
        elements. Both are contiguous and of one dtype; inp has the same numel on every rank.
        """

    @abc.abstractmethod
    def reduce_scatter_single(
        self, out: Tensor, inp: Tensor, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduces `inp` over all ranks; rank r keeps the r-th of world_size equal parts, in `out`
        of inp.numel() / world_size elements. Both are contiguous and of one dtype. op: as
        all_reduce. Raises ValueError if inp cannot be cut into equal parts.
        """

    @abc.abstractmethod
    def gather(
        self, out: Tensor | None, inp: Tensor, dst: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Concatenates every rank's `inp`, by rank, into `out` of rank `dst`, of world_size *
        inp.numel() elements; out is None on the others. inp and out are as in all_gather_single.
        """

    @abc.abstractmethod
    def scatter(
        self, out: Tensor, inp: Tensor | None, src: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Cuts rank `src`'s `inp`, of world_size * out.numel() elements, into equal parts; rank r
        gets the r-th, in `out`. inp is None on the others. out has the same numel and dtype on
        every rank.
        """

    @abc.abstractmethod
    def all_to_all_single(
        self,
        out: Tensor,
        inp: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work | None:
        """Cuts `inp` into a part for each rank, and concatenates in `out` the parts that this rank
        gets, by the rank they come from. Both are contiguous, of one dtype, and share no memory.

        in_splits, out_splits: how many rows (of dimension 0) this rank sends to each rank, and gets
            from each. None: equal parts. If one rank passes them, every rank must: this call first
            compares them, and waits for that even with async_op, over NCCL for the device.

        Raises ValueError if the splits do not fit the tensors, or equal parts are impossible;
        MismatchError if the splits of two ranks do not fit each other.
        """

    @abc.abstractmethod
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Returns when every rank has called it; with async_op, `wait` of the Work does."""

    def send(self, tensor: Tensor, dst: int, *, async_op: bool = False) -> Work | None:
        """Passes `tensor` to rank `dst`, which receives it by recv(). The other ranks take no part,
        and collectives do not wait for it.

        tensor: as in broadcast; of the same numel and dtype in the recv(), else MismatchError on
            both ranks.

        Messages from one rank to another arrive in order. send() returns when the other rank has
        the message, or sooner: if two ranks send to each other, one of them needs async_op. If a
        message fails, later ones to that rank raise, too (after MismatchError only over NCCL).
        Raises TimeoutError if there is no recv().
        """
        channels = self.membership.channels_of(self)
        work: Work | None = channels.move(self, tensor, self.rank, dst, async_op=async_op)
        return work

    def recv(self, tensor: Tensor, src: int, *, async_op: bool = False) -> Work | None:
        """Receives what rank `src` sends to this one, in `tensor`. See send."""
        channels = self.membership.channels_of(self)
        work: Work | None = channels.move(self, tensor, src, self.rank, async_op=async_op)
        return work

    @abc.abstractmethod
    def abandon(self, *, in_any_case: bool = False) -> None:
        """Ends the step, and all collectives under way, on every rank: for a rank that cannot
        continue the step.

        On the other ranks the next collective that they wait for, over NCCL the next call, raises
        AbandonedError, which names this rank. After that all ranks can use the communicator again:
        over shared memory when this call returns, over NCCL from the next collective on. A Work
        launched before ends in the same way on all ranks that launched it: with its result, or with
        AbandonedError.

        All reducers of the communicator skip the step on every rank: gradients are None, and
        set_weight() or skip_step() for this step is forgotten.

        You may call it in a handler of any exception. Unless in_any_case, it does nothing if the
        exception being handled, or one that caused it, says that the step is abandoned already:
        AbandonedError, or what came out of a backward that the reducer abandoned by itself.

        Inside a backward it raises AbandonedError at the end, because the rest of the backward is
        of no use; but not if a hook handles an exception that it raised.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends this communicator immediately: on the other ranks by PeerLostError. For
        errors after which this rank cannot continue; abandon() ends one step only.
        """

    def rebuild(self, *, timeout: timedelta | None = None) -> Communicator:
        """Connects the remaining ranks after PeerLostError or TimeoutError, and new processes that
        wait in init() to replace lost ones. Returns the new communicator and closes this one. Every
        remaining rank calls it, then refresh() of each reducer, and catch_up(). Reducer.elastic()
        does all of this.

        Ranks get new numbers, in the order in which they were started. The call returns as soon as
        every rank has called it or is known to be lost.

        timeout: how long to wait for living ranks that do not call it. The others continue without
            them; they may join the next rebuild(). None: 30 s, or the timeout of init() if that is
            less.

        Raises FastcommError for ranks of a torch.distributed group or of split(); InitError if the
        store where the ranks met is gone with its host; TimeoutError if ranks are lost again and
        again meanwhile.
        """
        rebuilt: Communicator = self.membership.rebuild(
            self, min(self.timeout, _LONGEST_WAIT) if timeout is None else timeout
        )
        return rebuilt

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Splits the ranks into parts, each with a separate communicator, as MPI_Comm_split does.
        Collective. This communicator stays as it is; close each one separately.

        color: the number of the part that this rank belongs to. None: no part; the call returns
            None.
        key: orders the ranks of a part; ranks with equal keys keep their order.

        A part whose ranks share a host uses shared memory, even if this communicator has ranks on
        several hosts. Raises TypeError, on every rank, for anything but an integer; InitError, on
        the ranks of the part, if they cannot be connected.
        """
        part: Communicator | None = self.membership.split(self, color, key)
        return part

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the use of this communicator on this rank. Ranks that still wait for it raise
        PeerLostError. You may call it twice.
        """

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or (isinstance(value, SystemExit) and not value.code):
            self.close()
        else:
            self.abort()
